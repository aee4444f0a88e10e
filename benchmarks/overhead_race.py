"""What metrics, and the what-if service beside full load, take from the service's throughput. See README.md."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # started as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.served.load import Load, Measured, Server, measure, single_token_words

if TYPE_CHECKING:
    from benchmarks.report import Figure

RACES = ("metrics", "whatif")
LOADS = (Load("16x20/250", 16, 20, 250, 4), Load("16x400/7", 16, 400, 7, 24))
"""One that decodes, and one with many requests, each of which is counted and observed."""
RECORDING = 0.02  # of the CPU time of gateways and replicas: at most what calls that record take
LEFT = 0.97  # of the throughput without the what-if service: at least
CPU = 1.03  # times the CPU time of gateways and replicas for a token without it: at most
SCRAPE_SECONDS = 5.0  # between two scrapes of Ray's metrics, as Prometheus does
WINDOW = 2000  # requests that the what-if service has to replay beside the load: a round takes longer than a run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the races; return 1 if a figure misses its target (not with --quick), 2 for wrong arguments."""
    options = _parse(arguments)
    os.environ.setdefault("RAY_worker_niceness", "0")
    import torch

    from benchmarks import report
    from benchmarks.live.service import progress
    from warmkv.measuring import machine

    say, figures = progress(), list[Figure]() if TYPE_CHECKING else []
    races = [race for race in RACES if not options.only or race in options.only]
    loads = [replace(load, clients=2, requests=1, new_tokens=4) for load in LOADS] if options.quick else LOADS
    repeats = 1 if options.quick else options.repeats
    for race in races:
        figures += {"metrics": _metrics, "whatif": _whatif}[race](loads, repeats, options.replicas, say)
    notes = ["whatif: with and without take turns, and change who begins; ratios are taken pair by pair"]
    if options.json is not None:
        identity = machine.identity(torch.device("cpu"))
        commit = os.environ.get("WARMKV_COMMIT") or machine.commit()
        settings = {"replicas": options.replicas, "repeats": options.repeats, "races": races}
        report.write(options.json, report.document(identity, machine.versions(), commit, settings, figures, notes))
    report.show("what watching and tuning take", figures, notes)
    return 1 if not options.quick and any(each.met is False for each in figures) else 0


def _metrics(loads: Sequence[Load], repeats: int, replicas: int, say: Callable[[str], None]) -> list[Figure]:
    from benchmarks.overhead.services import Contestant, TimedGateway, TimedReplica, recording_seconds, side_by_side
    from warmkv.models.tiny import PATH

    words, found = single_token_words(PATH), list[Figure]() if TYPE_CHECKING else []
    with side_by_side([Contestant("watched", {}, TimedGateway, TimedReplica)], replicas) as (server,):
        asyncio.run(measure(server, Load("warm-up", 2, 20, 8, 1), words, -1))
        for load in loads:
            runs, recording = list[Measured](), list[float]()
            for repeat in range(repeats):
                say(f"metrics, {load.name}")
                before = recording_seconds(server.name)
                runs.append(asyncio.run(_measured(scraped(say), server, load, words, repeat)))
                recording.append(recording_seconds(server.name) - before)
            found += shares_of(load, runs, recording)
    return found


def _whatif(loads: Sequence[Load], repeats: int, replicas: int, say: Callable[[str], None]) -> list[Figure]:
    from benchmarks.overhead.services import Contestant, side_by_side
    from warmkv.models.tiny import PATH

    words, found = single_token_words(PATH), list[Figure]() if TYPE_CHECKING else []
    pair = (Contestant("tuned", {"control": {"whatif": {}}}), Contestant("untuned"))
    with side_by_side(pair, replicas) as servers:
        for server in servers:
            asyncio.run(measure(server, Load("warm-up", 2, 20, 8, 1), words, -1))
        for load in loads:
            runs: list[list[Measured]] = [[], []]
            for repeat in range(repeats):
                for which in (0, 1) if repeat % 2 else (1, 0):  # a machine is not as fast at all times
                    say(f"whatif, {load.name}, {servers[which].name}")
                    context = replayed(servers[which], say) if which == 0 else contextlib.nullcontext()
                    runs[which].append(asyncio.run(_measured(context, servers[which], load, words, repeat)))
            found += ratios_of(load, *runs)
    return found


async def _measured(
    context: contextlib.AbstractAsyncContextManager[None], server: Server, load: Load, words: Sequence[str], seed: int
) -> Measured:
    async with context:
        return await measure(server, load, words, seed)


@asynccontextmanager
async def scraped(say: Callable[[str], None]) -> AsyncIterator[None]:
    """Read the metrics of Ray's node again and again, as a Prometheus would."""
    import ray
    import requests

    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    async def scrape() -> None:
        while True:
            text = (await asyncio.to_thread(requests.get, url, timeout=SCRAPE_SECONDS)).text
            if "ray_warmkv" not in text:
                say("no metric of the service is there yet")
            await asyncio.sleep(SCRAPE_SECONDS)

    task = asyncio.create_task(scrape())
    try:
        yield
    finally:
        task.cancel()


@asynccontextmanager
async def replayed(server: Server, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Have the what-if service replay a full window meanwhile, under candidates that are new."""
    from benchmarks.overhead.traffic import requests_of
    from warmkv.platform.whatif.actor import RemoteWhatIf

    whatif = RemoteWhatIf(server.name, "the race")
    table = await whatif.table()
    if table["window"]["requests"] < WINDOW:
        await whatif.send(requests_of(WINDOW, server.model), 0)
    added = (await whatif.add({"routing.load_weight": 0.5 + table["rounds"] + len(table["candidates"])}))["candidate"]
    for _ in range(600):
        if server.cpu().get("replay"):
            break
        await asyncio.sleep(0.1)
    else:
        say("the what-if service does not replay")
    try:
        yield
    finally:
        await whatif.remove(added)


def shares_of(load: Load, runs: Sequence[Measured], recording: Sequence[float]) -> list[Figure]:
    """Return what recording takes of the CPU time of gateways and replicas, `recording` seconds in each run."""
    from benchmarks.report import figure

    name = f"metrics_{load.name}"
    shares = [seconds / _serving(run) for seconds, run in zip(recording, runs, strict=True)]
    return [
        figure(f"{name}_recording_share_of_cpu", shares, RECORDING, "lower"),
        figure(f"{name}_tokens_per_second", [run.tokens / run.wall for run in runs], None, "higher"),
        figure(f"{name}_agent_cores", [run.cpu.get("agent", 0.0) / run.wall for run in runs], None, "lower"),
    ]


def ratios_of(load: Load, having: Sequence[Measured], without: Sequence[Measured]) -> list[Figure]:
    """Return the ratios of throughput and CPU time beside replays, and what the ratios are of."""
    from benchmarks.report import figure, ratios

    name, per_second, per_token = f"whatif_{load.name}", list[list[float]](), list[list[float]]()
    for runs in (having, without):
        per_second.append([run.tokens / run.wall for run in runs])
        per_token.append([_serving(run) / run.tokens * 1e6 for run in runs])
    found = [
        figure(f"{name}_throughput_vs_without", ratios(*per_second), LEFT, "higher"),
        figure(f"{name}_cpu_vs_without", ratios(*per_token), CPU, "lower"),
    ]
    for with_or_not, seconds, tokens in zip(("with", "without"), per_second, per_token, strict=True):
        found.append(figure(f"{name}_tokens_per_second_{with_or_not}", seconds, None, "higher"))
        found.append(figure(f"{name}_cpu_us_per_token_{with_or_not}", tokens, None, "lower"))
    beside = [run.cpu.get("replay", 0.0) / run.wall for run in having]
    found.append(figure(f"{name}_replay_cores", beside, None, "lower"))
    return found


def _serving(run: Measured) -> float:
    """Return the CPU seconds of gateways and replicas."""
    from benchmarks.overhead.services import SERVING

    return sum(run.cpu.get(part, 0.0) for part in SERVING)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="overhead_race", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="few and short requests: whether it runs, not how well")
    parser.add_argument("--only", action="append", metavar="RACE", choices=RACES, help="one of them, repeatable")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="pairs of runs of every load (7)")
    cores = os.cpu_count() or 1
    parser.add_argument("--replicas", type=int, default=cores, metavar="N", help=f"of one thread each ({cores})")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
