"""`warmkv replay`. What it needs is imported when it runs, so that help is instant."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warmkv import __version__
from warmkv.cli.command import fail, no_standard_output, writing
from warmkv.cli.options import JsonOptions, MachineOptions, ReplayOptions, SettingsOptions, StepTimeChoice, lifetimes
from warmkv.config import Config
from warmkv.extras import require
from warmkv.simulator.studies.replays import variants
from warmkv.terminal import bar, console, errors

if TYPE_CHECKING:
    from warmkv.simulator.steps.costs import StepTimes
    from warmkv.simulator.studies.replays.replay import Result
    from warmkv.simulator.workload.requests import Requests

TTLS = [f"{ttl:g}" for ttl in variants.TTLS]
BUDGETS, POLICIES = [str(budget) for budget in variants.BUDGETS], list(variants.POLICIES)


def replay(
    context: typer.Context,
    trace: ReplayOptions,
    machine: MachineOptions,
    output: JsonOptions,
    options: SettingsOptions,
    ttl: Annotated[
        list[str],
        typer.Option(
            help="Lifetime of every prefix after each use: `300`, `5m`, `1h`, `unlimited`. May be repeated, or a list."
        ),
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
    profile: Annotated[
        Path | None,
        typer.Option(help="Measured step times, as `warmkv profile` writes them; same as simulator.profile."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write figures, requests, time series and a report to this new folder; needs the extra `eval`. "
            "Replays the log as it was recorded, unless TTLs, policies or budgets are given; then with a folder each.",
            callback=no_standard_output,
        ),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Show all figures, not the first table alone.")] = False,
) -> None:
    """Replay an access log, or any trace, in a simulated cluster: hit rate, memory, cost and latency.

    Variants are shown side by side, with what follows from them; `--details` and `--json` have all figures.

    Examples: `warmkv replay access.jsonl --ttl 5m,1h --policy snapkv --budget 0.2 --set cluster.replicas=4`,
    `warmkv replay access.jsonl --profile profile.json`, `warmkv replay trace.jsonl --model FOLDER --gpu L4 --out run`
    """
    options = options.under(*machine.flags())
    if profile is not None and machine.step_times is StepTimeChoice.LOG:
        fail("--profile and --step-times log exclude each other")
    settings = options.read(*([] if profile is None else [f"simulator.profile={json.dumps(str(profile))}"]))
    if all(group.batches_as_vllm for group in settings.groups().values()) and not _given(context, "policy"):
        policy = []  # vLLM keeps the whole cache
    base, budgets = settings.compression.policy, [_budget(text) for text in budget]
    grid = variants.grid(base, lifetimes("--ttl", ttl), budgets, policy, settings.whole_cache)
    if out is not None and not any(_given(context, name) for name in ("ttl", "budget", "policy")):
        grid = [variants.Variant()]
    elif as_recorded:
        grid = [variants.Variant(), *grid]
    grid = list(dict.fromkeys(grid))  # 60m and 1h are one
    folders = _folders(out, grid)
    read = trace.read(settings)
    requests = read.requests
    arrivals = "turns follow the answers before them" if requests.turns else "arrivals as recorded"

    from warmkv.simulator.reports import table
    from warmkv.simulator.studies.replays import replay as replaying
    from warmkv.simulator.studies.replays.step_times import choose_cost, crowding, stand_ins

    cost, source = choose_cost(requests.records, settings, replaying.recorded_policy(), machine.step_times.value)
    if more := crowding(settings):
        source += f"; {more}"
    not_measured = stand_ins(cost, [variant.policy for variant in grid if variant.policy])
    meta = {
        "format": 1,
        "warmkv": __version__,
        "trace": {
            "file": trace.trace.name,
            "sha256": read.sha256,
            "format": read.format,
            "requests": len(requests.records),
            "broken": read.broken,
            "skipped": read.skipped,
            "unrecognised": list(read.unrecognised),
            "arrivals": arrivals,
        },
        "step_times": {"source": source, **cost.figures()},
        "config": settings.model_dump(mode="json"),
    }
    results = _replay_with_bar(requests, settings, grid, cost, folders, meta)
    if not_measured:
        errors.print("not measured: ", style="yellow", end="")
        errors.print(", ".join(not_measured))

    def show() -> None:
        table.show_overview(results, requests.records, arrivals, source, console)
        if details:
            print()
            table.show_details(results, console)
        if out is not None:
            print(f"written to {out}")

    output.give(table.document(results, cost, source), show)


def _replay_with_bar(
    requests: Requests,
    settings: Config,
    grid: Sequence[variants.Variant],
    times: StepTimes,
    folders: Sequence[Path | None],
    meta: Mapping[str, Any],
) -> list[Result]:
    from warmkv.simulator.studies.replays.replay import run

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
                from warmkv.simulator.reports import run_folder, table

                own = {"variant": {"policy": variant.label, "ttl": table.ttl_of(variant.ttl)}}
                with writing(folder):
                    run_folder.write(folder, done, {**meta, **own}, settings.prices_of)
    return results


def _folders(out: Path | None, grid: Sequence[variants.Variant]) -> list[Path | None]:
    """Return where each variant is written: to `out` itself if there is one, else to a folder of its own in it."""
    if out is None:
        return [None] * len(grid)
    require("--out", "pyarrow", "matplotlib")
    from warmkv.simulator.reports.run_folder import check

    check(out)
    if len(grid) == 1:
        return [out]
    return [out / _name(variant) for variant in grid]


def _name(variant: variants.Variant) -> str:
    ttl = "" if variant.ttl is None else f"_ttl{variant.ttl:g}"
    return re.sub(r"[^\w.@=+-]+", "-", variant.label) + ttl


def _given(context: typer.Context, name: str) -> bool:
    """Return True if an option stands on the command line, rather than having its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _budget(text: str) -> int | float:
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise variants.VariantError(f"--budget {text}: write tokens (1024) or a share of the prompt (0.2)") from None
