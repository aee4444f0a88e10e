"""Messages to text, once: the chat template is rendered and cut around every content block (tokens.py goes on)."""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from warmkv.platform.gateway.apis.errors import ApiError, invalid
from warmkv.platform.gateway.apis.template_options import END_OF_THINKING, split_thinking, thinking_key
from warmkv.platform.gateway.apis.templates import uses_of_content
from warmkv.platform.gateway.apis.tokens import Outline, Piece, Rendered
from warmkv.platform.gateway.apis.tool_places import Cuts, places_of
from warmkv.platform.gateway.apis.turns import ContentBlock, Role, Turn, flat, is_json, leading
from warmkv.prefixes.misses import content_hash, names_of


class _Marks(NamedTuple):
    """What stands around texts, thinking, and strings in tools and calls, while a template is rendered."""

    begin: str
    end: str
    think: str
    thought: str
    quote: str
    unquote: str

    def within(self, text: str) -> str:
        """Return a text without marks."""
        for mark in self:
            text = text.replace(mark, "")
        return text

    def apart(self, text: str) -> list[tuple[str, str]]:
        """Return a text cut at its marks, each piece with what it is: a `thought`, a `quote`, or neither."""
        pieces = []
        for number, piece in enumerate(_alternating(text, self.think, self.thought)):
            if number % 2:
                pieces.append(("thought", piece))
            else:
                inner = enumerate(_alternating(piece, self.quote, self.unquote))
                pieces += [("quote" if place % 2 else "", part) for place, part in inner]
        return pieces

    def blanked(self, text: str) -> str:
        """Return a text of the same length without what its thoughts and quotes say."""
        around = len(self.think) + len(self.thought)  # as long as those of quotes
        return "".join("\0" * (len(piece) + around) if kind else piece for kind, piece in self.apart(text))


def _alternating(text: str, begin: str, end: str) -> list[str]:
    """Return a text cut at marks; every second piece is within them."""
    first, *rest = text.split(begin)
    pieces = [first]
    for piece in rest:
        inner, _, after = piece.partition(end)
        pieces += inner, after
    return pieces


_NO_MARKS = _Marks("", "", "", "", "", "")


def render(tokenizer: Any, turns: Sequence[Turn], variables: Mapping[str, Any] | None = None) -> Rendered:
    """Return the prompt that asks for the next assistant message. Blocks of a message are joined by a line break.

    If the last turn is the assistant's, its text is the beginning of the answer. `variables` are the template's own.
    Thinking of earlier answers is given to the template, which shows what it wants of it. A system message within the
    conversation is shown as such, or as part of the user's where the template has no such messages. Messages in a row
    of one role are one message where the template wants roles to alternate. Tools that the template
    does not show as JSON end where the first message's text begins, and such calls where the next one's does.
    Raises ApiError (400) where the model's template refuses the messages, moves their content, or shows no tools.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise invalid("This model has no chat template; use /v1/completions.")
    turns = _as_users_text(tokenizer, turns)
    source = template if isinstance(template, str) else ""
    key = thinking_key(source)
    if END_OF_THINKING in source:
        turns = [_thinking_apart(turn) for turn in turns]
    prefilled = bool(turns) and turns[-1].role == "assistant"
    options = {"continue_final_message": True} if prefilled else {"add_generation_prompt": True}
    apply = partial(_apply, tokenizer, key=key, options={**(variables or {}), **options})
    marks = _marks()
    turns, marked = _alternating_turns(turns, partial(apply, marks=marks))
    uses = uses_of_content(source) if source else None
    texts = ([block.text for block in turn.blocks if not is_json(turn, block)] for turn in turns)
    if uses is None or not all(uses.ignore_marks(said) for said in texts if said):
        plain = apply(turns, _NO_MARKS)
        if marks.within(marked) != plain:  # some templates strip messages
            turns = [_stripped(turn) for turn in turns]
            marked = apply(turns, marks)
            if marks.within(marked) != plain:
                raise invalid(
                    "This model's chat template changes message content, so cache breakpoints cannot be placed."
                )
    blocks = flat(turns)
    said = [index for index, (turn, block) in enumerate(blocks) if not is_json(turn, block)]

    def found() -> tuple[list[str], list[str], Cuts]:
        contents, templates = _apart(marked, marks)
        if len(contents) != len(said):
            raise invalid("This model's chat template leaves out or repeats message content.")
        return contents, templates, places_of(turns, list(map(marks.blanked, templates)))

    contents, templates, cuts = found()
    if cuts.not_json:  # strings in them must be told from what the template writes
        once, marked = marked, apply(_quoted(turns, cuts.not_json, marks), marks)
        if marks.within(marked) != marks.within(once):
            raise invalid("This model's chat template changes what is in tools and their calls.")
        contents, templates, cuts = found()

    pieces: list[Piece] = []
    shown: list[int] = []
    for number, own in enumerate(templates):
        if number:
            pieces.append(Piece(contents[number - 1], "content", said[number - 1]))
        at = 0
        for start, stop, index in [*cuts.places[number], (len(own), len(own), None)]:
            for kind, text in marks.apart(own[at:start]):
                pieces.append(Piece(text, "content" if kind else "template"))
                if kind == "thought":
                    shown.append(said[number - 1] if number else 0)
            if index is not None:
                pieces.append(Piece(own[start:stop], "content", index))
            at = stop
    pieces = [piece for piece in pieces if piece.text or piece.block is not None]
    ttls = tuple(block.ttl for _, block in blocks)
    return Rendered(pieces, ttls, len(flat(leading(turns))), _outline(turns, shown))


def _apart(marked: str, marks: _Marks) -> tuple[list[str], list[str]]:
    """Return the texts of a rendered conversation, and what the template has before, between and behind them."""
    first, *rest = marked.split(marks.begin)
    contents, templates = [], [first]
    for piece in rest:
        content, _, own = piece.rpartition(marks.end)
        contents.append(content)
        templates.append(own)
    return contents, templates


def _outline(turns: Sequence[Turn], shown: Sequence[int]) -> Outline:
    """Return what is known of the blocks of turns, of which thinking was shown behind some blocks."""
    blocks = flat(turns)
    runs = ["result" if turn.role == "tool" else "call" if block.call is not None else "" for turn, block in blocks]
    joined = (bool(run) and run == before for before, run in itertools.pairwise(["", *runs]))
    contents = tuple(content_hash(turn.role, block.call or "", block.text) for turn, block in blocks)
    messages = (turn for turn in turns if turn.role != "tools")
    places = [("messages", number) for number, turn in enumerate(messages) for _ in turn.blocks]
    unknown = itertools.chain(((turn.role,) for turn, _ in blocks if turn.role == "tools"), places)
    return Outline(
        tuple(block.place or place for (_, block), place in zip(blocks, unknown, strict=True)),
        contents,
        names_of(contents),
        tuple(joined),
        tuple(shown),
    )


def _thinking_apart(turn: Turn) -> Turn:
    """Return an answer's turn with the thinking in its text apart, as its template would find it."""
    if turn.role != "assistant" or not any(END_OF_THINKING in block.text for block in turn.blocks):
        return turn
    thinking, blocks = [turn.thinking], list[ContentBlock]()
    for block in turn.blocks:
        thought, text = ("", block.text) if block.call is not None else split_thinking(block.text)
        thinking.append(thought)
        blocks.append(block if text == block.text else replace(block, text=text))
    return Turn(turn.role, tuple(blocks), "\n".join(filter(None, thinking)))


def _as_users_text(tokenizer: Any, turns: Sequence[Turn]) -> Sequence[Turn]:
    """Return turns without system messages within the conversation, if the template does not show them there.

    They join the user's messages beside them, since such templates want roles to alternate.
    """
    first = next((number for number, turn in enumerate(turns) if turn.role != "tools"), 0)
    if all(turn.role != "system" for turn in turns[first + 1 :]) or _shows_system_messages(tokenizer):
        return turns
    found: list[Turn] = []
    joins = False  # whether the last turn takes in a user's that follows
    for number, turn in enumerate(turns):
        reminder = turn.role == "system" and number > first
        if reminder:
            texts = (f"<system-reminder>\n{block.text}\n</system-reminder>" for block in turn.blocks)
            turn = Turn(
                "user", tuple(replace(block, text=text) for block, text in zip(turn.blocks, texts, strict=True))
            )
        if found and found[-1].role == turn.role == "user" and (reminder or joins):
            found[-1] = Turn("user", (*found[-1].blocks, *turn.blocks))
        else:
            found.append(turn)
        joins = reminder
    return found


_SAME_ROLES: tuple[tuple[Role, Role], ...] = (("user", "user"), ("assistant", "assistant"))
_TEXT_BEHIND_RESULTS: tuple[Role, Role] = ("tool", "user")


def _alternating_turns(turns: Sequence[Turn], apply: Callable[[Sequence[Turn]], str]) -> tuple[Sequence[Turn], str]:
    """Return turns that the template takes, and what it makes of them: as they are, or else combined.

    First those of one role in a row; then also the user's text behind results, which joins the last of these, since
    templates that count answers without calls want none there (Mistral). Raises ApiError (400) as for the turns as they
    are.
    """
    try:
        return turns, apply(turns)
    except ApiError as error:
        for pairs in (_SAME_ROLES, (*_SAME_ROLES, _TEXT_BEHIND_RESULTS)):
            if len(combined := _combined(turns, pairs)) < len(turns):
                with contextlib.suppress(ApiError):
                    return combined, apply(combined)
        raise error


def _combined(turns: Sequence[Turn], pairs: Collection[tuple[Role, Role]]) -> list[Turn]:
    """Return turns of which each takes in the next one, where their roles are such a pair."""
    found: list[Turn] = []
    for turn in turns:
        before = found[-1] if found else None
        if before is not None and (before.role, turn.role) in pairs:
            thinking = "\n".join(filter(None, (before.thinking, turn.thinking)))
            found[-1] = Turn(before.role, (*before.blocks, *turn.blocks), thinking)
        else:
            found.append(turn)
    return found


def _shows_system_messages(tokenizer: Any) -> bool:
    """Return True if the template shows a system message where it stands in a conversation."""
    roles: tuple[Role, ...] = ("user", "system", "assistant", "system", "user")
    said = [Turn(role, (ContentBlock(f"A{number}"),)) for number, role in enumerate(roles)]
    try:
        text = _apply(tokenizer, said, _NO_MARKS, key=None, options={"add_generation_prompt": True})
    except ApiError:
        return False
    return bool(re.search("A0.*A1.*A2.*A3.*A4", text, re.DOTALL))


def _quoted(turns: Sequence[Turn], blocks: set[int], marks: _Marks) -> list[Turn]:
    """Return turns with marks around the strings in some calls, and around descriptions in some tools."""
    numbers = itertools.count()

    def quoted(block: ContentBlock) -> ContentBlock:
        if next(numbers) not in blocks:
            return block
        return replace(block, value=_quote(block.value, marks, everywhere=block.call is not None))

    return [replace(turn, blocks=tuple(map(quoted, turn.blocks))) for turn in turns]


def _quote(value: Any, marks: _Marks, *, everywhere: bool) -> Any:
    if isinstance(value, dict):
        return {
            name: _quote(item, marks, everywhere=everywhere or (name == "description" and isinstance(item, str)))
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_quote(item, marks, everywhere=everywhere) for item in value]
    return marks.quote + value + marks.unquote if everywhere and isinstance(value, str) else value


def _apply(tokenizer: Any, turns: Sequence[Turn], marks: _Marks, *, key: str | None, options: Mapping[str, Any]) -> str:
    """Render the conversation with marks around texts and thinking, which goes under `key`."""
    tools = [block.value for turn, block in flat(turns) if turn.role == "tools"]
    calls = _Calls()
    messages = [_message(turn, marks, key, calls) for turn in turns if turn.role != "tools"]
    try:
        text: str = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **options)
    except Exception as error:  # templates raise what they like
        raise invalid(f"The model's chat template refuses the messages: {error}") from None
    return text


@dataclass(slots=True)
class _Calls:
    """Calls so far: how many, and by the request's ids the last ones' ids and names for the template."""

    count: int = 0
    known: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add(self, block: ContentBlock) -> dict[str, Any]:
        """Return a call for the template. Its id has nine letters and digits, as Mistral's wants."""
        id_, name = f"call{self.count:05}", block.call or ""
        self.count += 1
        if block.id is not None:
            self.known[block.id] = (id_, name)
        return {"id": id_, "type": "function", "function": {"name": name, "arguments": block.value}}


def _message(turn: Turn, marks: _Marks, key: str | None, known: _Calls) -> dict[str, Any]:
    said = "\n".join(marks.begin + block.text + marks.end for block in turn.blocks if block.call is None)
    calls = [known.add(block) for block in turn.blocks if block.call is not None]
    message = {"role": turn.role, "content": said, **({"tool_calls": calls} if calls else {})}
    if turn.role == "tool" and (answered := known.known.get(turn.blocks[0].id or "")) is not None:
        message["tool_call_id"], message["name"] = answered
    text = any(block.text for block in turn.blocks if block.call is None)
    if turn.thinking and key and not (key == "thinking" and text and calls):  # gpt-oss refuses all three
        message[key] = marks.think + turn.thinking + marks.thought
    return message


def _stripped(turn: Turn) -> Turn:
    """Return the turn without whitespace at the two ends of its text."""
    blocks = list(turn.blocks)
    if said := [i for i, block in enumerate(blocks) if not is_json(turn, block)]:
        blocks[said[0]] = replace(blocks[said[0]], text=blocks[said[0]].text.lstrip())
        blocks[said[-1]] = replace(blocks[said[-1]], text=blocks[said[-1]].text.rstrip())
    return replace(turn, blocks=tuple(blocks))


def _marks() -> _Marks:
    """Return strings that no text contains, for nobody knows them before. Templates leave private use alone."""
    mark = "".join(chr(0xE100 + byte) for byte in secrets.token_bytes(16))
    return _Marks(*(f"{first}{mark}\ue002" for first in "\ue000\ue001\ue003\ue004\ue005\ue006"))
