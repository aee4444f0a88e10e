"""How fast is the service through HTTP, and what does a token cost outside the engine? Against vLLM's own server.

See README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # started as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.served.cpu import stopped
from benchmarks.served.load import LOADS, Load, Measured, Server, measure, single_token_words

if TYPE_CHECKING:
    from benchmarks.report import Figure

CPU_SHARE = 0.7
"""CPU time of a token in gateways and proxies, as a share of that of the peer's front end."""
KV_BYTES = 1 << 30  # of slots, and as many of prefixes
WARM_UP = Load("warm-up", 2, 20, 8, 1)
SETTLE_SECONDS = 2.0
"""After a server has stood still, for what its timers have missed."""
CEILING = Load("64x20/250", 64, 20, 250, 2)
CEILING_TARGET = 15_000.0
"""Tokens a second of a gateway that has a core to itself, whose replicas answer from a script."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the race; return 1 if a figure misses its target (not with --quick), 2 for wrong arguments."""
    options = _parse(arguments)
    os.environ.setdefault("RAY_worker_niceness", "0")
    import torch

    from benchmarks import report
    from benchmarks.live.service import progress
    from warmkv.measuring import machine

    say = progress()
    loads = [load for load in LOADS if not options.only or load.name in options.only]
    if options.quick:
        loads = [replace(load, clients=2, requests=1 + load.again, new_tokens=8) for load in loads]
    figures = _ceiling(options, say) if options.ceiling else _race(loads, options, say)
    if options.json is not None:
        identity = machine.identity(torch.device("cpu"))
        commit = os.environ.get("WARMKV_COMMIT") or machine.commit()
        settings = {
            "threads": options.threads,
            "replicas": options.replicas,
            "compile": options.compile,
            "repeats": options.repeats,
            "vllm": bool(options.vllm),
            "url": options.url,
        }
        report.write(options.json, report.document(identity, machine.versions(), commit, settings, figures, []))
    report.show("served through HTTP", figures, [])
    return 1 if not options.quick and any(each.met is False for each in figures) else 0


def _race(loads: Sequence[Load], options: argparse.Namespace, say: Callable[[str], None]) -> list[Figure]:
    seen: dict[str, dict[str, list[Measured]]] = {}
    with ExitStack() as stack:
        servers = _servers(options, stack, say)
        words = single_token_words(options.model)
        for server in servers:
            asyncio.run(measure(server, WARM_UP, words, -1))
        for repeat in range(options.repeats):
            for load in loads:
                for server in servers:  # in turn: a machine is not as fast at all times
                    say(f"{load.name}, {server.name}")
                    measured = _alone(server, servers, partial(measure, server, load, words, repeat))
                    seen.setdefault(load.name, {}).setdefault(server.name, []).append(measured)
    return [each for load in loads for each in figures_of(load, seen[load.name], servers)]


def _alone(server: Server, servers: Sequence[Server], load: Callable[[], Coroutine[None, None, Measured]]) -> Measured:
    """Measure a server while the others stand still."""
    with ExitStack() as stack:
        for other in servers:
            if other is not server:
                stack.enter_context(stopped(other.processes()))
        if len(servers) > 1:
            time.sleep(SETTLE_SECONDS)
        return asyncio.run(load())


def _ceiling(options: argparse.Namespace, say: Callable[[str], None]) -> list[Figure]:
    """Measure what a core of a gateway passes on, with one gateway and with two."""
    from benchmarks.report import figure
    from benchmarks.served.scripted import scripted

    load, words = CEILING, single_token_words(options.model)
    if options.quick:
        load = replace(load, clients=2, requests=1, new_tokens=8)
    found = []
    for gateways in (1, 2):
        with scripted(gateways) as server:
            say(f"{load.name}, {server.name}")
            asyncio.run(measure(server, Load("warm-up", 4, 20, 8, 1), words, -1))
            runs = [asyncio.run(measure(server, load, words, repeat)) for repeat in range(options.repeats)]
        costs = [max(run.cpu["gateway"], 1e-9) / run.tokens for run in runs]
        name = f"ceiling_{gateways}_gateways"
        found += [
            figure(f"{name}_tokens_per_core_second", [1 / cost for cost in costs], CEILING_TARGET, "higher"),
            figure(f"{name}_cpu_us_per_token", [cost * 1e6 for cost in costs], None, "lower"),
            figure(f"{name}_tokens_per_second", [run.tokens / run.wall for run in runs], None, "higher"),
        ]
    return found


def _servers(options: argparse.Namespace, stack: ExitStack, say: Callable[[str], None]) -> list[Server]:
    from benchmarks.served import servers
    from warmkv.platform.local import free_port

    if options.url:
        return [Server("server", options.url, options.name, {}, dict, ())]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    model = servers.longer(options.model, folder / "model")
    started = [
        stack.enter_context(servers.warmkv(model, options.threads, options.replicas, options.compile, KV_BYTES, say))
    ]
    if options.vllm:
        port = free_port("127.0.0.1")
        started.append(stack.enter_context(servers.vllm(options.vllm, model, port, KV_BYTES, folder / "vllm.log")))
    return started


def figures_of(load: Load, seen: dict[str, list[Measured]], servers: Sequence[Server]) -> list[Figure]:
    """Return a load's figures for every server; the ratios of the first to the others have targets."""
    from benchmarks.report import figure, ratios

    found = []
    values: dict[str, dict[str, list[float]]] = {}
    for server in servers:
        runs = seen[server.name]
        values[server.name] = {
            "tokens_per_second": [run.tokens / run.wall for run in runs],
            "requests_per_second": [load.clients * load.requests / run.wall for run in runs],
            "first_token_seconds": [statistics.median(run.first) for run in runs],
            "between_seconds": [statistics.median(run.between or [math.nan]) for run in runs],
        }
    for name, ours in values[servers[0].name].items():
        better = "higher" if "per_second" in name else "lower"
        found.append(figure(f"{load.name}_{name}", ours, None, better))
        for peer in servers[1:]:
            theirs = values[peer.name][name]
            target = 1.0 if name in load.held else None
            found.append(figure(f"{load.name}_{name}_{peer.name}", theirs, None, better))
            found.append(figure(f"{load.name}_{name}_vs_{peer.name}", ratios(ours, theirs), target, better))
    outside: dict[str, list[float]] = {}
    for server in servers:
        label = "" if server is servers[0] else f"_{server.name}"
        for part in seen[server.name][0].cpu:
            costs = [run.cpu[part] / run.tokens * 1e6 for run in seen[server.name]]
            found.append(figure(f"{load.name}_{part}_cpu_us_per_token{label}", costs, None, "lower"))
        if server.outside and load.new_tokens > 100:  # with short answers it is the requests that cost
            spent = [sum(run.cpu.get(part, 0.0) for part in server.outside) for run in seen[server.name]]
            costs = [seconds / run.tokens * 1e6 for seconds, run in zip(spent, seen[server.name], strict=True)]
            outside[server.name] = costs
            found.append(figure(f"{load.name}_outside_cpu_us_per_token{label}", costs, None, "lower"))
            if label and servers[0].name in outside:
                shares = ratios(outside[servers[0].name], costs)
                name = f"{load.name}_outside_cpu_us_per_token_vs{label}"
                found.append(figure(name, shares, CPU_SHARE, "lower"))
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from warmkv.models.tiny import PATH

    parser = argparse.ArgumentParser(prog="served_race", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="few and short requests: whether it runs, not how well")
    names = [load.name for load in LOADS]
    parser.add_argument("--only", action="append", metavar="LOAD", choices=names, help="one of the loads, repeatable")
    parser.add_argument("--ceiling", action="store_true", help="gateways alone: their replicas answer from a script")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="of every load and server, in turn (1)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads of a replica (1)")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="of ours, which share the machine (1)")
    parser.add_argument("--compile", action="store_true", help="compile the decode steps of ours, as vLLM does its own")
    parser.add_argument("--model", type=Path, default=PATH, metavar="FOLDER", help="served by both (the shipped one)")
    parser.add_argument(
        "--vllm", type=Path, metavar="COMMAND", help="race vLLM too: what `peers.sh vllm` has installed"
    )
    parser.add_argument("--url", metavar="URL", help="a server that runs, in place of ours")
    parser.add_argument("--name", default="tiny", metavar="NAME", help="what that server calls its model (tiny)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
