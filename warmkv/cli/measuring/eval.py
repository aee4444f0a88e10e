"""The `warmkv eval` command. What it needs is imported when it runs, so that help is instant."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warmkv.cli.command import no_standard_output, resumable
from warmkv.cli.options import JsonOptions, listed
from warmkv.config import ModelConfig
from warmkv.evaluation import plan as plans
from warmkv.evaluation import tasks as families
from warmkv.evaluation.plan import EvalError, EvalPlan
from warmkv.extras import require
from warmkv.policy_spec import METHODS, STORAGES, split_policies
from warmkv.terminal import console, steps

if TYPE_CHECKING:
    from warmkv.evaluation.summary import Row
    from warmkv.replicas.loading.load import LoadedModel

DEFAULT = EvalPlan()


class Form(StrEnum):
    AUTO = "auto"
    CHAT = "chat"
    PLAIN = "plain"
    BOTH = "both"


def evaluate(
    output: JsonOptions,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the results; one that holds this run is continued.", callback=no_standard_output),
    ] = Path("runs/eval"),
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal LM; `tiny` is the one in the package.")] = (
        DEFAULT.model
    ),
    policies: Annotated[
        str,
        typer.Option(
            help="Policies without budgets, as in `snapkv,h2o,snapkv+kivi4,full+turbo4,snapkv:window=16`. "
            f"Methods: {', '.join(METHODS)}. Storages: {', '.join(STORAGES)}."
        ),
    ] = listed(DEFAULT.policies),
    budgets: Annotated[str, typer.Option(help="Shares of the full cache's bytes.")] = listed(DEFAULT.budgets),
    tasks: Annotated[str, typer.Option(help=f"Any of {', '.join(families.NAMES)}; or all.")] = "all",
    lengths: Annotated[
        str | None, typer.Option(help="Tokens of the samples.", show_default=listed(DEFAULT.lengths))
    ] = None,
    depths: Annotated[
        str | None, typer.Option(help="Where the needle stands, 0 to 1.", show_default=listed(DEFAULT.depths))
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="For every task, length and depth.", show_default=str(DEFAULT.samples))
    ] = None,
    form: Annotated[Form, typer.Option(help="Auto is chat where the model has a template, else plain.")] = Form.AUTO,
    stream_tokens: Annotated[
        int | None, typer.Option(help="Length of the stream.", show_default=str(DEFAULT.stream_tokens))
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same numbers.")] = DEFAULT.seed,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = DEFAULT.device,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few samples and lengths: about a minute, tiny model.")
    ] = False,
) -> None:
    """Measure the quality of answers under compression policies at the same bytes.

    Writes `results.parquet` (a row for every sample and policy), `summary.json` and `report.html`. Run the same again
    to continue what was interrupted.

    Examples: `warmkv eval --quick`, `warmkv eval --model Qwen/Qwen3-0.6B --policies snapkv,h2o,full+kivi4 --budgets
    0.5,0.2 --tasks needle,chat --lengths 2048,8192 --out runs/qwen3`
    """
    given = {
        "model": model,
        "device": device,
        "seed": seed,
        "samples": samples,
        "stream_tokens": stream_tokens,
        "policies": split_policies(policies),
        "budgets": _numbers("--budgets", budgets, float),
        "lengths": _numbers("--lengths", lengths, int),
        "depths": _numbers("--depths", depths, float),
        "tasks": families.NAMES if tasks.strip() == "all" else tuple(_pieces(tasks)),
        "forms": {"auto": (), "both": ("plain", "chat")}.get(form, (form.value,)),
    }
    plan = plans.make(quick, given)
    require("an evaluation", "torch", "transformers", "matplotlib", "pyarrow")
    with resumable(out):
        summary, show = _run(plan, out)
    output.give(summary, show)


def _run(plan: EvalPlan, out: Path) -> tuple[Row, Callable[[], None]]:
    """Evaluate, and write the files of the run; return its summary, and what prints it."""
    from warmkv.evaluation import report, run, summary, table
    from warmkv.evaluation.results import RunFolder

    loaded, tokenizer = _load(plan)
    run.check(plan, loaded)
    folder = RunFolder(out, run.meta_of(plan, loaded))
    with steps(run.work(plan, tokenizer)) as progress:
        run.evaluate(plan, loaded, tokenizer, folder, progress)
    rows, stream = folder.rows(), folder.stream()
    entries = summary.summarise(rows)
    document = summary.document(folder.meta, entries, stream)
    folder.write("summary.json", json.dumps(document, indent=2) + "\n")
    folder.write("report.html", report.render(plan, folder.meta, entries, rows, stream))

    def show() -> None:
        table.show(plan, entries, stream, console)
        console.print(f"{out}/report.html")

    return document, show


def _load(plan: EvalPlan) -> tuple[LoadedModel, Any]:
    import torch
    from transformers.utils import logging

    from warmkv.replicas import device_memory
    from warmkv.replicas.loading.load import load_model
    from warmkv.replicas.loading.tokenizer import load_tokenizer

    logging.disable_progress_bar()
    try:
        config = ModelConfig(path=plan.model, device=plan.device)
        device_memory.check_device(config.device)
        return load_model(config), load_tokenizer(config)
    except (OSError, ValueError, torch.OutOfMemoryError) as error:
        raise EvalError(f"cannot load {plan.model}: {str(error).splitlines()[0]}") from None


def _pieces(text: str) -> list[str]:
    return [piece for piece in (piece.strip() for piece in text.split(",")) if piece]


def _numbers(option: str, text: str | None, kind: Callable[[str], Any]) -> tuple[Any, ...] | None:
    if text is None:
        return None
    try:
        return tuple(kind(piece) for piece in _pieces(text))
    except ValueError:
        raise EvalError(f"{option} {text}: write numbers with commas between them") from None
