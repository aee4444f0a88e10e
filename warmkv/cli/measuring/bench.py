"""`warmkv bench`: what policies cost on this machine. Imports when it runs, for instant help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from warmkv.cli.command import make_folder_of, no_standard_output, writing
from warmkv.cli.options import JsonOptions, ModelOptions, SeedOption, listed
from warmkv.extras import require
from warmkv.measuring import plan as plans
from warmkv.measuring.plan import BenchPlan
from warmkv.measuring.session import load
from warmkv.policy_spec import split_policies
from warmkv.terminal import console, errors, steps

DEFAULT = BenchPlan()


def bench(
    options: ModelOptions,
    output: JsonOptions,
    policies: Annotated[
        str | None,
        typer.Option(help="As in `full,snapkv@512,h2o@0.2,full+kivi4`.", show_default=listed(DEFAULT.policies)),
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Prompt tokens.", show_default=listed(DEFAULT.lengths))] = None,
    batches: Annotated[
        str | None, typer.Option(help="Sequences that decode together.", show_default=listed(DEFAULT.batches))
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option(help="Tokens of each sequence.", show_default=str(DEFAULT.new_tokens))
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Of every measurement; the median counts.", show_default=str(DEFAULT.repeats))
    ] = None,
    prefill: Annotated[
        bool, typer.Option("--prefill/--no-prefill", help="Whether to compute prompts, too: slow for long ones.")
    ] = DEFAULT.prefill,
    seed: SeedOption = DEFAULT.seed,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for plots: tpot.svg, prefill.svg, bytes.svg.", callback=no_standard_output
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few cells: about half a minute, tiny model.")] = False,
) -> None:
    """Measure this machine: decoding, prompts, time to the first token cold and warm, resident bytes, policy by policy.

    Decoding starts from synthetic keys and values, so long contexts are cheap; prompts go through the whole engine.

    Examples: `warmkv bench --quick`, `warmkv bench --policies full,snapkv@1024 --lengths 8192,16384 --batches 1,8
    --no-prefill --model FOLDER --set engine.kv_bytes=8GiB --json bench.json --out plots`
    """
    given = {
        "policies": split_policies(policies) if policies is not None else None,
        "lengths": plans.split_numbers("--lengths", lengths),
        "batches": plans.split_numbers("--batches", batches),
        "new_tokens": new_tokens,
        "repeats": repeats,
        "seed": seed,
        "prefill": prefill,
    }
    plan = plans.make(BenchPlan, plans.QUICK_BENCH if quick else {}, given)
    settings = options.read()
    require("a bench", "torch", "transformers", *(["matplotlib"] if out is not None else []))
    if output.json_file is not None and not output.alone:
        make_folder_of(output.json_file)
    if out is not None:
        make_folder_of(out / "tpot.svg")
    loaded, found = load(settings, lambda context: plan.check(context, settings.model.name))

    from warmkv.measuring import bench as benching
    from warmkv.measuring import documents, table
    from warmkv.replicas.device_memory import plan_replica

    plan.check_memory(loaded.kv_shape, plan_replica(loaded, settings.engine, settings.prefix_cache).kv)
    with steps(benching.measurements(plan), begun=-1) as progress:
        result = benching.run(plan, loaded, settings.engine, settings.prefix_cache, lambda what: progress(what, 1))

    def show() -> None:
        table.show_machine(found, settings.model.name)
        table.show_bench(result, console)

    output.give(documents.bench_document(result, plan, settings, loaded, found), show)
    if out is not None:
        from warmkv.measuring import charts

        with writing(out):
            for file in charts.save_all(result, out):
                errors.print(str(file))
