"""`warmkv workload`: traffic to replay. Imports when it runs, for instant help."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from warmkv.cli.command import writing
from warmkv.cli.options import SettingsOptions
from warmkv.simulator.workload.sessions import PRESETS, Workload, WorkloadError
from warmkv.terminal import errors

CHAT = PRESETS["chat"]


class WorkloadFormat(StrEnum):
    WARMKV = "warmkv"
    MOONCAKE = "mooncake"


def workload(
    out: Annotated[Path, typer.Option(help="File to write; `-`: standard output.", show_default=False)],
    preset: Annotated[
        list[str],
        typer.Option(
            help=f"What sessions are like: {', '.join(PRESETS)}. May be repeated for a mix, with the sessions of each, "
            "as in `--preset chat=180 --preset agentic=20`.",
            show_default="chat",
        ),
    ] = [],  # noqa: B006 (Typer copies it)
    sessions: Annotated[
        int | None, typer.Option(min=0, help="Conversations, of presets without a number.", show_default="the preset's")
    ] = None,
    hours: Annotated[float, typer.Option(min=0, help="Time in which they begin.")] = CHAT.hours,
    cv: Annotated[
        float, typer.Option(min=0, help="Burstiness of their beginnings: 1 is Poisson, 0 a clock.")
    ] = CHAT.cv,
    swing: Annotated[
        float, typer.Option(min=0, max=1, help="Of the rate over a day: at the peak 1 + this, at the trough 1 - this.")
    ] = CHAT.swing,
    peak_hour: Annotated[
        float, typer.Option(min=0, help="When the peak is, after the first session.")
    ] = CHAT.peak_hour,
    think_scale: Annotated[float, typer.Option(min=0, help="Factor on the time between turns.")] = CHAT.think_scale,
    length_scale: Annotated[float, typer.Option(help="Factor on all lengths, above 0.")] = CHAT.length_scale,
    system_prompts: Annotated[
        int | None, typer.Option(min=0, help="System prompts that sessions share.", show_default="the preset's")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same file.")] = 0,
    format: Annotated[
        WorkloadFormat, typer.Option(help="An access log, or a trace that other tools read, too.")
    ] = WorkloadFormat.WARMKV,
    *,
    options: SettingsOptions,
) -> None:
    """Write the requests of generated sessions, to be replayed.

    Examples: `warmkv workload --sessions 500 --hours 2 --cv 2 --out sessions.jsonl && warmkv replay sessions.jsonl`,
    `warmkv workload --preset chat=180 --preset agentic=20 --hours 24 --swing 0.6 --out day.jsonl`
    """
    settings = options.read()
    changes: dict[str, Any] = {
        "hours": hours,
        "cv": cv,
        "swing": swing,
        "peak_hour": peak_hour,
        "think_scale": think_scale,
        "length_scale": length_scale,
    }
    if system_prompts is not None:
        changes["system_prompts"] = system_prompts

    import numpy as np

    from warmkv.simulator.traces import mooncake
    from warmkv.simulator.traces.warmkv import trace_of
    from warmkv.simulator.workload import generator

    parts = {name: replace(shape, **changes) for name, shape in _presets(preset or ["chat"], sessions).items()}
    source = np.random.SeedSequence(seed)
    if len(parts) == 1:
        records = generator.generate(next(iter(parts.values())), source, settings)
    else:
        records = generator.mix(parts, source, settings)
    with writing(out):
        if format is WorkloadFormat.MOONCAKE:
            count = mooncake.write(trace_of(records), out)
        else:
            count = generator.write(records, out)
    held = sum(part.sessions for part in parts.values())
    errors.print(
        f"{out}: {count:,} requests in {held:,} sessions, {sum(r.input_tokens for r in records):,} prompt tokens, "
        f"blocks of {settings.prefix_cache.block_size}"
    )


def _presets(asked: list[str], sessions: int | None) -> dict[str, Workload]:
    """Return each named preset with its sessions: NAME=SESSIONS, else `sessions`, else its own.

    Raises WorkloadError.
    """
    parts: dict[str, Workload] = {}
    for text in asked:
        name, _, count = text.partition("=")
        if name not in PRESETS:
            raise WorkloadError(f"--preset {text}: there are {', '.join(PRESETS)}")
        if name in parts or (count and not count.isdigit()):
            raise WorkloadError(f"--preset {text}: write each preset once, as NAME or NAME=SESSIONS")
        own = PRESETS[name].sessions if sessions is None else sessions
        parts[name] = replace(PRESETS[name], sessions=int(count) if count else own)
    return parts
