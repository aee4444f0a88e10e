"""Prefixes of prompts that are known as texts and not as tokens: of logs with prompts, and of `warmkv record`.

A request's body becomes parts, in the order in which APIs put them together: tools, system, messages. A token stands
for a number of bytes, the same for all prompts of a model, so that equal beginnings of texts have equal blocks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from warmkv.prefixes import breakpoints, hashing
from warmkv.prefixes.breakpoints import CachePlan

BYTES_PER_TOKEN = 4.0  # until a usage tells
LEAST_TOKENS = 1024  # of a prompt whose usage tells; the template's own tokens weigh too much in shorter ones
RANGE = (1.0, 16.0)  # bytes of text that a token may stand for
LONG_DATA = 1024  # characters from which an image, a file or a sound is known by its digest
NO_TEXT = re.compile(
    rb'"type": "(?:image|image_url|input_image|document|file|input_file|audio|input_audio|video|video_url)"'
)
"""What blocks have whose tokens do not follow from their text, as parts have it."""

BILLING_LINE = re.compile(r"x-anthropic-billing-header:[^\n]*(?:\n|\Z)")
"""What Claude Code puts first into its system prompt; it ends with a checksum of the request, so it is no prefix."""


class Part(NamedTuple):
    """A content block of a prompt, as the bytes by which it is known."""

    text: bytes
    ttl: str | None = None  # of its cache_control
    run: str = ""  # tool_use or tool_result: consecutive ones are one position


def is_whole(body: Mapping[str, Any]) -> bool:
    """Return False where the server puts an earlier conversation before what is sent, as the Responses API does."""
    return not (body.get("previous_response_id") or body.get("conversation"))


def parts_of(body: Mapping[str, Any]) -> list[Part]:
    """Return the parts of a request's body, of the Messages API or of OpenAI's chat, completions and Responses APIs."""
    found: list[Part] = []
    for tool in _items(body.get("tools")):
        found.append(_part("tool", tool))
    for name in ("system", "instructions"):
        found += _content("system", body.get(name))
    for name in ("messages", "input"):
        value = body.get(name)
        if isinstance(value, list):
            for message in value:
                found += _message(message)
        elif value is not None:
            found += _content("user", value)
    found += _content("prompt", body.get("prompt"))
    if isinstance(control := body.get("cache_control"), dict) and found:
        found[-1] = found[-1]._replace(ttl=_ttl(control))
    return found


def _message(message: Any) -> Iterator[Part]:
    if not isinstance(message, dict):
        yield _part("", message)
        return
    role = str(message.get("role", message.get("type", "")))
    content = message.get("content", message.get("parts"))
    rest = {key: value for key, value in message.items() if key not in ("role", "content", "parts") and value}
    yield from _content(role, content)
    if rest:  # calls of tools in the chat API, and items of the Responses API
        yield _part(role, rest)


def _content(role: str, content: Any) -> Iterator[Part]:
    for number, block in enumerate(content if isinstance(content, list) else [content]):
        text = block.get("text") if isinstance(block, dict) else block
        if role == "system" and not number and isinstance(text, str) and BILLING_LINE.match(text):
            text = BILLING_LINE.sub("", text, count=1)
            block = {**block, "text": text} if isinstance(block, dict) else text
        if block and text != "":
            yield _part(role, block)


def _part(role: str, block: Any) -> Part:
    if isinstance(block, str):
        return Part(f"{role}\0{block}\0".encode("utf-8", "surrogatepass"))
    if not isinstance(block, dict):
        return Part(_plain(role, _short(block)))
    kind, control = block.get("type"), block.get("cache_control")
    rest = _short(block)
    text = rest.get("text", rest.get("content"))
    if isinstance(text, str) and rest.keys() <= {"type", "text", "content"}:
        data = f"{role}\0{text}\0".encode("utf-8", "surrogatepass")
    else:
        data = _plain(role, rest)
    run = str(kind) if kind in ("tool_use", "tool_result") else ""
    return Part(data, _ttl(control) if isinstance(control, dict) else None, run)


def _plain(role: str, value: Any) -> bytes:
    return f"{role}\0{json.dumps(value, ensure_ascii=False, sort_keys=True)}\0".encode("utf-8", "surrogatepass")


def _short(value: Any, key: str = "") -> Any:
    """Leave marks out, and replace images, files and sounds by digests: their bytes say nothing of their tokens."""
    if isinstance(value, dict):
        return {name: _short(item, name) for name, item in value.items() if name != "cache_control"}
    if isinstance(value, list):
        return [_short(item) for item in value]
    if isinstance(value, str) and len(value) > LONG_DATA and (key == "data" or value.startswith("data:")):
        return hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return value


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else ()


def _ttl(control: Mapping[str, Any]) -> str:
    ttl = control.get("ttl")
    return ttl if isinstance(ttl, str) else "5m"


@dataclass(slots=True)
class Scale:
    """Bytes of text that a token stands for, by model: as given, or as the first long prompt's usage tells."""

    given: float | None = None
    known: dict[str, float] = field(default_factory=dict)

    def of(self, model: str) -> float:
        """Return the bytes that a token of a model stands for."""
        return self.given or self.known.get(model, BYTES_PER_TOKEN)

    def learn(self, model: str, parts: Sequence[Part], tokens: int) -> bool:
        """Take a prompt's reported tokens; True where they settle the model's scale, once and for all.

        A prompt with images, files or sounds settles nothing, nor one whose text cannot be what was counted.
        """
        if self.given is not None or model in self.known or tokens < LEAST_TOKENS:
            return False
        scale, (least, most) = sum(len(part.text) for part in parts) / tokens, RANGE
        if not least <= scale <= most or any(NO_TEXT.search(part.text) for part in parts):
            return False
        self.known[model] = round(scale, 3)
        return True


def joined(parts: Sequence[Part]) -> list[bool]:
    """Tell of each part if it is in one position with the part before it."""
    return [bool(part.run) and part.run == before.run for part, before in zip(parts, [Part(b""), *parts], strict=False)]


class TextPrompt(NamedTuple):
    """A prompt whose tokens are counted by its text."""

    tokens: int
    plan: CachePlan


def plan(parts: Sequence[Part], root: bytes, block_size: int, bytes_per_token: float) -> TextPrompt:
    """Name the prefixes of a prompt whose chain of hashes begins at `root`, blocks of `block_size` tokens each.

    Where a breakpoint lies is exact to a token.
    """
    text = b"".join([part.text for part in parts])
    step = max(1, round(block_size * bytes_per_token))
    hashes = hashing.chain(text, step, root)
    ends, end = [], 0  # in tokens
    byte_ends: dict[int, int] = {}
    for part in parts:
        end += len(part.text)
        ends.append(end * block_size // step)
        byte_ends.setdefault(ends[-1], end)

    def name(position: int) -> bytes:
        full = position // block_size
        parent = hashes[full - 1] if full else root
        if position == full * block_size:
            return parent
        return hashing.chained(parent, text[full * step : byte_ends[position]])

    marks = breakpoints.breakpoints(ends, [part.ttl for part in parts], 1)
    reads = breakpoints.read_candidates(ends, marks, joined=joined(parts))
    return TextPrompt(len(text) * block_size // step, breakpoints.plan_of(hashes, marks, reads, name))
