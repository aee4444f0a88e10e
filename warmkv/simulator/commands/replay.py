"""`warmkv replay`. What it needs is imported when it runs, so that help is instant."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from warmkv import __version__
from warmkv.config import Config
from warmkv.faults import UserError
from warmkv.simulator.commands.options import (
    BlockSizeOption,
    CharactersOption,
    ConfigOption,
    FormatOption,
    GpuOption,
    JsonOption,
    ModelOption,
    OpenOption,
    Scope,
    ScopeOption,
    SetOption,
    StepTimes,
    StrictOption,
    TraceArgument,
    bar,
    errors,
    fail,
    machine,
    read_config,
    read_requests,
    write,
)
from warmkv.simulator.studies import variants

if TYPE_CHECKING:
    from warmkv.simulator.steps.costs import StepTimes as Times
    from warmkv.simulator.studies.replay import Result
    from warmkv.simulator.workload.requests import Requests

TABLE_WIDTH = 110  # lines of a narrower terminal wrap rather than lose figures
TTLS, BUDGETS, POLICIES = list(variants.TTLS), [str(budget) for budget in variants.BUDGETS], list(variants.POLICIES)


def replay(
    context: typer.Context,
    trace: TraceArgument,
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
        typer.Option(
            help="Where step times come from: a profile, else --model, else the log's timings, else the settings."
        ),
    ] = StepTimes.AUTO,
    profile: Annotated[
        Path | None,
        typer.Option(help="Measured step times, as `warmkv profile` writes them; same as simulator.profile."),
    ] = None,
    gpu: GpuOption = None,
    model: ModelOption = None,
    open_loop: OpenOption = False,
    scope: ScopeOption = Scope.GLOBAL,
    format: FormatOption = None,
    block_size: BlockSizeOption = None,
    characters_per_token: CharactersOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write figures, requests, time series and a report to this new folder; needs the extra `eval`. "
            "Replays the log as it was recorded, unless TTLs, policies or budgets are given; then with a folder each."
        ),
    ] = None,
    json_file: JsonOption = None,
    strict: StrictOption = False,
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006 (Typer copies it)
) -> None:
    """Replay an access log, or any trace, in a simulated cluster: hit rate, memory, cost and latency.

    Examples: `warmkv replay access.jsonl --ttl 300 --ttl 3600 --policy snapkv --budget 0.2 --set cluster.replicas=4`,
    `warmkv replay access.jsonl --profile profile.json`, `warmkv replay trace.jsonl --model FOLDER --gpu L4 --out run`
    """
    set_ = [*machine(gpu, model), *set_]
    if profile is not None:
        if step_times is StepTimes.LOG:
            fail("replay", "--profile and --step-times log exclude each other")
        set_ = [*set_, f"simulator.profile={json.dumps(str(profile))}"]
    settings = read_config(config, set_)
    try:
        grid = variants.grid(settings.compression.policy, ttl, [_budget(text) for text in budget], policy)
    except variants.VariantError as error:
        fail("replay", str(error))
    if out is not None and not any(_given(context, name) for name in ("ttl", "budget", "policy")):
        grid = [variants.Variant()]
    elif as_recorded:
        grid = [variants.Variant(), *grid]
    folders = _folders(out, grid)

    from warmkv.simulator.workload.source import Source

    read = read_requests(
        "replay", Source(trace, format, block_size, characters_per_token, scope.value, open_loop, strict), settings
    )
    requests, arrivals = read.requests, "arrivals as recorded"
    if requests.turns:
        arrivals = "turns follow the answers before them"

    from warmkv.simulator.reports import table
    from warmkv.simulator.studies import replay as replaying
    from warmkv.simulator.studies.step_times import choose_cost, stand_ins

    try:
        cost, source = choose_cost(requests.records, settings, replaying.recorded_policy(), step_times.value)
        not_measured = stand_ins(cost, [variant.policy for variant in grid if variant.policy])
        meta = {
            "format": 1,
            "warmkv": __version__,
            "trace": {
                "file": trace.name,
                "sha256": read.sha256,
                "format": read.format,
                "requests": len(requests.records),
                "broken": read.broken,
                "skipped": read.skipped,
                "arrivals": arrivals,
            },
            "step_times": {"source": source, **cost.figures()},
            "config": settings.model_dump(mode="json"),
        }
        results = _replay_with_bar(requests, settings, grid, cost, folders, meta)
    except UserError as error:
        fail("replay", str(error))

    if not_measured:
        errors.print(f"[yellow]not measured:[/yellow] {', '.join(not_measured)}", highlight=False)
    document = table.to_json(results, cost, source)
    if json_file == "-":
        print(document)
        return
    first = results[0]
    alive = first.replicas
    replicas = f"{alive.peak} replicas"
    if alive.mean != alive.peak:
        replicas = f"{alive.mean:.2f} replicas on average, at most {alive.peak}"
    print(
        f"{first.requests:,} requests over {first.seconds:,.0f} s, {first.prompt_tokens:,} prompt and "
        f"{first.usage.output:,} output tokens, {replicas}; {arrivals}\n"
        f"step times: {source}\n"
    )
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    table.show(results, console)
    if out is not None:
        print(f"written to {out}")
    if json_file is not None:
        write(document, json_file, "replay")


def _replay_with_bar(
    requests: Requests,
    settings: Config,
    grid: Sequence[variants.Variant],
    times: Times,
    folders: Sequence[Path | None],
    meta: Mapping[str, Any],
) -> list[Result]:
    from warmkv.simulator.studies.replay import run

    count = len(requests.records)
    results: list[Result] = []
    with bar("replaying", count * len(grid)) as progress:
        for number, (variant, folder) in enumerate(zip(grid, folders, strict=True)):

            def shown(arrived: int, before: int = number * count) -> None:
                progress(before + arrived)

            done = run(
                requests.records,
                settings,
                variant,
                times,
                turns=requests.turns,
                inputs=requests.inputs,
                progress=shown,
            )
            results.append(done.result)
            if folder is not None:
                from warmkv.simulator.reports import run_folder

                try:
                    own = {"variant": {"policy": variant.label, "ttl": variant.ttl}}
                    run_folder.write(folder, done, {**meta, **own}, settings.prices)
                except OSError as error:
                    fail("replay", f"cannot write {folder}: {error.strerror}")
    return results


def _folders(out: Path | None, grid: Sequence[variants.Variant]) -> list[Path | None]:
    """Where each variant is written: to `out` itself if it is the only one, else to a folder of its own in it."""
    if out is None:
        return [None] * len(grid)
    if missing := [name for name in ("pyarrow", "matplotlib") if find_spec(name) is None]:
        fail("replay", f"--out needs {' and '.join(missing)}; install with: pip install 'warmkv[eval]'")
    from warmkv.simulator.reports.run_folder import RunFolderError, check

    try:
        check(out)
    except RunFolderError as error:
        fail("replay", str(error))
    if len(grid) == 1:
        return [out]
    return [out / _name(variant) for variant in grid]


def _name(variant: variants.Variant) -> str:
    ttl = "" if variant.ttl is None else f"_ttl{variant.ttl:g}"
    return re.sub(r"[^\w.@=+-]+", "-", variant.label) + ttl


def _given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line, rather than having its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _budget(text: str) -> int | float:
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise variants.VariantError(f"--budget {text}: write tokens (1024) or a share of the prompt (0.2)") from None
