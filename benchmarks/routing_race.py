"""Our router against Ray Serve's own: time of a decision, memory per block, and the whole service under traffic.

See README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # started as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

if TYPE_CHECKING:
    from benchmarks.report import Figure

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
RACES = ("decision", "tree", "directory", "simulated", "live")


@dataclass(frozen=True, slots=True)
class Run:
    blocks: int = 1_000_000  # distinct blocks in the index
    replicas: int = 16
    repeats: int = 5
    rounds: int = 3  # of the live race
    cores: float = 0.25  # that each of its replicas may use; 0 for as many as there are
    engine: str = "warmkv"  # of the live race
    seed: int = 0
    races: tuple[str, ...] = RACES
    traces: Path = TRACES  # of the recorded sessions
    quick: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the races; 1 if a figure misses its target (not with --quick), 2 for wrong arguments."""
    run, path = _parse(arguments)
    import torch

    from benchmarks import report
    from benchmarks.engine.results import Results
    from benchmarks.routing import decision
    from warmkv.measuring import machine

    identity = machine.identity(torch.device("cpu"))
    results, start = Results(), time.perf_counter()

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {what}", file=sys.stderr, flush=True)

    turns = []
    if "decision" in run.races:
        turns.append(decision.race_decisions(run.blocks, run.replicas, run.repeats, run.seed, results, say))
    if "tree" in run.races:
        turns.append(decision.race_tree(run.replicas, run.repeats, run.seed, results, say))
    for _ in zip_longest(*turns):  # side by side, since a machine is not as fast at all times
        pass
    if "directory" in run.races:
        asyncio.run(decision.race_directory(run.blocks, run.replicas, results, say))
    if "simulated" in run.races:
        from benchmarks.routing import simulated

        simulated.race(run.repeats, run.seed, run.quick, run.traces, results, say)
    if "live" in run.races:
        from benchmarks.routing import live

        live.race(run.rounds, run.seed, run.cores, run.engine, run.quick, results, say)
    figures = _figures(run, results.measured)
    if path is not None:
        commit = os.environ.get("WARMKV_COMMIT") or machine.commit()
        settings = {name: getattr(run, name) for name in run.__slots__ if name != "traces"}
        report.write(path, report.document(identity, machine.versions(), commit, settings, figures, results.notes))
    title = f"routing race: {run.blocks:,} blocks on {run.replicas} replicas"
    report.show(title + (" (quick: too small for figures)" if run.quick else ""), figures, results.notes)
    return 1 if not run.quick and any(each.met is False for each in figures) else 0


def _figures(run: Run, measured: dict[str, list[float]]) -> list[Figure]:
    """What has a target, then everything else that was measured."""
    from benchmarks.report import figure, ratios

    targets = {"decision_microseconds_p50": 30.0, "index_bytes_per_block": 60.0, "directory_bytes_per_block": 200.0}
    found = []
    if {"decision", "tree"} <= set(run.races):
        times = ratios(measured.get("tree_match_microseconds_p50", []), measured["decision_microseconds_p50"])
        found.append(figure("decision_times_faster_than_tree", times, 20.0, "higher"))
    if "simulated" in run.races:
        found += _simulated_figures(measured)
    if "live" in run.races:
        found += _live_figures(measured, run.engine)
    return found + [figure(name, values, targets.get(name), "lower") for name, values in measured.items()]


def _simulated_figures(measured: dict[str, list[float]]) -> list[Figure]:
    """Return medians of TTFT ratios to the peers' rules, sessions by sessions; to the prefix router's with targets."""
    from benchmarks.report import figure, ratios
    from benchmarks.routing.simulated import AGENTS, BOUND, CASES, PEERS

    targets = {"zipf": (0.9, 0.8), "pressure": (0.7, 0.6)}  # p50 and p99
    found = []
    for case in (*CASES, *(name for name in AGENTS if f"affinity_{name}_ttft_p50_ms" in measured)):
        ideal = measured.get(f"prefix_cost_{case}_hit_rate_of_ideal", [])
        over_vllm = case in CASES and CASES[case].engine == "vllm"
        found.append(figure(f"simulated_hit_rate_of_ideal_{case}", ideal, 0.98 if over_vllm else None, "higher"))
        for quantile, target in zip(("p50", "p99"), targets.get(case, (None, None)), strict=True):
            ours = measured.get(f"prefix_cost_{case}_ttft_{quantile}_ms", [])
            for peer in PEERS:
                found.append(
                    figure(
                        f"simulated_ttft_{quantile}_vs_{peer}_{case}",
                        ratios(ours, measured.get(f"{peer}_{case}_ttft_{quantile}_ms", [])),
                        target if peer == "affinity" else None,
                        "lower",
                    )
                )
            if case not in CASES:
                continue
            bound = measured.get(f"{BOUND}_{case}_ttft_{quantile}_ms", [])
            theirs = measured.get(f"affinity_{case}_ttft_{quantile}_ms", [])
            found.append(figure(f"simulated_bound_{quantile}_vs_affinity_{case}", ratios(bound, theirs), None, "lower"))
    return found


def _live_figures(measured: dict[str, list[float]], engine: str) -> list[Figure]:
    """Return medians of TTFT ratios to each peer, round by round; to the prefix router's with targets."""
    from benchmarks.report import figure, ratios
    from benchmarks.routing.live import CONTESTANTS, KINDS

    targets = {"zipf": (0.9, 0.8), "hot": (1.0, 1.0), "pressure": (0.7, 0.6)}  # p50 and p99
    ours, *peers = CONTESTANTS[engine]
    found = []
    for kind in KINDS:
        of_ideal = measured.get(f"{ours}_{kind}_hit_rate_of_ideal", [])
        found.append(figure(f"hit_rate_of_ideal_{kind}", of_ideal, 0.98, "higher"))
        for peer in peers:
            for quantile, target in zip(("p50", "p99"), targets[kind], strict=True):
                these, those = (measured.get(f"{name}_{kind}_ttft_{quantile}_ms", []) for name in (ours, peer))
                found.append(
                    figure(
                        f"ttft_{quantile}_vs_{peer}_{kind}",
                        ratios(these, those),
                        target if peer == "affinity" else 1.0,
                        "lower",
                    )
                )
    return found


def _parse(arguments: Sequence[str] | None) -> tuple[Run, Path | None]:
    parser = argparse.ArgumentParser(prog="routing_race", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="a small index: whether it runs, not how fast")
    parser.add_argument("--only", choices=RACES, action="append", help="one race, repeatable; all by default")
    parser.add_argument("--blocks", type=int, metavar="N", help="distinct blocks of the index (1000000)")
    parser.add_argument("--replicas", type=int, metavar="N", help="16 by default")
    parser.add_argument("--repeats", type=int, metavar="N", help="5 by default")
    parser.add_argument("--rounds", type=int, metavar="N", help="of the live race, about 20 minutes each (3)")
    parser.add_argument(
        "--cores", type=float, metavar="N", help="of each replica of the live race (0.25); 0: they share all"
    )
    parser.add_argument("--engine", choices=("warmkv", "vllm"), help="of the live race's replicas (warmkv)")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="where recorded sessions of agents lie")
    parser.add_argument("--seed", type=int, help="of prompts and order (0)")
    options = parser.parse_args(arguments)
    run = Run(blocks=20_000, repeats=2, rounds=1, races=RACES[:4], quick=True) if options.quick else Run()
    given = {
        name: getattr(options, name)
        for name in ("blocks", "replicas", "repeats", "rounds", "cores", "engine", "traces", "seed")
    }
    if options.only:
        run = replace(run, races=tuple(race for race in RACES if race in options.only))
    run = replace(run, **{name: value for name, value in given.items() if value is not None})
    if run.blocks < 2_000 or run.replicas < 1 or run.repeats < 1 or run.rounds < 1:
        parser.error("at least 2000 blocks, one replica, one repeat and one round are needed")
    if not 0 <= run.cores <= 1:
        parser.error("--cores is a share of a core: from 0 to 1")
    return run, options.json


if __name__ == "__main__":
    sys.exit(main())
