"""Messages to tokens, once: the chat template is rendered, cut around every content block, and tokenized.

Each piece is tokenized by itself, so a prefix that ends at a content block has the same tokens whatever follows it.
That is what lets a breakpoint be found again by the next request. It also keeps special tokens apart from what users
write: only the template's own pieces may contain any, and `<|im_end|>` in a message is plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    begin, end = _unused_marks(turns)
    plain = _apply(tokenizer, turns, "", "", options)
    for candidate in (turns, [_stripped(turn) for turn in turns]):  # some templates strip messages
        marked = _apply(tokenizer, candidate, begin, end, options)
        if marked.replace(begin, "").replace(end, "") == plain:
            break
    else:
        raise invalid("This model's chat template changes message content, so cache breakpoints cannot be placed.")
    tokens: list[int] = []
    ends = []
    for piece in marked.split(begin):
        content, closed, template = piece.rpartition(end)  # no content before the first mark
        tokens += _tokenize(tokenizer, content, special=False)
        if closed:
            ends.append(len(tokens))
        tokens += _tokenize(tokenizer, template, special=True)
    blocks = [block for turn in turns for block in turn.blocks]
    if len(ends) != len(blocks):
        raise invalid("This model's chat template leaves out or repeats message content.")
    return Prompt(tuple(tokens), tuple(ends), tuple(block.ttl for block in blocks))


def _tokenize(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    if not text:
        return []
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=not special)["input_ids"]
    return ids


def render_text(tokenizer: Any, text: str) -> Prompt:
    """A prompt without a template, for plain completion."""
    tokens = tokenizer(text)["input_ids"]
    return Prompt(tuple(tokens), (len(tokens),), (None,))


def _apply(tokenizer: Any, turns: Sequence[Turn], begin: str, end: str, options: dict[str, bool]) -> str:
    """The rendered conversation, every content block between `begin` and `end`."""
    if not getattr(tokenizer, "chat_template", None):
        raise invalid("This model has no chat template; use /v1/completions.")
    messages = [
        {"role": turn.role, "content": "\n".join(begin + block.text + end for block in turn.blocks)} for turn in turns
    ]
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # templates raise what they like
        raise invalid(f"The model's chat template refuses the messages: {error}") from None
    return text


def _stripped(turn: Turn) -> Turn:
    """The turn without whitespace at its two ends."""
    blocks = list(turn.blocks)
    blocks[0] = replace(blocks[0], text=blocks[0].text.lstrip())
    blocks[-1] = replace(blocks[-1], text=blocks[-1].text.rstrip())
    return Turn(turn.role, tuple(blocks))


def _unused_marks(turns: Sequence[Turn]) -> tuple[str, str]:
    """Two strings that no message contains; of private-use characters, so templates leave them alone."""
    text = "".join(block.text for turn in turns for block in turn.blocks)
    mark = "\ue000"
    while mark in text:
        mark += "\ue000"
    return f"\ue001{mark}\ue002", f"\ue001{mark}\ue003"
