"""`warmkv verify`: whether replays can be trusted here. Imports when it runs, for instant help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from warmkv.cli.command import fail
from warmkv.cli.options import (
    FormatOption,
    JsonOptions,
    SettingsOptions,
    StepTimeChoice,
    StepTimesOption,
    StrictOption,
    read_requests,
)
from warmkv.terminal import console, plain_table, show_table

if TYPE_CHECKING:
    from warmkv.config import Config
    from warmkv.prefixes.record import RequestRecord
    from warmkv.prefixes.usage import Usage
    from warmkv.simulator.studies.replays.hosted import Comparison
    from warmkv.simulator.studies.replays.verify import Verdict


def verify(
    log: Annotated[
        Path,
        typer.Argument(
            help="Access log of a live run, or a log of a hosted API; `-`: standard input.", show_default=False
        ),
    ],
    step_times: StepTimesOption = StepTimeChoice.AUTO,
    format: FormatOption = None,
    strict: StrictOption = False,
    *,
    output: JsonOptions,
    options: SettingsOptions,
) -> None:
    """Replay a live run's access log and compare hits, bills and latencies with the live run.

    The settings must be those that the service ran with. Every request goes to the replica that it went to. Exits with
    code 1 if hit tokens or latencies are farther off than a replay should be.

    Of a log whose requests name no replica, as those of hosted APIs, it compares reported reads, writes and bills with
    what the rules of prompt caching predict; TTLs and prices are those of the settings.

    Examples: `warmkv verify access.jsonl --config warmkv.yaml`,
    `warmkv verify access.jsonl --config warmkv.yaml --set simulator.profile=profile.json --json`,
    `warmkv verify ~/.claude/projects --set pricing.input=3 --set pricing.output=15`
    """
    settings = options.read()
    from warmkv.simulator.traces.calls import ONE_SERVER
    from warmkv.simulator.workload.source import Source

    records = read_requests(Source(log, format, strict=strict), settings).requests.records
    reported, replicas = any(record.usage.prompt for record in records), {record.replica for record in records}
    if not reported and replicas == {""}:
        fail(
            "the log names no replica and reports no usage: it is no log of a live run; give the access log of a "
            "service, or a log of a hosted API, or use `warmkv replay`"
        )
    if reported and replicas <= {"", ONE_SERVER}:
        misses = _verify_hosted(records, settings, output)
    else:
        misses = _verify_service(records, settings, step_times, output)
    if misses:
        raise typer.Exit(1)


def _verify_service(
    records: Sequence[RequestRecord], settings: Config, step_times: StepTimeChoice, output: JsonOptions
) -> list[str]:
    """Compare a log of warmkv with its replay; return what is too far off."""
    from warmkv.simulator.studies.replays.replay import recorded_policy
    from warmkv.simulator.studies.replays.step_times import choose_cost
    from warmkv.simulator.studies.replays.verify import verify as verified

    times, source = choose_cost(records, settings, recorded_policy(), step_times.value)
    verdict = verified(records, settings, times)
    figures = {**asdict(verdict), "hit_error": verdict.hit_error, "misses": verdict.misses}
    document = {**figures, "step_times": {"source": source, **times.figures()}}
    output.give(document, lambda: _show(verdict, source))
    return verdict.misses


def _verify_hosted(records: Sequence[RequestRecord], settings: Config, output: JsonOptions) -> list[str]:
    """Compare what a hosted API reported with what its rules predict; return what is too far off."""
    from warmkv.simulator.studies.replays.hosted import compare

    found = compare(records, settings)
    figures = {"equal_reads": found.equal_reads, "read_error": found.read_error, "bill_error": found.bill_error}
    output.give({**asdict(found), **figures, "misses": found.misses}, lambda: _show_hosted(found))
    return found.misses


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
    _show_misses(verdict.misses, "as it was")


def _show_hosted(found: Comparison) -> None:
    from warmkv.simulator.studies.replays.hosted import FINDINGS

    print(f"{found.requests:,} requests with reported usage, {found.judged:,} of them judged\n")
    table = plain_table("", "reported", "predicted", "error")
    ttls = sorted({*found.reported.written, *found.predicted.written})
    rows: list[tuple[str, Callable[[Usage], int]]] = [("read", lambda usage: usage.read)]
    rows += [(f"written for {ttl}", partial(_written, ttl)) for ttl in ttls]
    rows += [("input", lambda usage: usage.input)]
    for name, count in rows:
        truth, guess = count(found.reported), count(found.predicted)
        table.add_row(f"{name}, tokens", f"{truth:,}", f"{guess:,}", f"{guess / truth - 1:+.1%}" if truth else "")
    dollars = (found.reported_dollars, found.predicted_dollars)
    table.add_row("bill", *(f"${amount:,.4f}" for amount in dollars), f"{found.bill_error:+.1%}")
    show_table(table)
    print()
    for finding, what in FINDINGS.items():
        if requests := found.findings.get(finding, 0):
            named = ", ".join(found.examples.get(finding, ()))
            print(f"{requests:,} {what}{f' ({named})' if named else ''}")
    _show_misses(found.misses, "as predicted")


def _written(ttl: str, usage: Usage) -> int:
    return usage.written.get(ttl, 0)


def _show_misses(misses: Sequence[str], good: str) -> None:
    if misses:
        console.print(f"not {good}: ", style="red", end="")
        console.print("; ".join(misses))
    else:
        console.print(good, style="green")
