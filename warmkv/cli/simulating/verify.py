"""`warmkv verify`: whether replays can be trusted here. Imports when it runs, for instant help."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from warmkv.cli.options import (
    JsonOptions,
    SettingsOptions,
    StepTimeChoice,
    StepTimesOption,
    StrictOption,
    read_requests,
)
from warmkv.terminal import console, plain_table, show_table

if TYPE_CHECKING:
    from warmkv.simulator.studies.verify import Verdict


def verify(
    log: Annotated[Path, typer.Argument(help="Access log of a live run.", show_default=False)],
    step_times: StepTimesOption = StepTimeChoice.AUTO,
    strict: StrictOption = False,
    *,
    output: JsonOptions,
    options: SettingsOptions,
) -> None:
    """Replay a live run's access log and compare hits, bills and latencies with the live run.

    The settings must be those that the service ran with. Every request goes to the replica that it went to. Exits with
    code 1 if hit tokens or latencies are farther off than a replay should be.

    Examples: `warmkv verify access.jsonl --config warmkv.yaml`,
    `warmkv verify access.jsonl --config warmkv.yaml --set simulator.profile=profile.json --json`
    """
    settings = options.read()
    from warmkv.simulator.studies.replay import recorded_policy
    from warmkv.simulator.studies.step_times import choose_cost
    from warmkv.simulator.studies.verify import verify as verified
    from warmkv.simulator.workload.source import OWN_FORMAT, Source

    records = read_requests(Source(log, OWN_FORMAT, strict=strict), settings).requests.records
    times, source = choose_cost(records, settings, recorded_policy(), step_times.value)
    verdict = verified(records, settings, times)
    figures = {**asdict(verdict), "hit_error": verdict.hit_error, "misses": verdict.misses}
    document = {**figures, "step_times": {"source": source, **times.figures()}}
    output.give(document, lambda: _show(verdict, source))
    if verdict.misses:
        raise typer.Exit(1)


def _show(verdict: Verdict, source: str) -> None:
    print(f"{verdict.requests:,} requests; step times: {source}\n")
    table = plain_table("", "live", "replay", "error")
    hits = (verdict.live_hit_tokens, verdict.simulated_hit_tokens)
    table.add_row("hit tokens", *(f"{tokens:,}" for tokens in hits), f"{verdict.hit_error:+.2%}")
    if verdict.times is not None:
        for metric, figures in verdict.times.measured.items():
            for figure, truth in figures.items():
                guess, error = verdict.times.simulated[metric][figure], verdict.times.error[metric][figure]
                table.add_row(
                    f"{metric.upper()} {figure}, ms", f"{truth * 1e3:,.1f}", f"{guess * 1e3:,.1f}", f"{error:+.1%}"
                )
    show_table(table)
    equal = {"hit tokens": verdict.equal_hits, "bill": verdict.equal_bills, "slot bytes": verdict.equal_slots}
    print("\nequal for " + ", ".join(f"{share:.1%} of the requests: {what}" for what, share in equal.items()))
    if verdict.misses:
        console.print("not as it was: ", style="red", end="")
        console.print("; ".join(verdict.misses))
    else:
        console.print("as it was", style="green")
