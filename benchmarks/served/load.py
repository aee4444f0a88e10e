"""Send the same load to any server that completes prompts over HTTP, and measure what its clients see."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Load:
    """So many clients, each with one request after the other. Lengths in tokens."""

    name: str
    clients: int
    prompt: int
    new_tokens: int
    requests: int  # of every client
    shared: int = 0  # of a prompt, at its beginning: the same for all clients and requests
    again: bool = False  # a client's prompts are all the same
    held: tuple[str, ...] = ()  # figures that a peer in the same run is not to beat


LOADS = (
    Load("16x20/250", 16, 20, 250, 2, held=("tokens_per_second", "between_seconds")),
    Load("16x400/7", 16, 400, 7, 40, held=("requests_per_second", "first_token_seconds")),
    Load("1x800/64", 1, 800, 64, 24, again=True, held=("first_token_seconds", "between_seconds")),
    Load("8x8192/16", 8, 8192, 16, 2, held=("requests_per_second",)),
    Load("8x8192/16-warm", 8, 8192, 16, 4, shared=7372, held=("requests_per_second", "first_token_seconds")),
)
"""The rows of the table in README.md. The last two tell what a prefix of 90% saves at the client.

Where nothing is shared only the rate is held: clients that wait for one another's prompts see a first token the sooner,
the slower the others' tokens come.
"""


@dataclass(frozen=True, slots=True)
class Server:
    """What is asked. `cpu` returns the CPU seconds that its processes have used so far, by part.

    `processes` returns those that stand still while another server is asked.
    """

    name: str
    url: str
    model: str
    extra: Mapping[str, object]  # of a request's body: how this server is told to go on after the end of a text
    cpu: Callable[[], dict[str, float]]
    outside: tuple[str, ...]  # the parts that are not the engine
    processes: Callable[[], Collection[int]] = tuple


@dataclass(slots=True)
class Measured:
    """What the clients of a load saw, in seconds, and what the server's processes used."""

    wall: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)  # two chunks of an answer
    cpu: dict[str, float] = field(default_factory=dict)  # seconds, by part of the server


def single_token_words(model: Path) -> list[str]:
    """Return words that a model's tokenizer takes as one token each, so that words count tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    words = (text.strip() for text in (tokenizer.decode([token]) for token in range(len(tokenizer))))
    pairs = {word: tokenizer.encode(f" {word} {word}", add_special_tokens=False) for word in words if word.isalpha()}
    return sorted(word for word, pair in pairs.items() if len(pair) == 2)


async def measure(server: Server, load: Load, words: Sequence[str], seed: int) -> Measured:
    """Have all clients ask. Prompts are drawn from the words by `seed`; only what the load says is shared."""
    shared = _drawn(random.Random(f"shared {seed}"), words, load.shared)
    if load.shared:
        await _ask(server, shared, 1, Measured())  # it is warm from the first request on
    seen, before, began = Measured(), server.cpu(), time.perf_counter()

    async def client(name: int) -> None:
        for turn in range(load.requests):
            own = random.Random(f"{seed} {name} {0 if load.again else turn}")
            prompt = shared + _drawn(own, words, load.prompt - load.shared)
            await _ask(server, prompt, load.new_tokens, seen)

    await asyncio.gather(*(client(name) for name in range(load.clients)))
    seen.wall = time.perf_counter() - began
    seen.cpu = {part: used - before[part] for part, used in server.cpu().items() if part in before}
    if load.again:
        del seen.first[0]  # it was cold
    return seen


def _drawn(chance: random.Random, words: Sequence[str], count: int) -> str:
    return "".join(f" {word}" for word in chance.choices(words, k=count)) if count else ""


async def _ask(server: Server, prompt: str, new_tokens: int, seen: Measured) -> None:
    """Stream one completion over a connection of its own. Raises RuntimeError where it is no whole answer."""
    at = urlsplit(server.url)
    body = {"model": server.model, "prompt": prompt, "max_tokens": new_tokens, "stream": True, "temperature": 0}
    body |= {"stream_options": {"include_usage": True}} | server.extra
    data = json.dumps(body).encode()
    head = f"POST {at.path.rstrip('/')}/v1/completions HTTP/1.1\r\nhost: {at.netloc}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    began = last = time.perf_counter()
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(head.encode() + data)
    received = bytearray()
    while chunk := await reader.read(1 << 16):
        if b'"text"' in chunk:
            now = time.perf_counter()
            (seen.between if b'"text"' in received else seen.first).append(now - (last if received else began))
            last = now
        received += chunk
    writer.close()
    usages = [line for line in received.split(b"\n") if b'"completion_tokens"' in line]
    if b"[DONE]" not in received or not usages:
        raise RuntimeError(f"no whole answer: {bytes(received[-500:])!r}")
    usage = usages[-1]
    seen.tokens += json.loads(usage[usage.index(b"{") : usage.rindex(b"}") + 1])["usage"]["completion_tokens"]
