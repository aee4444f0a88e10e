"""`warmkv profile`: step times of this machine for the simulator. Imports when it runs, for instant help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from warmkv.cli.command import make_folder_of, writing
from warmkv.cli.options import ModelOptions, SeedOption, listed
from warmkv.extras import require
from warmkv.measuring import plan as plans
from warmkv.measuring.plan import ProfilePlan
from warmkv.measuring.session import context_limit, load
from warmkv.policy_spec import split_policies
from warmkv.terminal import console, steps

DEFAULT = ProfilePlan()


def profile(
    options: ModelOptions,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it; `-` prints only it.")] = Path(
        "profile.json"
    ),
    policies: Annotated[
        str | None,
        typer.Option(help="Without budgets, as in `full,snapkv,h2o+fp8`.", show_default=listed(DEFAULT.policies)),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Contexts, in tokens.", show_default=f"{DEFAULT.points} up to the model's")
    ] = None,
    batches: Annotated[
        str | None, typer.Option(help="Sequences that decode together.", show_default=listed(DEFAULT.batches))
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Of every measurement; the least counts.", show_default=str(DEFAULT.repeats))
    ] = None,
    seed: SeedOption = DEFAULT.seed,
    quick: Annotated[bool, typer.Option("--quick", help="A small grid: about half a minute, tiny model.")] = False,
) -> None:
    """Measure how long the engine's steps take on this machine, and write what `warmkv replay --profile` reads.

    For every policy, prefill chunks, decode steps and hand-offs are measured over a grid of tokens and contexts, and
    coefficients are fitted to them. The error of the fit is shown and written, too.

    Examples: `warmkv profile --quick`, `warmkv profile --policies full,snapkv,h2o --out h200.json --device cuda`, then
    `warmkv replay access.jsonl --profile h200.json`
    """
    given = {
        "policies": split_policies(policies) if policies is not None else None,
        "lengths": plans.split_numbers("--lengths", lengths),
        "batches": plans.split_numbers("--batches", batches),
        "repeats": repeats,
        "seed": seed,
    }
    plan = plans.make(ProfilePlan, plans.QUICK_PROFILE if quick else {}, given)
    settings = options.read()
    to_file = str(out) != "-"
    require("a profile", "torch", "transformers")
    if to_file:
        make_folder_of(out)
    loaded, found = load(settings, lambda context: plan.on(context, settings.model.name))

    from warmkv.measuring import documents, profiling, table
    from warmkv.simulator.steps import step_profile

    plan = plan.on(context_limit(settings, loaded.max_context), settings.model.name)
    profiler = profiling.Profiler(plan, loaded, settings.engine)
    profiler.check()
    with steps(profiler.measurements, begun=-1) as progress:
        measured = profiler.run(lambda what: progress(what, 1))
    result = documents.profile_document(measured, plan, settings, loaded, found)
    if not to_file:
        print(result.model_dump_json(indent=2))
        return
    with writing(out):
        step_profile.write(result, out)
    table.show_machine(found, settings.model.name)
    table.show_profile(result, console)
    print(f"{out}: read it with warmkv replay LOG --profile {out}")
