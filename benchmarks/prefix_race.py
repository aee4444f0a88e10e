"""The prefix cache against computing prompts anew: time to the first token by tier, and the speed of its index.

See README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # started as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

if TYPE_CHECKING:
    from benchmarks.report import Figure

RACES = ("tiers", "index")
INDEX_TARGETS = {"lookups_per_second_lru": 2e6, "inserts_per_second_lru": 1e6, "index_bytes_per_block": 60.0}


@dataclass(frozen=True, slots=True)
class Run:
    """Lengths in tokens."""

    shape: str
    device: str
    dtype: str
    lengths: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192, 16_384)
    blocks: int = 1_000_000  # of the index
    repeats: int = 5
    seed: int = 0
    races: tuple[str, ...] = RACES
    quick: bool = False

    @property
    def warm_target(self) -> float:
        return 0.15 if self.device.startswith("cuda") else 0.20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the races; 1 if a figure misses its target (not with --quick), 2 for wrong arguments."""
    run, path = _parse(arguments)
    import torch

    from benchmarks import report
    from benchmarks.engine.results import Results
    from benchmarks.engine.setting import ON_CPU, build
    from benchmarks.prefix import index, tiers
    from warmkv.measuring import machine

    identity = machine.identity(torch.device(run.device))
    results, start = Results(), time.perf_counter()

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {what}", file=sys.stderr, flush=True)

    if "tiers" in run.races:
        setting = replace(ON_CPU, shape=run.shape, device=run.device, dtype=run.dtype, seed=run.seed)
        tiers.race(build(setting), run.lengths, run.repeats, run.seed, results, say)
        results.note(
            "files were dropped from the system's page cache before each read from disk, as far as it does that"
        )
    if "index" in run.races:
        index.race(run.blocks, run.repeats, results, say)
    figures = _figures(run, results.measured)
    if path is not None:
        commit = os.environ.get("WARMKV_COMMIT") or machine.commit()
        settings = {name: getattr(run, name) for name in run.__slots__}
        report.write(path, report.document(identity, machine.versions(), commit, settings, figures, results.notes))
    title = f"prefix race: {run.shape} in {run.dtype} on {run.device}"
    report.show(title + (" (quick: too small for figures)" if run.quick else ""), figures, results.notes)
    return 1 if not run.quick and any(each.met is False for each in figures) else 0


def _figures(run: Run, measured: dict[str, list[float]]) -> list[Figure]:
    """Return the ratios with their targets, then everything that was measured."""
    from benchmarks.report import figure, ratios

    found = []
    for length in run.lengths if "tiers" in run.races else ():
        cold = measured[f"ttft_seconds_cold_{length}"]
        for tier, target in (("device", run.warm_target), ("host", 1.0), ("disk", None)):
            values = ratios(measured[f"ttft_seconds_{tier}_{length}"], cold)
            found.append(figure(f"ttft_{tier}_vs_cold_{length}", values, target, "lower"))
    for name, values in measured.items():
        target = INDEX_TARGETS.get(name)
        found.append(figure(name, values, target, "lower" if "seconds_" in name or "bytes" in name else "higher"))
    return found


def _parse(arguments: Sequence[str] | None) -> tuple[Run, Path | None]:
    import torch

    parser = argparse.ArgumentParser(prog="prefix_race", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: whether it runs, not how fast")
    parser.add_argument("--only", choices=RACES, action="append", help="one race, repeatable; all by default")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1; auto takes a GPU where there is one")
    parser.add_argument("--shape", choices=("tiny", "27M", "8B"), help="of the model; 27M on a CPU, 8B on a GPU")
    parser.add_argument("--lengths", metavar="TOKENS,...", help="of the prompts (1024,2048,4096,8192,16384)")
    parser.add_argument("--blocks", type=int, metavar="N", help="of the index (1000000)")
    parser.add_argument("--repeats", type=int, metavar="N", help="5 by default")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch; its own choice by default")
    parser.add_argument("--seed", type=int, help="of weights and prompts (0)")
    options = parser.parse_args(arguments)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    run = Run("8B", device, "bfloat16") if device.startswith("cuda") else Run("27M", device, "float32")
    if options.quick:
        run = replace(run, shape="tiny", lengths=(256, 512), blocks=10_000, repeats=2, quick=True)
    given: dict[str, Any] = {name: getattr(options, name) for name in ("shape", "blocks", "repeats", "seed")}
    if options.lengths:
        try:
            given["lengths"] = tuple(int(length) for length in options.lengths.split(","))
        except ValueError:
            parser.error(f"--lengths {options.lengths}: write it as 1024,4096")
    if options.only:
        given["races"] = tuple(race for race in RACES if race in options.only)
    if options.threads:
        torch.set_num_threads(options.threads)
    return replace(run, **{name: value for name, value in given.items() if value is not None}), options.json


if __name__ == "__main__":
    sys.exit(main())
