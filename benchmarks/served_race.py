"""How fast is the service through HTTP, and what does a token cost outside the engine? With a light client of its own.

See README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if not __package__:  # started as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

if TYPE_CHECKING:
    from benchmarks.report import Figure

TICKS = os.sysconf("SC_CLK_TCK")
PARTS = {"gateway": "warmkv:gateway", "proxy": "ProxyActor", "replica": "warmkv:replica"}
"""Processes of the service, by a part of their titles."""


@dataclass(frozen=True, slots=True)
class Load:
    """So many clients, each with one request after the other."""

    name: str
    clients: int
    words: int  # of a prompt; with the shipped model a word is a token or two
    new_tokens: int
    requests: int  # of every client
    tokens_target: float | None = None  # tokens/s
    first_target: float | None = None  # seconds, median


LOADS = (
    Load("16x20/250", 16, 20, 250, 2, tokens_target=2000),
    Load("16x400/7", 16, 400, 7, 8, first_target=0.105),
    Load("1x800/64", 1, 800, 64, 4, first_target=0.014),
)
CPU_TARGET = 60.0
"""Microseconds of CPU for a token in gateways and proxies."""


@dataclass(slots=True)
class Measured:
    """What the clients of a load saw, in seconds, and what the service's processes used."""

    wall: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)  # two chunks of an answer
    cpu: dict[str, float] = field(default_factory=dict)  # seconds, by the names in PARTS


def main(arguments: Sequence[str] | None = None) -> int:
    """Race; 1 if a figure misses its target (not with --quick), 2 for wrong arguments."""
    options = _parse(arguments)
    os.environ.setdefault("RAY_worker_niceness", "0")
    import torch

    from benchmarks import report
    from benchmarks.live.service import progress
    from warmkv.measuring import machine

    identity, say = machine.identity(torch.device("cpu")), progress()
    loads = [load for load in LOADS if options.only in (None, load.name)]
    if options.quick:
        loads = [Load(load.name, 2, load.words, min(load.new_tokens, 8), 1) for load in loads]
    if options.url:
        figures = asyncio.run(_race(options.url, options.model, loads, say))
    else:
        figures = _race_here(loads, options.threads, say)
    if options.json is not None:
        commit = os.environ.get("WARMKV_COMMIT") or machine.commit()
        settings = {"threads": options.threads, "url": options.url}
        report.write(options.json, report.document(identity, machine.versions(), commit, settings, figures, []))
    report.show("served through HTTP", figures, [])
    return 1 if not options.quick and any(each.met is False for each in figures) else 0


def _race_here(loads: Sequence[Load], threads: int, say: Any) -> list[Figure]:
    """Start the service and race it."""
    from warmkv.config import parse
    from warmkv.platform.local import running

    config = parse({"engine": {"threads": threads}, "gateway": {"port": 0}})
    with running(config, say) as service:
        return asyncio.run(_race(service.url, config.model.name, loads, say))


async def _race(url: str, model: str, loads: Sequence[Load], say: Any) -> list[Figure]:
    figures: list[Figure] = []
    await measure(url, model, Load("warm-up", 2, 20, 8, 1), 0)
    for number, load in enumerate(loads, 1):
        say(load.name)
        figures += _figures(load, await measure(url, model, load, number))
    return figures


def _figures(load: Load, seen: Measured) -> list[Figure]:
    from benchmarks.report import figure

    found = [
        figure(f"{load.name}_tokens_per_second", [seen.tokens / seen.wall], load.tokens_target, "higher"),
        figure(f"{load.name}_requests_per_second", [load.clients * load.requests / seen.wall], None, "higher"),
        figure(f"{load.name}_first_token_seconds", [statistics.median(seen.first)], load.first_target, "lower"),
        figure(f"{load.name}_between_seconds", [statistics.median(seen.between or [0.0])], None, "lower"),
    ]
    costs = {part: seconds / seen.tokens * 1e6 for part, seconds in seen.cpu.items()}
    found += [figure(f"{load.name}_{part}_cpu_us_per_token", [cost], None, "lower") for part, cost in costs.items()]
    if costs and load.new_tokens > 100:  # with short answers it is the requests that cost
        outside = [costs["gateway"] + costs["proxy"]]
        found.append(figure(f"{load.name}_outside_cpu_us_per_token", outside, CPU_TARGET, "lower"))
    return found


async def measure(url: str, model: str, load: Load, number: int) -> Measured:
    """Have all clients ask. Prompts begin with a number of their own, so that nothing is shared but the last load's."""
    seen, before, began = Measured(), processes(), time.perf_counter()

    async def client(name: int) -> None:
        shared = load.clients == 1
        for turn in range(load.requests):
            words = [f"{number} {name} {'' if shared else turn}", *(f"word{at % 97}" for at in range(load.words))]
            await _ask(url, model, " ".join(words), load.new_tokens, seen)

    await asyncio.gather(*(client(name) for name in range(load.clients)))
    seen.wall = time.perf_counter() - began
    seen.cpu = {part: used - before[part] for part, used in processes().items() if part in before}
    return seen


async def _ask(url: str, model: str, prompt: str, new_tokens: int, seen: Measured) -> None:
    """Stream one completion over a connection of its own. Raises RuntimeError where it is no whole answer."""
    at = urlsplit(url)
    body = {"model": model, "prompt": prompt, "max_tokens": new_tokens, "stream": True, "temperature": 0}
    body |= {"stream_options": {"include_usage": True}, "warmkv": {"ignore_eos": True}}
    data = json.dumps(body).encode()
    head = f"POST {at.path.rstrip('/')}/v1/completions HTTP/1.1\r\nhost: {at.netloc}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    began = last = time.perf_counter()
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(head.encode() + data)
    received = b""
    while chunk := await reader.read(1 << 16):
        if b'"text"' in chunk:
            now = time.perf_counter()
            (seen.between if b'"text"' in received else seen.first).append(now - (last if received else began))
            last = now
        received += chunk
    writer.close()
    usages = [line for line in received.split(b"\n") if b'"completion_tokens"' in line]
    if b"[DONE]" not in received or not usages:
        raise RuntimeError(f"no whole answer: {received[-500:]!r}")
    usage = usages[-1]
    seen.tokens += json.loads(usage[usage.index(b"{") : usage.rindex(b"}") + 1])["usage"]["completion_tokens"]


def processes() -> dict[str, float]:
    """Return the CPU seconds used so far by processes that this one has started, by the names in PARTS."""
    parents: dict[str, str] = {}
    found: dict[str, tuple[str, float]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            title = (folder / "cmdline").read_bytes().decode(errors="replace")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[folder.name] = fields[1]
        if part := next((part for part, word in PARTS.items() if title.startswith("ray::") and word in title), None):
            found[folder.name] = part, (int(fields[11]) + int(fields[12])) / TICKS
    used: dict[str, float] = {}
    for process, (part, seconds) in found.items():
        above: str | None = process
        while above is not None and above != str(os.getpid()):
            above = parents.get(above)
        if above is not None:
            used[part] = used.get(part, 0.0) + seconds
    return used


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="served_race", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="few and short requests: whether it runs, not how well")
    parser.add_argument("--only", metavar="LOAD", choices=[load.name for load in LOADS], help="one of the loads")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads of the replica (1)")
    parser.add_argument("--url", metavar="URL", help="a server that runs, such as vLLM's, in place of one of our own")
    parser.add_argument("--model", default="tiny", metavar="NAME", help="what that server calls its model (tiny)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
