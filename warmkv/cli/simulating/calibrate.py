"""`warmkv calibrate`: step times from measured request times. Imports when it runs, for instant help."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warmkv.cli.command import write
from warmkv.cli.options import JsonOptions, SettingsOptions, StrictOption, tell_left_out
from warmkv.terminal import bar, plain_table, show_table

if TYPE_CHECKING:
    from warmkv.simulator.latency.calibration import Calibration, Judgement


def calibrate(
    requests: Annotated[
        Path, typer.Argument(help="JSON lines of measured requests; `-`: standard input.", show_default=False)
    ],
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Sequences that the server ran together.", show_default=False)
    ],
    max_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that it computed in a step.", show_default=False)
    ],
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that its KV cache held.", show_default="enough for all")
    ] = None,
    kv_block: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a block of its KV cache.", show_default="as vLLM's")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Write the result as a profile, for `warmkv replay --profile`; `-` prints only it."),
    ] = None,
    strict: StrictOption = False,
    *,
    output: JsonOptions,
    options: SettingsOptions,
) -> None:
    """Fit step times (A + B * tokens + C * context) to the measured times of requests, and tell how well they fit.

    A row has prompt and output tokens, arrival, first and last token in seconds; docs/simulator.md lists the names. The
    settings (model.*, simulator.model) only name the model in a profile.

    Example: `warmkv calibrate requests.jsonl --max-num-seqs 128 --max-batched-tokens 2048 --json -`
    """
    from warmkv.simulator.engine.limits import Limits
    from warmkv.simulator.latency import calibration, measured_requests

    settings = options.read()
    to_output = output.leaves_output_to("--profile", profile)
    given: dict[str, Any] = {} if kv_block is None else {"kv_block": kv_block}
    limits = Limits(max_num_seqs, max_batched_tokens, kv_tokens, **given)
    rows = measured_requests.read(requests, strict=strict)
    tell_left_out(rows.broken, rows.skipped, rows.faults)
    with bar("simulating") as progress:
        result = calibration.calibrate(rows, limits, progress)

    if profile is not None:
        from warmkv.simulator.latency.calibrated_profile import profile_of

        written = profile_of(result, rows, settings, limits)
        write(written.model_dump_json(indent=2) + "\n", profile)
    document = {
        "requests": len(rows),
        "broken": rows.broken,
        "skipped": rows.skipped,
        "limits": asdict(limits),
        "step": asdict(result.cost),
        "step_of_first_half": asdict(result.half_cost),
        "preemptions": result.preemptions,
        "in_sample": _judged(result.in_sample),
        "out_of_sample": _judged(result.out_of_sample),
    }
    output.give(document, lambda: None if to_output else _show(result, len(rows)))


def _judged(judgement: Judgement) -> dict[str, Any]:
    return {"worst_error": judgement.worst, **asdict(judgement)}


def _show(result: Calibration, count: int) -> None:
    cost = result.cost
    print(
        f"a step takes {cost.a * 1e3:.4g} ms + {cost.b * 1e6:.4g} us per token + {cost.c * 1e9:.4g} ns per context "
        f"token; {count:,} requests, {result.preemptions:,} preemptions\n"
    )
    table = plain_table("", "measured", "simulated", "error", "2nd half", "simulated", "error", gap=2)
    inside, outside = result.in_sample, result.out_of_sample
    for metric, figures in inside.measured.items():
        for figure, truth in figures.items():
            row = [f"{truth * 1e3:,.1f}", f"{inside.simulated[metric][figure] * 1e3:,.1f}"]
            row += [f"{inside.error[metric][figure]:+.1%}"]
            if metric in outside.error:
                row += [f"{one[metric][figure] * 1e3:,.1f}" for one in (outside.measured, outside.simulated)]
                row += [f"{outside.error[metric][figure]:+.1%}"]
            table.add_row(f"{metric.upper()} {figure}, ms", *row)
    show_table(table)
    print(
        "\nmeasured, simulated, error: fitted to all requests; 2nd half: fitted to the first half, judged on the second"
    )
