"""The command-line functions of the simulator. What they need is imported when they run, so that help is instant."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from warmkv.config import Config
from warmkv.simulator import variants
from warmkv.simulator.command_line import (
    ConfigOption,
    JsonOption,
    SetOption,
    StrictOption,
    bar,
    errors,
    fail,
    read_config,
    told,
    write,
)

if TYPE_CHECKING:
    from warmkv.policies.costs import StepTimes as Times
    from warmkv.simulator.access_log import Log
    from warmkv.simulator.replay import Result

TABLE_WIDTH = 110  # lines of a narrower terminal wrap rather than lose figures
TTLS, BUDGETS, POLICIES = list(variants.TTLS), [str(budget) for budget in variants.BUDGETS], list(variants.POLICIES)


class StepTimes(StrEnum):
    AUTO = "auto"
    CONFIG = "config"
    LOG = "log"


def replay(
    log: Annotated[Path, typer.Argument(help="Access log, one JSON line per request.", show_default=False)],
    ttl: Annotated[
        list[float], typer.Option(help="Seconds that every prefix lives after each use. May be repeated.")
    ] = TTLS,
    budget: Annotated[
        list[str],
        typer.Option(help="Tokens kept per KV head (1024) or share of the prompt (0.2). May be repeated."),
    ] = BUDGETS,
    policy: Annotated[
        list[str], typer.Option(help="Compression policy, beside the full cache. May be repeated.")
    ] = POLICIES,
    as_recorded: Annotated[
        bool, typer.Option("--as-recorded", help="First show the log's own policies and TTLs, too.")
    ] = False,
    step_times: Annotated[
        StepTimes,
        typer.Option(help="Where step times come from: a profile, else the log if it has timings, else the settings."),
    ] = StepTimes.AUTO,
    profile: Annotated[
        Path | None,
        typer.Option(help="Measured step times, as `warmkv profile` writes them; same as simulator.profile."),
    ] = None,
    json_file: JsonOption = None,
    strict: StrictOption = False,
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006 (Typer copies it)
) -> None:
    """Replay an access log in a simulated cluster: hit rate, memory, cost and latency for other TTLs and budgets.

    Examples: `warmkv replay access.jsonl --ttl 300 --ttl 3600 --policy snapkv --budget 0.2 --set cluster.replicas=4`,
    `warmkv replay access.jsonl --profile profile.json`
    """
    if profile is not None:
        if step_times is StepTimes.LOG:
            fail("replay", "--profile and --step-times log exclude each other")
        set_ = [*set_, f"simulator.profile={json.dumps(str(profile))}"]
    settings = read_config(config, set_)
    trace = _read_trace(log, strict)
    try:
        grid = variants.grid(settings.compression.policy, ttl, [_budget(text) for text in budget], policy)
    except variants.VariantError as error:
        fail("replay", str(error))
    if as_recorded:
        grid = [variants.Variant(), *grid]

    from warmkv.simulator import replay as replaying
    from warmkv.simulator import report, timing

    try:
        cost, source = timing.choose_cost(trace.requests, settings, replaying.recorded_policy(), step_times.value)
        stand_ins = timing.stand_ins(cost, [variant.policy for variant in grid if variant.policy])
        results = _replay_with_bar(trace, settings, grid, cost)
    except ValueError as error:
        fail("replay", str(error))

    if stand_ins:
        errors.print(f"[yellow]not measured:[/yellow] {', '.join(stand_ins)}", highlight=False)
    document = report.to_json(results, cost, source)
    if json_file == "-":
        print(document)
        return
    first = results[0]
    print(
        f"{first.requests:,} requests over {first.seconds:,.0f} s, {first.prompt_tokens:,} prompt and "
        f"{first.usage.output:,} output tokens, {settings.cluster.replicas} replicas\nstep times: {source}\n"
    )
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    report.show(results, console)
    if json_file is not None:
        write(document, json_file, "replay")


def _replay_with_bar(trace: Log, settings: Config, grid: list[variants.Variant], times: Times) -> list[Result]:
    from warmkv.simulator.replay import replay as run

    count = len(trace.requests)
    with bar("replaying", count * len(grid)) as progress:
        return run(
            trace.requests, settings, grid, times, progress=lambda number, arrived: progress(number * count + arrived)
        )


def _read_trace(log: Path, strict: bool) -> Log:
    from warmkv.simulator import access_log
    from warmkv.simulator.traces import TraceError

    try:
        trace = access_log.read(log, strict=strict)
    except TraceError as error:
        fail("replay", str(error))
    told(trace.broken, trace.skipped, trace.faults)
    if not trace.requests:
        fail("replay", f"{log} has no request to replay; the gateway writes one to gateway.access_log")
    return trace


def _budget(text: str) -> int | float:
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise variants.VariantError(f"--budget {text}: write tokens (1024) or a share of the prompt (0.2)") from None
