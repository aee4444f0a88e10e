"""Messages to tokens, once: the chat template is rendered, cut behind every content block, and tokenized.

Each piece is tokenized by itself, so a prefix that ends at a content block has the same tokens whatever follows it.
That is what lets a breakpoint be found again by the next request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from warmkv.platform.gateway.errors import invalid


@dataclass(frozen=True, slots=True)
class Block:
    """A content block: text, and the TTL name if it is marked with cache_control."""

    text: str
    ttl: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """A message: who speaks, and its content blocks."""

    role: str  # system, user, assistant
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt. `ends[i]` is the position behind content block i, `ttls[i]` its mark."""

    tokens: tuple[int, ...]
    ends: tuple[int, ...]
    ttls: tuple[str | None, ...]


def render(tokenizer: Any, turns: Sequence[Turn]) -> Prompt:
    """The prompt that asks for the next assistant message. Blocks of a message are joined by a line break.

    If the last turn is the assistant's, its text is the beginning of the answer. Raises ApiError (400) where the
    model's template refuses the messages or moves their content.
    """
    prefilled = bool(turns) and turns[-1].role == "assistant"
    options = {"continue_final_message": True} if prefilled else {"add_generation_prompt": True}
    mark = _unused_mark(turns)
    plain = _apply(tokenizer, turns, "", options)
    marked = _apply(tokenizer, turns, mark, options)
    if prefilled and not marked.endswith(mark):
        marked += mark  # the end of a continued message is cut to its text
    if marked.replace(mark, "") != plain:
        raise invalid("This model's chat template changes message content; strip leading and trailing whitespace.")
    pieces = marked.split(mark)
    tokens: list[int] = []
    ends = []
    for piece in pieces:
        tokens += tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
        ends.append(len(tokens))
    blocks = [block for turn in turns for block in turn.blocks]
    if len(ends) != len(blocks) + 1:
        raise invalid("This model's chat template leaves out or repeats message content.")
    return Prompt(tuple(tokens), tuple(ends[:-1]), tuple(block.ttl for block in blocks))


def render_text(tokenizer: Any, text: str) -> Prompt:
    """A prompt without a template, for plain completion."""
    tokens = tokenizer(text)["input_ids"]
    return Prompt(tuple(tokens), (len(tokens),), (None,))


def _apply(tokenizer: Any, turns: Sequence[Turn], mark: str, options: dict[str, bool]) -> str:
    messages = [
        {"role": turn.role, "content": (mark and "\n".join(b.text + mark for b in turn.blocks)) or _join(turn)}
        for turn in turns
    ]
    if not getattr(tokenizer, "chat_template", None):
        raise invalid("This model has no chat template; use /v1/completions.")
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # templates raise what they like
        raise invalid(f"The model's chat template refuses the messages: {error}") from None
    return text


def _join(turn: Turn) -> str:
    return "\n".join(block.text for block in turn.blocks)


def _unused_mark(turns: Sequence[Turn]) -> str:
    """A string that no message contains; made of private-use characters, so templates leave it alone."""
    text = "".join(block.text for turn in turns for block in turn.blocks)
    mark = "\ue000\ue001"
    while mark in text:
        mark += "\ue001"
    return mark
