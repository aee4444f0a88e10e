"""The `warmkv eval` command. What it needs is imported when it runs, so that help is instant."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from warmkv.config import ModelConfig
from warmkv.evaluation import plan as plans
from warmkv.evaluation import tasks as families
from warmkv.evaluation.plan import EvalError, EvalPlan
from warmkv.policy_spec import split_policies

if TYPE_CHECKING:
    from warmkv.evaluation.summary import Row
    from warmkv.replicas.loading.load import LoadedModel

errors = Console(stderr=True)
DEFAULT = EvalPlan()


class Form(StrEnum):
    AUTO = "auto"
    CHAT = "chat"
    PLAIN = "plain"
    BOTH = "both"


def _listed(items: tuple[Any, ...]) -> str:
    return ",".join(map(str, items))


def evaluate(
    out: Annotated[Path, typer.Option(help="Folder of the results; one that holds this run is continued.")] = Path(
        "runs/eval"
    ),
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal LM; `tiny` is the one in the package.")] = (
        DEFAULT.model
    ),
    policies: Annotated[
        str,
        typer.Option(help="Policies without budgets, as in `snapkv,h2o,snapkv+kivi4,full+turbo4,snapkv:window=16`."),
    ] = _listed(DEFAULT.policies),
    budgets: Annotated[str, typer.Option(help="Shares of the full cache's bytes.")] = _listed(DEFAULT.budgets),
    tasks: Annotated[str, typer.Option(help=f"Any of {', '.join(families.NAMES)}; or all.")] = "all",
    lengths: Annotated[
        str | None, typer.Option(help="Tokens of the samples.", show_default=_listed(DEFAULT.lengths))
    ] = None,
    depths: Annotated[
        str | None, typer.Option(help="Where the needle stands, 0 to 1.", show_default=_listed(DEFAULT.depths))
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
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the summary as JSON, too; `-` prints only it.")
    ] = None,
) -> None:
    """Measure how well answers survive compression policies, all of them at the same bytes.

    Writes `results.parquet` (a row for every sample and policy), `summary.json` and `report.html`. Run the same again
    to continue what was interrupted.

    Examples: `warmkv eval --quick`, `warmkv eval --model Qwen/Qwen3-0.6B --policies snapkv,h2o,full+kivi4 --budgets
    0.5,0.2 --tasks needle,chat --lengths 2048,8192 --out runs/qwen3`
    """
    try:
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
        summary = _run(plan, out, quiet=json_file == "-")
    except EvalError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        errors.print(f"interrupted; the same command goes on with what is in {out}", highlight=False, markup=False)
        raise typer.Exit(130) from None
    document = json.dumps(summary, indent=2)
    if json_file == "-":
        print(document)
    elif json_file is not None:
        try:
            Path(json_file).write_text(document + "\n", encoding="utf-8")
        except OSError as error:
            _fail(f"cannot write {json_file}: {error.strerror}")


def _run(plan: EvalPlan, out: Path, quiet: bool) -> Row:
    if missing := [name for name in ("torch", "transformers", "matplotlib", "pyarrow") if find_spec(name) is None]:
        raise EvalError(f"{', '.join(missing)} missing; install with: pip install 'warmkv[eval]'")
    from warmkv.evaluation import report, run, summary, table
    from warmkv.evaluation.results import RunFolder

    try:
        loaded, tokenizer = _load(plan)
        run.check(plan, loaded)
        folder = RunFolder(out, run.meta_of(plan, loaded))
        _with_bar(plan, loaded, tokenizer, folder)
        rows, stream = folder.rows(), folder.stream()
        entries = summary.summarise(rows)
        document = summary.document(folder.meta, entries, stream)
        folder.write("summary.json", json.dumps(document, indent=2) + "\n")
        folder.write("report.html", report.render(plan, folder.meta, entries, rows, stream))
    except OSError as error:
        raise EvalError(f"cannot use {out}: {error.strerror or error}") from None
    if not quiet:
        console = Console()
        table.show(plan, entries, stream, console)
        console.print(f"{out}/report.html", highlight=False, markup=False, soft_wrap=True)
    return document


def _load(plan: EvalPlan) -> tuple[LoadedModel, Any]:
    import torch
    from transformers.utils import logging

    from warmkv.replicas import device_memory
    from warmkv.replicas.loading import load as loading

    logging.disable_progress_bar()
    try:
        config = ModelConfig(path=plan.model, device=plan.device)
        device_memory.check_device(config.device)
        return loading.load_model(config), loading.load_tokenizer(config)
    except (OSError, ValueError, torch.OutOfMemoryError) as error:
        raise EvalError(f"cannot load {plan.model}: {str(error).splitlines()[0]}") from None


def _with_bar(plan: EvalPlan, model: LoadedModel, tokenizer: Any, folder: Any) -> None:
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from warmkv.evaluation import run

    columns = (TextColumn("{task.description:<22}", markup=False), BarColumn(), TaskProgressColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=run.work(plan, tokenizer))

        def progress(what: str, work: int) -> None:
            bar.update(task, advance=work, description=what)

        run.evaluate(plan, model, tokenizer, folder, progress)


def _pieces(text: str) -> list[str]:
    return [piece for piece in (piece.strip() for piece in text.split(",")) if piece]


def _numbers(option: str, text: str | None, kind: Callable[[str], Any]) -> tuple[Any, ...] | None:
    if text is None:
        return None
    try:
        return tuple(kind(piece) for piece in _pieces(text))
    except ValueError:
        raise EvalError(f"{option} {text}: write numbers with commas between them") from None


def _fail(message: str) -> NoReturn:
    """End the program with code 2, as for any fault in what was asked."""
    errors.print("[red]eval:[/red] ", end="")
    errors.print(message, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(2)
