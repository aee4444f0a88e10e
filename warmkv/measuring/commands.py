"""The `warmkv bench` and `warmkv profile` commands. What they need is imported when they run: help is instant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from warmkv.config import Config
from warmkv.measuring import plan as plans
from warmkv.measuring.plan import BenchPlan, ProfilePlan
from warmkv.measuring.session import context_limit, errors, faults, load, progress_bar, settings_of
from warmkv.policy_spec import split_policies

TABLE_WIDTH = 120  # lines of a narrower terminal wrap rather than lose figures
BENCH, PROFILE = BenchPlan(), ProfilePlan()

ModelOption = Annotated[
    str | None,
    typer.Option(help="Folder or hub name of a causal LM; same as model.path.", show_default="model.path"),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="auto, cpu, cuda, cuda:1; same as model.device.", show_default="model.device")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with settings.")]
SetOption = Annotated[
    list[str], typer.Option("--set", help="A setting, as in `--set engine.prefill_chunk=256`. May be repeated.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Of prompts and synthetic keys and values.")]


def _listed(items: tuple[Any, ...]) -> str:
    return ",".join(map(str, items))


def bench(
    model: ModelOption = None,
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
    device: DeviceOption = None,
    seed: SeedOption = BENCH.seed,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON; `-` prints only them.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for plots: tpot.svg, prefill.svg, bytes.svg.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few cells: about half a minute, tiny model.")] = False,
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006 (Typer copies it)
) -> None:
    """Measure this machine: decoding, prompts, time to the first token cold and warm, resident bytes, policy by policy.

    Decoding starts from synthetic keys and values, so long contexts are cheap; prompts go through the whole engine.

    Examples: `warmkv bench --quick`, `warmkv bench --policies full,snapkv@1024 --lengths 8192,16384 --batches 1,8
    --no-prefill --model FOLDER --set engine.kv_bytes=8GiB --json bench.json --out plots`
    """
    with faults("bench"):
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
        settings = settings_of(config, set_, model, device)
        _prepare(Path(json_file) if json_file not in (None, "-") else None, out and out / "tpot.svg")
        if out is not None:
            import matplotlib  # noqa: F401 (is missing now rather than after an hour)
        loaded, found = load(settings, lambda context: plan.check(context, settings.model.name))

        from warmkv.measuring import bench as benching
        from warmkv.measuring import documents, table
        from warmkv.replicas.device_memory import plan_replica

        plan.check_memory(loaded.kv_shape, plan_replica(loaded, settings.engine, settings.prefix_cache).kv)
        with progress_bar(benching.measurements(plan)) as progress:
            result = benching.run(plan, loaded, settings.engine, settings.prefix_cache, progress)
        document = json.dumps(documents.bench_document(result, plan, settings, loaded, found), indent=2)
        if json_file == "-":
            print(document)
        else:
            _say_where(found, settings)
            table.show_bench(result, _console())
        if json_file not in (None, "-"):
            Path(json_file).write_text(document + "\n", encoding="utf-8")
        if out is not None:
            from warmkv.measuring import charts

            for file in charts.save_all(result, out):
                errors.print(str(file), highlight=False, markup=False, soft_wrap=True)


def profile(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it; `-` prints only it.")] = Path(
        "profile.json"
    ),
    model: ModelOption = None,
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
    device: DeviceOption = None,
    seed: SeedOption = PROFILE.seed,
    quick: Annotated[bool, typer.Option("--quick", help="A small grid: about half a minute, tiny model.")] = False,
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006
) -> None:
    """Measure how long the engine's steps take on this machine, and write what `warmkv replay --profile` reads.

    For every policy, prefill chunks, decode steps and hand-offs are measured over a grid of tokens and contexts, and
    coefficients are fitted to them. The error of the fit is shown and written, too.

    Examples: `warmkv profile --quick`, `warmkv profile --policies full,snapkv,h2o --out h200.json --device cuda`, then
    `warmkv replay access.jsonl --profile h200.json`
    """
    with faults("profile"):
        given = {
            "policies": split_policies(policies) if policies is not None else None,
            "lengths": plans.split_numbers("--lengths", lengths),
            "batches": plans.split_numbers("--batches", batches),
            "repeats": repeats,
            "seed": seed,
        }
        plan = plans.make(ProfilePlan, plans.QUICK_PROFILE if quick else {}, given)
        settings = settings_of(config, set_, model, device)
        to_file = str(out) != "-"
        _prepare(out if to_file else None)
        loaded, found = load(settings, lambda context: plan.on(context, settings.model.name))

        from warmkv.measuring import documents, profiling, table
        from warmkv.simulator.steps import step_profile

        plan = plan.on(context_limit(settings, loaded.max_context), settings.model.name)
        profiler = profiling.Profiler(plan, loaded, settings.engine)
        with progress_bar(profiler.measurements) as progress:
            measured = profiler.run(progress)
        result = documents.profile_document(measured, plan, settings, loaded, found)
        if not to_file:
            print(result.model_dump_json(indent=2))
            return
        step_profile.write(result, out)
        _say_where(found, settings)
        table.show_profile(result, _console())
        print(f"{out}: read it with warmkv replay LOG --profile {out}")


def _prepare(*files: Path | None) -> None:
    """Make the folders of what will be written, before an hour of measuring. Raises OSError."""
    for file in files:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)


def _say_where(found: dict[str, Any], settings: Config) -> None:
    """Print a line: what was measured, and on which machine."""
    gpu = f"{found['gpu']}, " if found["gpu"] else ""
    print(f"{settings.model.name} on {gpu}{found['cpu']}, {found['cores']} cores, {found['threads']} threads\n")


def _console() -> Console:
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    return console
