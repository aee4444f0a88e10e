"""The `warmkv bench` and `warmkv profile` commands. What they need is imported when they run: help is instant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from warmkv.cli.command import writing
from warmkv.cli.options import JsonOptions, SettingsOptions
from warmkv.config import Config
from warmkv.extras import require
from warmkv.measuring import plan as plans
from warmkv.measuring.plan import BenchPlan, ProfilePlan
from warmkv.measuring.session import BUSY, context_limit, load
from warmkv.policy_spec import split_policies
from warmkv.terminal import console, errors, steps

BENCH, PROFILE = BenchPlan(), ProfilePlan()


@dataclass(frozen=True)
class ModelOptions(SettingsOptions):
    """The settings in force, the model and its device among them."""

    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of a causal LM; same as model.path.", show_default="model.path"),
    ] = None
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda, cuda:1; same as model.device.", show_default="model.device")
    ] = None

    def read(self, *flags: str) -> Config:
        """Return the settings; the model and the device of the command line win. Raises ConfigError."""
        settings = super().read(*flags)
        given = {"path": self.model, "device": self.device}
        chosen = settings.model.model_copy(update={key: value for key, value in given.items() if value is not None})
        return settings.model_copy(update={"model": chosen})


SeedOption = Annotated[int, typer.Option(min=0, help="Of prompts and synthetic keys and values.")]


def _listed(items: tuple[Any, ...]) -> str:
    return ",".join(map(str, items))


def bench(
    options: ModelOptions,
    output: JsonOptions,
    policies: Annotated[
        str | None,
        typer.Option(help="As in `full,snapkv@512,h2o@0.2,full+kivi4`.", show_default=_listed(BENCH.policies)),
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Prompt tokens.", show_default=_listed(BENCH.lengths))] = None,
    batches: Annotated[
        str | None, typer.Option(help="Sequences that decode together.", show_default=_listed(BENCH.batches))
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option(help="Tokens of each sequence.", show_default=str(BENCH.new_tokens))
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Of every measurement; the median counts.", show_default=str(BENCH.repeats))
    ] = None,
    prefill: Annotated[
        bool, typer.Option("--prefill/--no-prefill", help="Whether to compute prompts, too: slow for long ones.")
    ] = BENCH.prefill,
    seed: SeedOption = BENCH.seed,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for plots: tpot.svg, prefill.svg, bytes.svg.")
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
    _prepare(None if output.alone else output.json_file, out and out / "tpot.svg")
    if out is not None:
        require("--out", "matplotlib")
    require("a bench", "torch", "transformers")
    loaded, found = load(settings, lambda context: plan.check(context, settings.model.name))
    _warn_if_busy(found)

    from warmkv.measuring import bench as benching
    from warmkv.measuring import documents, table
    from warmkv.replicas.device_memory import plan_replica

    plan.check_memory(loaded.kv_shape, plan_replica(loaded, settings.engine, settings.prefix_cache).kv)
    with steps(benching.measurements(plan), begun=-1) as progress:
        result = benching.run(plan, loaded, settings.engine, settings.prefix_cache, lambda what: progress(what, 1))

    def show() -> None:
        _say_where(found, settings)
        table.show_bench(result, console)

    output.give(documents.bench_document(result, plan, settings, loaded, found), show)
    if out is not None:
        from warmkv.measuring import charts

        with writing(out):
            for file in charts.save_all(result, out):
                errors.print(str(file))


def profile(
    options: ModelOptions,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it; `-` prints only it.")] = Path(
        "profile.json"
    ),
    policies: Annotated[
        str | None,
        typer.Option(help="Without budgets, as in `full,snapkv,h2o+fp8`.", show_default=_listed(PROFILE.policies)),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Contexts, in tokens.", show_default=f"{PROFILE.points} up to the model's")
    ] = None,
    batches: Annotated[
        str | None, typer.Option(help="Sequences that decode together.", show_default=_listed(PROFILE.batches))
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Of every measurement; the least counts.", show_default=str(PROFILE.repeats))
    ] = None,
    seed: SeedOption = PROFILE.seed,
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
    _prepare(out if to_file else None)
    require("a profile", "torch", "transformers")
    loaded, found = load(settings, lambda context: plan.on(context, settings.model.name))
    _warn_if_busy(found)

    from warmkv.measuring import documents, profiling, table
    from warmkv.simulator.steps import step_profile

    plan = plan.on(context_limit(settings, loaded.max_context), settings.model.name)
    profiler = profiling.Profiler(plan, loaded, settings.engine)
    with steps(profiler.measurements, begun=-1) as progress:
        measured = profiler.run(lambda what: progress(what, 1))
    result = documents.profile_document(measured, plan, settings, loaded, found)
    if not to_file:
        print(result.model_dump_json(indent=2))
        return
    with writing(out):
        step_profile.write(result, out)
    _say_where(found, settings)
    table.show_profile(result, console)
    print(f"{out}: read it with warmkv replay LOG --profile {out}")


def _prepare(*files: str | Path | None) -> None:
    """Make the folders of what will be written, before an hour of measuring."""
    for file in files:
        if file is not None:
            with writing(file):
                Path(file).parent.mkdir(parents=True, exist_ok=True)


def _warn_if_busy(found: dict[str, Any]) -> None:
    if found["load"] > BUSY:
        errors.print("other work runs on this machine", style="yellow", end="")
        errors.print(f" (load {found['load']} on {found['cores']} cores): figures will be worse than it can do")


def _say_where(found: dict[str, Any], settings: Config) -> None:
    """Print a line of what was measured on what."""
    gpu = f"{found['gpu']}, " if found["gpu"] else ""
    print(f"{settings.model.name} on {gpu}{found['cpu']}, {found['cores']} cores, {found['threads']} threads\n")
