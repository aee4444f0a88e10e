"""Messages to text, once: the chat template is rendered and cut around every content block (tokens.py goes on)."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal

from warmkv.platform.gateway.apis.errors import invalid
from warmkv.platform.gateway.apis.templates import uses_of_content
from warmkv.platform.gateway.apis.tokens import Piece, Rendered

Role = Literal["tools", "system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ContentBlock:
    """A content block: its text, and the TTL name if it is marked with cache_control.

    In a turn of `tools` the text is a tool's definition as JSON; where `call` names a tool, its arguments as JSON. Of
    both, `value` is the same as Python objects.
    """

    text: str
    ttl: str | None = None
    call: str | None = None
    value: Any = field(default=None, compare=False)

    @classmethod
    def of_value(cls, value: Any, ttl: str | None = None, call: str | None = None) -> ContentBlock:
        """Return the block of a tool's definition, or of the arguments of a call."""
        return cls(to_json(value), ttl, call, value)


@dataclass(frozen=True, slots=True)
class Turn:
    """A message: who speaks, and its content blocks. The tools come first, as a turn of their own."""

    role: Role
    blocks: tuple[ContentBlock, ...]


def render(tokenizer: Any, turns: Sequence[Turn]) -> Rendered:
    """Return the prompt that asks for the next assistant message. Blocks of a message are joined by a line break.

    If the last turn is the assistant's, its text is the beginning of the answer. Raises ApiError (400) where the
    model's template refuses the messages, moves their content, or does not show tools as JSON.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise invalid("This model has no chat template; use /v1/completions.")
    prefilled = bool(turns) and turns[-1].role == "assistant"
    options = {"continue_final_message": True} if prefilled else {"add_generation_prompt": True}
    begin, end = _marks()
    marked = _apply(tokenizer, turns, begin, end, options)
    uses = uses_of_content(template) if isinstance(template, str) else None
    texts = ([block.text for block in turn.blocks if not _is_json(turn, block)] for turn in turns)
    if uses is None or not all(uses.ignore_marks(said) for said in texts if said):
        plain = _apply(tokenizer, turns, "", "", options)
        if marked.replace(begin, "").replace(end, "") != plain:  # some templates strip messages
            marked = _apply(tokenizer, [_stripped(turn) for turn in turns], begin, end, options)
            if marked.replace(begin, "").replace(end, "") != plain:
                raise invalid(
                    "This model's chat template changes message content, so cache breakpoints cannot be placed."
                )
    blocks = _flat(turns)
    said = [index for index, (turn, block) in enumerate(blocks) if not _is_json(turn, block)]
    first, *rest = marked.split(begin)
    contents, templates = [], [first]
    for piece in rest:
        content, _, own = piece.rpartition(end)
        contents.append(content)
        templates.append(own)
    if len(contents) != len(said):
        raise invalid("This model's chat template leaves out or repeats message content.")
    cuts = _json_places(turns, templates)

    pieces: list[Piece] = []
    for number, own in enumerate(templates):
        if number:
            pieces.append(Piece(contents[number - 1], "content", said[number - 1]))
        at = 0
        for start, stop, index in cuts[number]:
            pieces += Piece(own[at:start], "template"), Piece(own[start:stop], "content", index)
            at = stop
        pieces.append(Piece(own[at:], "template"))
    ttls = tuple(block.ttl for _, block in blocks)
    return Rendered(
        [piece for piece in pieces if piece.text or piece.block is not None], ttls, len(_flat(_leading(turns)))
    )


def _flat(turns: Sequence[Turn]) -> list[tuple[Turn, ContentBlock]]:
    return [(turn, block) for turn in turns for block in turn.blocks]


def _is_json(turn: Turn, block: ContentBlock) -> bool:
    """Return True where the template shows a block as JSON, rather than as a message's text."""
    return turn.role == "tools" or block.call is not None


def _leading(turns: Sequence[Turn]) -> Sequence[Turn]:
    """Return the turns before the messages: the tools and the system prompt."""
    return list(itertools.takewhile(lambda turn: turn.role in ("tools", "system"), turns))


def _json_places(turns: Sequence[Turn], templates: Sequence[str]) -> list[list[tuple[int, int, int]]]:
    """Find the tools and calls in the template: for each of its pieces (start, stop, content block).

    `templates[i]` stands behind the text of i blocks. Tools stand somewhere before the first message's text, a call
    behind the text of its message. The first match counts, so a place does not depend on what follows it. The form in
    which the first tool and the first call are found is tried first for all others, so that a search ends where it
    finds something and all of them together are linear.
    """
    places: list[list[tuple[int, int, int]]] = [[] for _ in templates]
    texts = index = at = offset = 0
    usual: dict[bool, Sequence[int]] = {}  # order in which forms are tried, of tools and of calls
    head = sum(not _is_json(turn, block) for turn, block in _flat(_leading(turns)))
    for turn in turns:
        texts += sum(not _is_json(turn, block) for block in turn.blocks)
        for block in turn.blocks:
            if _is_json(turn, block):
                is_tool = turn.role == "tools"
                pieces = range(at, head + 1) if is_tool else range(texts, texts + 1)
                form = cache(partial(_form, turn, block))
                kinds = range(4 if is_tool else 2)
                order = usual.get(is_tool, kinds)
                found = (
                    (piece, start, start + len(form(kind)), kind)
                    for piece in pieces
                    for kind in order
                    if (start := templates[piece].find(form(kind), offset if piece == at else 0)) >= 0
                )
                place = next(found, None)
                if place is None:
                    raise invalid("This model's chat template does not show tools and their calls as JSON.")
                at, start, offset, kind = place
                usual[is_tool] = (kind, *(other for other in kinds if other != kind))
                places[at].append((start, offset, index))
            index += 1
    return places


def _form(turn: Turn, block: ContentBlock, kind: int) -> str:
    """Return a form in which templates write a call's arguments, or a tool: whole, or what is under `function`."""
    if kind == 0:
        return block.text
    return to_json(block.value["function"] if kind > 1 else block.value, 4 if kind % 2 else None)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON as the templates' own filter writes it."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _apply(tokenizer: Any, turns: Sequence[Turn], begin: str, end: str, options: dict[str, bool]) -> str:
    """Render the conversation, the text of every message's content block between `begin` and `end`."""
    tools = [block.value for turn, block in _flat(turns) if turn.role == "tools"]
    messages = [_message(turn, begin, end) for turn in turns if turn.role != "tools"]
    try:
        text: str = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **options)
    except Exception as error:  # templates raise what they like
        raise invalid(f"The model's chat template refuses the messages: {error}") from None
    return text


def _message(turn: Turn, begin: str, end: str) -> dict[str, Any]:
    said = "\n".join(begin + block.text + end for block in turn.blocks if block.call is None)
    calls = [
        {"type": "function", "function": {"name": block.call, "arguments": block.value}}
        for block in turn.blocks
        if block.call is not None
    ]
    return {"role": turn.role, "content": said, **({"tool_calls": calls} if calls else {})}


def _stripped(turn: Turn) -> Turn:
    """Return the turn without whitespace at the two ends of its text."""
    blocks = list(turn.blocks)
    if said := [i for i, block in enumerate(blocks) if not _is_json(turn, block)]:
        blocks[said[0]] = replace(blocks[said[0]], text=blocks[said[0]].text.lstrip())
        blocks[said[-1]] = replace(blocks[said[-1]], text=blocks[said[-1]].text.rstrip())
    return Turn(turn.role, tuple(blocks))


def _marks() -> tuple[str, str]:
    """Return two strings that no text contains, for nobody knows them before. Templates leave private use alone."""
    mark = "".join(chr(0xE100 + byte) for byte in secrets.token_bytes(16))
    return f"\ue000{mark}\ue002", f"\ue001{mark}\ue002"
