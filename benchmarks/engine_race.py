"""The engine against what a user would pick instead: `generate` with a dynamic or a static cache, continuous batching.

Same weights, same prompts or the same synthetic keys and values, in one run, warm, taking turns. See README.md.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import traceback
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # started as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

if TYPE_CHECKING:
    from benchmarks.engine.arena import Arena
    from benchmarks.engine.setting import Setting

WEIGHTS = {
    "bandwidth": 3, "chunks": 2, "steps": 4, "decode": 9, "memory": 1, "ttft": 2, "handoff": 1, "long": 3, "serving": 6,
    "vllm": 8,
}  # fmt: skip
"""How the minutes are shared, where there is a limit. The races run in this order."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the races; 1 if a figure misses its target (not with --quick) or a race breaks off, 2 for wrong arguments."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    races, figures = _chosen(options.only, parser)
    if options.vllm is None:
        races = [each for each in races if each != "vllm"]
    try:
        return _race(options, _setting(options, parser), races, figures)
    finally:
        gc.unfreeze()  # who goes on in this process may count what is frozen: that walks through all of it


def _race(options: argparse.Namespace, setting: Setting, races: Sequence[str], figures: set[str]) -> int:
    import torch

    from benchmarks.engine import beside_vllm, chunks, decode, memory, prompts, serving, steps
    from benchmarks.engine.arena import Arena

    if options.threads:
        torch.set_num_threads(options.threads)
    gc.freeze()  # what was imported stays: no collection between two runs walks through it
    arena = Arena(setting, options.vllm)
    arena.save = lambda: _write(arena, options.json, races, figures)
    run = {
        "decode": decode.race,
        "memory": memory.race,
        "ttft": prompts.first_tokens,
        "handoff": prompts.hand_off,
        "bandwidth": decode.bandwidth,
        "steps": steps.race,
        "chunks": chunks.race,
        "long": chunks.long,
        "serving": serving.race,
        "vllm": beside_vllm.race,
    }
    broken = False
    arena.fit()
    for at, race in enumerate(races, 1):
        arena.until(sum(WEIGHTS[each] for each in races[:at]) / sum(WEIGHTS[each] for each in races))
        try:
            run[race](arena)
        except Exception as error:  # the others are measured nevertheless
            traceback.print_exc()
            arena.results.note(f"the race {race} broke off: {type(error).__name__}: {error}")
            arena.tidy()
            broken = True
        arena.save()
    return _show(arena, races, figures) or int(broken)


def _write(arena: Arena, path: Path | None, races: Collection[str], only: Collection[str]) -> None:
    """What is known so far, so that a run which is stopped leaves something behind."""
    from benchmarks import report
    from warmkv.measuring import machine

    if path is not None:
        content = report.document(
            arena.machine,
            machine.versions(),
            os.environ.get("WARMKV_COMMIT") or machine.commit(),
            arena.setting.document(),
            arena.results.figures(arena.models.device.type, races, only),
            arena.results.notes,
        )
        report.write(path, content)


def _show(arena: Arena, races: Collection[str], only: Collection[str]) -> int:
    from benchmarks import report

    setting = arena.setting
    figures = arena.results.figures(arena.models.device.type, races, only)
    title = f"engine race: {setting.shape} in {setting.dtype} on {setting.device}, "
    title += f"{setting.sequences} sequences of {setting.context} tokens"
    report.show(title + (" (quick: too small for figures)" if setting.quick else ""), figures, arena.results.notes)
    return 1 if not setting.quick and any(each.met is False for each in figures) else 0


def _chosen(only: str | None, parser: argparse.ArgumentParser) -> tuple[list[str], set[str]]:
    """Return the races to run in their order, and the figures to report."""
    from benchmarks.engine.results import AIMS

    names = [name.strip() for name in only.split(",") if name.strip()] if only else list(WEIGHTS)
    if unknown := [name for name in names if name not in WEIGHTS and name not in AIMS]:
        parser.error(
            f"--only {', '.join(unknown)}: there is no such race or figure, but {', '.join((*WEIGHTS, *AIMS))}"
        )
    figures = {name for name, aim in AIMS.items() if name in names or aim.race in names}
    needed = {AIMS[name].race for name in figures}
    return [race for race in WEIGHTS if race in needed], figures


def _setting(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Setting:
    import torch

    from benchmarks.engine.paged import PAGE
    from benchmarks.engine.setting import ON_CPU, ON_CUDA, quick

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    setting = replace(ON_CUDA if device.startswith("cuda") else ON_CPU, device=device)
    if options.quick:
        setting = quick(setting)
    names = (
        "seed",
        "context",
        "sequences",
        "repeats",
        "new_tokens",
        "seconds",
        "shape",
        "prompt",
        "compile",
        "minutes",
    )
    if options.context and options.context % PAGE:
        parser.error(f"--context must be a multiple of {PAGE} tokens, got {options.context}")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    engine = tuple((name, value) for name, _, value in (each.partition("=") for each in options.engine))
    return replace(setting, engine=engine, **given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="engine_race", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    parser.add_argument("--verbose", action="store_true", help="show what the engine logs")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: whether it runs, not how fast")
    parser.add_argument("--only", metavar="NAME,...", help="races or figures; all by default")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1; auto takes a GPU where there is one")
    parser.add_argument("--shape", choices=("tiny", "27M", "8B"), help="of the model; 27M on a CPU, 8B on a GPU")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="before decoding (16384)")
    parser.add_argument("--sequences", type=int, metavar="N", help="that decode together (8 on a CPU, 32 on a GPU)")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="of every sequence that decodes (128)")
    parser.add_argument("--prompt", type=int, metavar="TOKENS", help="where prompts are computed (8192)")
    parser.add_argument("--repeats", type=int, metavar="N", help="5 on a CPU, 3 on a GPU")
    parser.add_argument("--seconds", type=float, help="of decoding a contestant is timed for in a repeat, at most")
    parser.add_argument("--minutes", type=float, help="in which the repeats must begin; no limit by default")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch, for everybody; torch's choice by default")
    parser.add_argument("--seed", type=int, help="of weights, contexts and prompts (0)")
    parser.add_argument(
        "--vllm",
        type=Path,
        metavar="COMMAND",
        help="race vLLM's engine, too: its command, as benchmarks/peers.sh vllm prints it",
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="the peer with the static cache")
    parser.add_argument(
        "--engine", action="append", default=[], metavar="NAME=VALUE", help="a setting of warmkv's engine, repeatable"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
