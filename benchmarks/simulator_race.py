"""The simulator against the clock: simulated requests per second on one core, and the memory of a large replay.

See README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # started as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from warmkv.config import Config, load
from warmkv.prefixes.record_builder import columns_of
from warmkv.simulator import traces
from warmkv.simulator.engine import batch
from warmkv.simulator.steps.costs import StepCost, StepTimes
from warmkv.simulator.studies.replays.replay import run as replay
from warmkv.simulator.studies.replays.step_times import choose_cost
from warmkv.simulator.studies.replays.variants import Variant
from warmkv.simulator.traces import Trace
from warmkv.simulator.workload.generator import generate
from warmkv.simulator.workload.requests import Requests, of_trace
from warmkv.simulator.workload.sessions import Workload

if TYPE_CHECKING:
    from benchmarks.report import Figure

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
CONVERSATION = "mooncake_conversation.jsonl"
PROMPT, ANSWER, RATE, BLOCK = 161, 338, 10.0, 64
COST = StepCost(0.006, 1e-5, 5e-9)
MODEL = "simulator.model={layers: 32, kv_heads: 8, head_dim: 128, dtype_bytes: 2}"
LLAMA = (
    "simulator.model={layers: 32, kv_heads: 8, head_dim: 128, dtype_bytes: 2, heads: 32, hidden: 4096, "
    "intermediate: 14336, vocabulary: 128256}"
)
SLOTS, STEP_TOKENS = 256, 2048
ENGINE = f"engine={{max_slots: {SLOTS}, max_queue: 1000000, kv_bytes: 1TiB, step_tokens: {STEP_TOKENS}}}"
TOKEN_BYTES = 131_072


@dataclass(frozen=True, slots=True)
class Race:
    """A workload with its settings; targets are simulated requests per second, and bytes of the whole process."""

    name: str
    requests: int  # of those of a trace or log, the first
    flags: tuple[str, ...]
    target: float | None
    trace: str | None = None  # generated if None
    own: bool = False  # as an access log of warmkv, with breakpoints and two TTLs
    bytes: float | None = None
    roofline: bool = False  # step times of a whole model on a GPU, where chunks behind long contexts have fewer tokens


RACES = {
    race.name: race
    for race in (
        Race("generated", 10_000, ("prefix_cache.memory_bytes=64GiB",), 25_000),
        Race("conversation", 12_031, (f"prefix_cache.memory_bytes={3_000_000 * TOKEN_BYTES}",), 45_000, CONVERSATION),
        Race(
            "cluster",
            12_031,
            (
                "cluster.replicas=8",
                f"prefix_cache.memory_bytes={500_000 * TOKEN_BYTES}",
                f"prefix_cache.host.memory_bytes={2_500_000 * TOKEN_BYTES}",
            ),
            25_000,
            CONVERSATION,
        ),
        Race("own", 13_692, (f"prefix_cache.memory_bytes={600_000 * TOKEN_BYTES}",), 30_000, own=True),
        Race(
            "own-cluster",
            13_692,
            (
                "cluster.replicas=8",
                f"prefix_cache.memory_bytes={60_000 * TOKEN_BYTES}",
                f"prefix_cache.host.memory_bytes={200_000 * TOKEN_BYTES}",
                "simulator.index_delay=0.01",
            ),
            15_000,
            own=True,
        ),
        Race(
            "roofline",
            12_031,
            (f"prefix_cache.memory_bytes={3_000_000 * TOKEN_BYTES}", LLAMA),
            None,
            CONVERSATION,
            roofline=True,
        ),
        Race(
            "million",
            1_000_000,
            ("cluster.replicas=8", "prefix_cache.memory_bytes=64GiB"),
            25_000,
            bytes=1e9,
        ),
    )
}
DEFAULT = ("generated", "conversation", "cluster", "own", "own-cluster")
SESSIONS = 4000  # of the chat preset, begun within an hour: 13,692 requests
SWEEP = "sweep"
BOTH = ("generated", "conversation")  # what DynoSim does as well: one replica, without breakpoints and tiers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the races; 1 if a figure misses its target (not with --quick), 2 for wrong arguments."""
    options = _parse(arguments)
    from benchmarks import report

    races = [RACES[name] for name in options.only or DEFAULT if name != SWEEP]
    if options.quick:
        races = [replace(race, requests=min(race.requests, 500)) for race in races]
    repeats = 1 if options.quick else options.repeats
    figures, notes, start = [], [], time.perf_counter()
    grid = {}

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {what}", file=sys.stderr, flush=True)

    for race in races:
        if race.trace is not None and not (options.traces / race.trace).exists():
            notes.append(f"{race.name} was not run: {race.trace} is not at {options.traces}; --traces names the folder")
            continue
        peer = options.dynosim if race.name in BOTH else None
        figures += _race(race, options.traces, repeats, options.seed, say, peer)
    if SWEEP in (options.only or ()):
        from benchmarks import simulator_sweep

        if (path := options.traces / CONVERSATION).exists():
            figures += simulator_sweep.race(path, [MODEL, ENGINE], options.quick, say)
            grid = {"sweep": simulator_sweep.GRID}
        else:
            notes.append(f"{SWEEP} was not run: {CONVERSATION} is not at {options.traces}; --traces names the folder")
    identity, versions, commit = _machine()
    settings = {
        "races": [asdict(race) for race in races],
        "repeats": repeats,
        "seed": options.seed,
        "cost": str(COST),
        "compiled": not (batch.__file__ or "").endswith(".py"),
        **grid,
    }
    if options.json is not None:
        report.write(options.json, report.document(identity, versions, commit, settings, figures, notes))
    report.show("simulator race" + (" (quick: too small for figures)" if options.quick else ""), figures, notes)
    return 1 if not options.quick and any(each.met is False for each in figures) else 0


def _race(
    race: Race, folder: Path, repeats: int, seed: int, say: Callable[[str], None], peer: Path | None
) -> list[Figure]:
    from benchmarks.report import figure

    settings = load(flags=[MODEL, ENGINE, *race.flags], environ={})
    begin = time.perf_counter()
    requests = _requests(race, folder, settings, seed)
    say(f"{race.name}: {len(requests.records):,} requests read or made in {time.perf_counter() - begin:.1f} s")
    times: StepTimes = COST
    if race.roofline:
        times, _ = choose_cost(requests.records, settings, lambda record: settings.compression.policy)
    rates, peer_rates = [], []
    for _ in range(repeats):
        fresh = replace(requests)  # so that each lays out the blocks, which a sweep does once
        begin = time.perf_counter()
        done = replay(fresh.records, settings, Variant(), times, turns=fresh.turns, inputs=fresh.inputs)
        seconds = time.perf_counter() - begin
        rates.append(done.result.requests / seconds)
        say(f"{race.name}: {seconds:.2f} s for {done.result.seconds:,.0f} virtual seconds")
        if peer is not None:
            from benchmarks import simulator_peer

            trace = _trace(race, folder, settings, seed)
            tokens = int(settings.prefix_cache.memory_bytes) // TOKEN_BYTES
            peer_rates.append(simulator_peer.requests_per_second(peer, trace, SLOTS, STEP_TOKENS, tokens))
            say(f"{race.name}: DynoSim {peer_rates[-1]:,.0f} requests a second")
    size = float(_peak_bytes())
    found = [figure(f"requests_per_second_{race.name}", rates, race.target, "higher")]
    if peer_rates:
        found += [figure(f"requests_per_second_{race.name}_dynosim", peer_rates, None, "higher")]
        ratios = [own / other for own, other in zip(rates, peer_rates, strict=True)]
        found += [figure(f"times_dynosim_{race.name}", ratios, 1, "higher")]
    found += [figure(f"hit_rate_tokens_{race.name}", [done.result.token_hit_rate], None, "higher")]
    found += [figure(f"refused_{race.name}", [float(done.result.refused)], None, "lower")]
    return [*found, figure(f"bytes_{race.name}", [size], race.bytes, "lower")]


def _requests(race: Race, folder: Path, settings: Config, seed: int) -> Requests:
    if race.own:
        records = generate(
            Workload(sessions=min(SESSIONS, race.requests), hours=1.0), np.random.SeedSequence(seed), settings
        )
        return Requests(columns_of(records[: race.requests]))  # as they are read from a log
    return of_trace(_trace(race, folder, settings, seed), settings)


def _trace(race: Race, folder: Path, settings: Config, seed: int) -> Trace:
    if race.trace is None:
        return generated(race.requests, settings.cluster.replicas, seed)
    trace = traces.read(folder / race.trace)
    return trace.take(np.arange(min(race.requests, len(trace))))


def generated(count: int, replicas: int, seed: int) -> Trace:
    """Return poisson arrivals of prompts of one length that share nothing, each with blocks of its own."""
    each = PROMPT // BLOCK
    arrival = np.random.default_rng(seed).exponential(1 / (RATE * replicas), count).cumsum()
    return Trace(
        "generated",
        BLOCK,
        arrival,
        np.full(count, PROMPT, dtype=np.int32),
        np.full(count, ANSWER, dtype=np.int32),
        *(np.full(count, -1, dtype=np.int32) for _ in range(2)),
        np.zeros(count, dtype=np.float32),
        np.arange(count * each),
        np.arange(count + 1) * each,
    )


def _peak_bytes() -> int:
    """Return the most memory that this process has had; races before this one count, too."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _machine() -> tuple[dict[str, Any], dict[str, str], str | None]:
    """Return the machine's identity. Asked last: it loads torch."""
    from warmkv.measuring import machine

    return machine.identity(), machine.versions(), os.environ.get("WARMKV_COMMIT") or machine.commit()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="simulator_race", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="500 requests each: whether it runs, not how fast")
    parser.add_argument(
        "--only",
        choices=[*RACES, SWEEP],
        action="append",
        help=f"one race, repeatable; by default {', '.join(DEFAULT)}",
    )
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="FOLDER", help="where the public traces lie")
    parser.add_argument(
        "--dynosim",
        type=lambda path: Path(path).absolute(),
        metavar="PYTHON",
        help="the interpreter that has it (benchmarks/peers.sh dynosim), for races that it can run",
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="3 by default")
    parser.add_argument("--seed", type=int, default=0, help="of generated arrivals (0)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
