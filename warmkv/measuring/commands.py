"""The `warmkv bench` and `warmkv profile` commands. What they need is imported when they run: help is instant."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from warmkv.config import Config, ConfigError, load
from warmkv.measuring import plan as plans
from warmkv.measuring.plan import BenchPlan, MeasureError, ProfilePlan

if TYPE_CHECKING:
    from warmkv.policies.step_profile import StepProfile
    from warmkv.replicas.loading import LoadedModel

errors = Console(stderr=True)
TABLE_WIDTH = 120  # lines of a narrower terminal wrap rather than lose figures
BUSY = 0.5
"""Load of the machine above which its figures are doubtful."""
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
            "policies": plans.split_policies(policies) if policies is not None else None,
            "lengths": plans.split_numbers("--lengths", lengths),
            "batches": plans.split_numbers("--batches", batches),
            "new_tokens": new_tokens,
            "repeats": repeats,
            "seed": seed,
            "prefill": prefill,
        }
        plan = plans.make(BenchPlan, plans.QUICK_BENCH if quick else {}, given)
        settings = _settings(config, set_, model, device)
        if out is not None:
            _charts()
        loaded, found = _load(settings, lambda context: plan.check(context, settings.model.name))

        from warmkv.measuring import bench as benching
        from warmkv.measuring import documents, table

        plan.check_memory(loaded.kv_shape, int(settings.engine.kv_bytes))
        with _bar(benching.measurements(plan)) as progress:
            result = benching.run(plan, loaded, settings.engine, settings.prefix_cache, progress)
        document = json.dumps(documents.bench_document(result, plan, settings, loaded, found), indent=2)
        if json_file == "-":
            print(document)
        else:
            _say_where(found, settings)
            table.show_bench(result, _console())
        if json_file not in (None, "-"):
            _write(Path(json_file), document + "\n")
        if out is not None:
            for file in _charts().save_all(result, out):
                errors.print(str(file), highlight=False, soft_wrap=True)


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
        int | None, typer.Option(help="Of every measurement; the median counts.", show_default=str(PROFILE.repeats))
    ] = None,
    device: DeviceOption = None,
    seed: SeedOption = PROFILE.seed,
    quick: Annotated[bool, typer.Option("--quick", help="A small grid: about a quarter minute, tiny model.")] = False,
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
            "policies": plans.split_policies(policies) if policies is not None else None,
            "lengths": plans.split_numbers("--lengths", lengths),
            "batches": plans.split_numbers("--batches", batches),
            "repeats": repeats,
            "seed": seed,
        }
        plan = plans.make(ProfilePlan, plans.QUICK_PROFILE if quick else {}, given)
        settings = _settings(config, set_, model, device)
        name, reserved = settings.model.name, plans.PROFILED_TOKENS
        loaded, found = _load(settings, lambda context: plan.on(context, reserved, name))
        plan = plan.on(settings.engine.max_context or loaded.max_context, reserved, name)

        from warmkv.measuring import documents, profiling, table

        with _bar() as progress:
            profiler = profiling.Profiler(plan, loaded, settings.engine, progress)
            progress.total(profiler.measurements)
            measured = profiler.run()
        result = documents.profile_document(measured, plan, settings, loaded, found)
        _show_profile(result, out, found, settings, table.show_profile)
