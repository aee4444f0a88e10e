"""`warmkv verify`: whether replays can be trusted here. Imports when it runs, for instant help."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from warmkv.faults import UserError
from warmkv.simulator.commands.options import (
    ConfigOption,
    JsonOption,
    SetOption,
    StepTimes,
    StrictOption,
    fail,
    read_config,
    read_requests,
    write,
)

if TYPE_CHECKING:
    from warmkv.simulator.studies.verify import Verdict


def verify(
    log: Annotated[Path, typer.Argument(help="Access log of a live run.", show_default=False)],
    step_times: Annotated[
        StepTimes,
        typer.Option(help="Where step times come from: a profile, else the log itself, else the settings."),
    ] = StepTimes.AUTO,
    json_file: JsonOption = None,
    strict: StrictOption = False,
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006 (Typer copies it)
) -> None:
    """Replay a live run's access log as it was, and tell how well the replay gives what the live run gave.

    The settings must be those that the service ran with. Every request goes to the replica that it went to. Exits with
    code 1 if hit tokens or latencies are farther off than a replay should be.

    Examples: `warmkv verify access.jsonl --config warmkv.yaml`,
    `warmkv verify access.jsonl --config warmkv.yaml --set simulator.profile=profile.json --json`
    """
    settings = read_config(config, set_)
    from warmkv.simulator.studies.replay import recorded_policy
    from warmkv.simulator.studies.step_times import choose_cost
    from warmkv.simulator.studies.verify import verify as verified
    from warmkv.simulator.workload.source import OWN_FORMAT, Source

    records = read_requests("verify", Source(log, OWN_FORMAT, strict=strict), settings).requests.records
    try:
        times, source = choose_cost(records, settings, recorded_policy(), step_times.value)
        verdict = verified(records, settings, times)
    except UserError as error:
        fail("verify", str(error))
    figures = {**asdict(verdict), "hit_error": verdict.hit_error, "misses": verdict.misses}
    document = json.dumps({**figures, "step_times": {"source": source, **times.figures()}}, indent=2)
    if json_file == "-":
        print(document)
    else:
        print(f"{verdict.requests:,} requests; step times: {source}\n")
        _show(verdict, Console())
        if json_file is not None:
            write(document, json_file, "verify")
    if verdict.misses:
        raise typer.Exit(1)


def _show(verdict: Verdict, console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("live", "replay", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    hits = (verdict.live_hit_tokens, verdict.simulated_hit_tokens)
    table.add_row("hit tokens", *(f"{tokens:,}" for tokens in hits), f"{verdict.hit_error:+.2%}")
    if verdict.times is not None:
        for metric, figures in verdict.times.measured.items():
            for figure, truth in figures.items():
                guess, error = verdict.times.simulated[metric][figure], verdict.times.error[metric][figure]
                table.add_row(
                    f"{metric.upper()} {figure}, ms", f"{truth * 1e3:,.1f}", f"{guess * 1e3:,.1f}", f"{error:+.1%}"
                )
    console.print(table)
    equal = {"hit tokens": verdict.equal_hits, "bill": verdict.equal_bills, "slot bytes": verdict.equal_slots}
    print("\nequal for " + ", ".join(f"{share:.1%} of the requests: {what}" for what, share in equal.items()))
    if verdict.misses:
        console.print("[red]not as it was:[/red] " + "; ".join(verdict.misses), highlight=False)
    else:
        console.print("[green]as it was[/green]")
