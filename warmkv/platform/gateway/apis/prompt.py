"""Messages to tokens, once: the chat template is rendered, cut around every content block, and tokenized.

Each piece is tokenized by itself, so a prefix that ends at a content block has the same tokens whatever follows it.
That is what lets a breakpoint be found again by the next request. It also keeps special tokens apart from what users
write: only the template's own pieces may contain any, and `<|im_end|>` in a message is plain text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from warmkv.platform.gateway.apis.errors import invalid

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


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt. `ends[i]` is the position behind content block i, `ttls[i]` its mark.

    `head` is the position behind the tools and the system prompt, 0 if there are none.
    """

    tokens: tuple[int, ...]
    ends: tuple[int, ...]
    ttls: tuple[str | None, ...]
    head: int = 0


def render(tokenizer: Any, turns: Sequence[Turn]) -> Prompt:
    """Return the prompt that asks for the next assistant message. Blocks of a message are joined by a line break.

    If the last turn is the assistant's, its text is the beginning of the answer. Raises ApiError (400) where the
    model's template refuses the messages, moves their content, or does not show tools as JSON.
    """
    prefilled = bool(turns) and turns[-1].role == "assistant"
    options = {"continue_final_message": True} if prefilled else {"add_generation_prompt": True}
    begin, end = unused_marks(turns)
    plain = _apply(tokenizer, turns, "", "", options)
    for candidate in (turns, [_stripped(turn) for turn in turns]):  # some templates strip messages
        marked = _apply(tokenizer, candidate, begin, end, options)
        if marked.replace(begin, "").replace(end, "") == plain:
            break
    else:
        raise invalid("This model's chat template changes message content, so cache breakpoints cannot be placed.")
    said = [index for index, (turn, block) in enumerate(_flat(turns)) if not _is_json(turn, block)]
    first, *rest = marked.split(begin)
    contents, templates = [], [first]
    for piece in rest:
        content, _, template = piece.rpartition(end)
        contents.append(content)
        templates.append(template)
    if len(contents) != len(said):
        raise invalid("This model's chat template leaves out or repeats message content.")
    cuts = _json_places(turns, templates)

    pieces: list[_Piece] = []
    for number, template in enumerate(templates):
        if number:
            pieces.append(_Piece(contents[number - 1], said[number - 1]))
        at = 0
        for start, stop, index in cuts[number]:
            pieces += _Piece(template[at:start]), _Piece(template[start:stop], index)
            at = stop
        pieces.append(_Piece(template[at:]))
    tokens: list[int] = []
    ends = [0] * len(_flat(turns))
    for (_, block), ids in zip(pieces, _tokenize(tokenizer, pieces), strict=True):
        tokens += ids
        if block is not None:
            ends[block] = len(tokens)
    # A template may show a block before one that comes earlier in the request, such as the system prompt before the
    # tools. The prefix that ends at a block covers all blocks before it in either order.
    ends = list(itertools.accumulate(ends, max))
    head = len(_flat(turns[: _leading(turns)]))
    ttls = tuple(block.ttl for _, block in _flat(turns))
    return Prompt(tuple(tokens), tuple(ends), ttls, ends[head - 1] if head else 0)


def render_text(tokenizer: Any, text: str) -> Prompt:
    """Return a prompt without a template, for plain completion."""
    tokens = tokenizer(text)["input_ids"]
    return Prompt(tuple(tokens), (len(tokens),), (None,))


class _Piece(NamedTuple):
    """Text that is tokenized by itself: a content block, or the template's own, where `block` is None."""

    text: str
    block: int | None = None


def _tokenize(tokenizer: Any, pieces: Sequence[_Piece]) -> list[list[int]]:
    """Return the token ids of every piece. Two calls for all of them: a call costs more than a short text."""
    found: list[list[int]] = [[] for _ in pieces]
    for own in (True, False):
        places = [at for at, piece in enumerate(pieces) if piece.text and (piece.block is None) == own]
        if places:
            batch = tokenizer(
                [pieces[at].text for at in places],
                add_special_tokens=False,
                split_special_tokens=not own,
                return_attention_mask=False,
                return_token_type_ids=False,
            )
            for at, ids in zip(places, batch["input_ids"], strict=True):
                found[at] = ids
    return found


def _flat(turns: Sequence[Turn]) -> list[tuple[Turn, ContentBlock]]:
    return [(turn, block) for turn in turns for block in turn.blocks]


def _is_json(turn: Turn, block: ContentBlock) -> bool:
    """Return True where the template shows a block as JSON, rather than as a message's text."""
    return turn.role == "tools" or block.call is not None


def _leading(turns: Sequence[Turn]) -> int:
    """Count the turns before the messages: the tools and the system prompt."""
    return sum(1 for _ in itertools.takewhile(lambda turn: turn.role in ("tools", "system"), turns))


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
    head = sum(not _is_json(turn, block) for turn, block in _flat(turns[: _leading(turns)]))
    for turn in turns:
        texts += sum(not _is_json(turn, block) for block in turn.blocks)
        for block in turn.blocks:
            if _is_json(turn, block):
                is_tool = turn.role == "tools"
                pieces = range(at, head + 1) if is_tool else range(texts, texts + 1)
                forms = _forms(turn, block)
                order = usual.get(is_tool, range(len(forms)))
                found = (
                    (piece, start, start + len(forms[kind]), kind)
                    for piece in pieces
                    for kind in order
                    if (start := templates[piece].find(forms[kind], offset if piece == at else 0)) >= 0
                )
                place = next(found, None)
                if place is None:
                    raise invalid("This model's chat template does not show tools and their calls as JSON.")
                at, start, offset, kind = place
                usual[is_tool] = (kind, *(other for other in range(len(forms)) if other != kind))
                places[at].append((start, offset, index))
            index += 1
    return places


def _forms(turn: Turn, block: ContentBlock) -> list[str]:
    """Return the forms in which templates write a call's arguments, or a tool: whole, or what is under `function`."""
    value = block.value
    parts = (value, value["function"]) if turn.role == "tools" else (value,)
    return [to_json(part, indent) for part in parts for indent in (None, 4)]


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON as the templates' own filter writes it."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _apply(tokenizer: Any, turns: Sequence[Turn], begin: str, end: str, options: dict[str, bool]) -> str:
    """Render the conversation, the text of every message's content block between `begin` and `end`."""
    if not getattr(tokenizer, "chat_template", None):
        raise invalid("This model has no chat template; use /v1/completions.")
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


def unused_marks(turns: Sequence[Turn]) -> tuple[str, str]:
    """Return two strings that no content block contains, in linear time: they carry the digest of all blocks.

    A text that contains its own digest cannot be found. Private-use characters, so that templates leave them alone.
    """
    digest = hashlib.blake2b(digest_size=16)
    for _, block in _flat(turns):
        digest.update(block.text.encode(errors="surrogatepass"))
    mark = "".join(chr(0xE100 + byte) for byte in digest.digest())
    return f"\ue000{mark}\ue002", f"\ue001{mark}\ue002"
