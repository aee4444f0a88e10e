"""What both commands do around a measurement: settings, model, progress, and faults told in a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console

from warmkv import config as configuration
from warmkv.config import Config, ConfigError
from warmkv.measuring.plan import MeasureError

if TYPE_CHECKING:
    from warmkv.replicas.loading.load import LoadedModel

errors = Console(stderr=True)
BUSY = 0.5
"""Load of the machine above which its figures are doubtful."""


def settings_of(path: Path | None, flags: list[str], model: str | None, device: str | None) -> Config:
    """Read the configuration with the model and device of the command line. Raises ConfigError."""
    settings = configuration.load(path, flags=flags)
    given = {"path": model, "device": device}
    chosen = settings.model.model_copy(update={key: value for key, value in given.items() if value is not None})
    return settings.model_copy(update={"model": chosen})


def context_limit(settings: Config, model_limit: int) -> int:
    """Tokens that the engine takes of a model that takes `model_limit`."""
    return min(settings.engine.max_context or model_limit, model_limit)


def load(settings: Config, check: Callable[[int], object]) -> tuple[LoadedModel, dict[str, Any]]:
    """Load the model, and describe the machine before anything is measured.

    `check` is told the context before the weights are read. Raises MeasureError.
    """
    try:
        import torch

        from warmkv.measuring import machine
        from warmkv.replicas import device_memory
        from warmkv.replicas.loading import load as loading
    except ImportError as error:
        raise MeasureError(f"{error.name} is missing; install it with: pip install 'warmkv[serve]'") from None
    if settings.engine.threads:
        torch.set_num_threads(settings.engine.threads)
    try:
        device_memory.check_device(settings.model.device)
    except device_memory.DeviceError as error:
        raise MeasureError(str(error)) from None
    found = machine.identity()
    if found["load"] > BUSY:
        errors.print(
            f"[yellow]other work runs on this machine[/yellow] (load {found['load']} on {found['cores']} cores): "
            "figures will be worse than it can do",
            highlight=False,
            soft_wrap=True,
        )
    try:
        check(context_limit(settings, loading.load_max_context(settings.model)))
        model = loading.load_model(settings.model, packed=settings.engine.compile != "on")
    except MeasureError:
        raise
    except (OSError, ValueError, torch.OutOfMemoryError) as error:
        raise MeasureError(f"cannot load {settings.model.path}: {str(error).splitlines()[0]}") from None
    check(context_limit(settings, model.max_context))
    return model, {**machine.identity(model.device), "load": found["load"]}


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on a terminal; call the yielded function with what is measured next, `total` times."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description:<36}", markup=False), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=total, completed=-1)
        yield lambda what: bar.update(task, advance=1, description=what)


@contextmanager
def faults(command: str) -> Iterator[None]:
    """End the program with code 2 and a line where it cannot do as asked, with 130 at an interrupt."""
    try:
        yield
    except (MeasureError, ConfigError) as error:
        _fail(command, str(error))
    except ImportError as error:
        _fail(command, f"{error.name} is missing; install it with: pip install 'warmkv[eval]'")
    except OSError as error:
        _fail(command, f"cannot write {error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        errors.print("interrupted")
        raise typer.Exit(130) from None


def _fail(command: str, message: str) -> NoReturn:
    errors.print(f"[red]{command}:[/red] ", end="")
    errors.print(message, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(2)
