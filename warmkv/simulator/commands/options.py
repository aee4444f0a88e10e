"""What the commands of the simulator share: how they fail, read settings, and show progress."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperCommand

from warmkv.config import Config, ConfigError, load

if TYPE_CHECKING:
    from warmkv.simulator.traces import Trace
    from warmkv.simulator.workload.source import Source
    from warmkv.simulator.workload.source import Trace as Requested

errors = Console(stderr=True)
CATALOGUE_WIDTH = 140

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with settings.")]
SetOption = Annotated[
    list[str], typer.Option("--set", help="A setting, as in `--set cluster.replicas=4`. May be repeated.")
]
JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="Write all figures as JSON to a file; without one, or with `-`, print only them.",
    ),
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Stop at the first broken row of the trace.")]


class StepTimes(StrEnum):
    AUTO = "auto"
    CONFIG = "config"
    LOG = "log"


class Scope(StrEnum):
    GLOBAL = "global"
    SESSION = "session"
    TENANT = "tenant"


TraceArgument = Annotated[
    Path,
    typer.Argument(
        help="An access log, or a trace of any format that is read; a folder: all its files.", show_default=False
    ),
]
OpenOption = Annotated[
    bool, typer.Option("--open", help="Let all turns of a session arrive as recorded, whatever the answers take.")
]
ScopeOption = Annotated[
    Scope, typer.Option(help="Who shares blocks in a trace of another service. In access logs, tenants.")
]
FormatOption = Annotated[str | None, typer.Option(help="The trace's format, if its content does not tell.")]
BlockSizeOption = Annotated[int | None, typer.Option(min=1, help="Tokens in a block, for formats that do not say.")]
CharactersOption = Annotated[float | None, typer.Option(min=0.1, help="Of traces that have texts and no token counts.")]


def _show_gpus(name: str | None) -> str | None:
    """Print the catalogue instead of running the command, if that is asked for."""
    if name != "list":
        return name
    from rich.table import Table

    from warmkv.gpus import CATALOGUE, Gpu

    columns = ("name", "bf16 TFLOP/s", "TB/s", "GB", "PCIe GB/s", "NVLink GB/s", "$/h", "as of", "source")
    table = Table(*columns, box=None, pad_edge=False)
    for gpu in map(Gpu.model_validate, CATALOGUE):
        rates = (gpu.flops / 1e12, gpu.bandwidth / 1e12, gpu.memory / 1e9, gpu.pcie / 1e9, (gpu.nvlink or 0) / 1e9)
        table.add_row(gpu.name, *(f"{rate:g}" for rate in rates), f"{gpu.dollars:.2f}", str(gpu.as_of), gpu.source)
    console = Console()
    console.width = max(console.width, CATALOGUE_WIDTH)
    console.print(table)
    raise typer.Exit


GpuOption = Annotated[
    str | None,
    typer.Option(
        help="Name in the catalogue, or `list` to see it: its price, and with a model the step times of its roofline.",
        callback=_show_gpus,
        is_eager=True,
        show_default="simulator.gpu",
    ),
]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder of a model, or its config.json: step times of its roofline on the GPU, and its KV shape."
    ),
]


def machine(gpu: str | None, model: Path | None) -> list[str]:
    """Return the settings that these options stand for."""
    named = {"gpu": gpu, "model": None if model is None else str(model)}
    return [f"simulator.{key}={json.dumps(value)}" for key, value in named.items() if value is not None]


class JsonCommand(TyperCommand):
    """A command whose --json may stand without a file, and then means standard output: typer itself wants a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = []
        for arg, following in zip_longest(args, args[1:], fillvalue="--"):
            given.append(arg)
            if arg == "--json" and following.startswith("-") and following != "-":
                given.append("-")
        return super().parse_args(ctx, given)


def fail(what: str, message: str) -> NoReturn:
    """End the program with code 2, as for any fault in what was asked."""
    errors.print(f"[red]{what}:[/red] ", end="")
    errors.print(message, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(2)


def read_config(path: Path | None, flags: list[str]) -> Config:
    try:
        return load(path, flags=flags)
    except ConfigError as error:
        fail("configuration", str(error))


def write(text: str, file: str | Path, what: str) -> None:
    try:
        Path(file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        fail(what, f"cannot write {file}: {error.strerror}")


def told(broken: int, skipped: int, faults: tuple[str, ...]) -> None:
    """Say what of a trace was left out."""
    if broken:
        errors.print(f"[yellow]{broken:,} broken lines left out[/yellow]; the first: ", end="")
        errors.print(faults[0], highlight=False, markup=False, soft_wrap=True)
    if skipped:
        errors.print(
            f"{skipped:,} requests left out that failed, were cancelled or ran inside another", highlight=False
        )


def read_trace(
    what: str,
    file: Path,
    format: str | None = None,
    *,
    strict: bool = False,
    block_size: int | None = None,
    characters_per_token: float | None = None,
) -> Trace:
    """Read a trace of any format; print what was left out, and end the program if nothing is left."""
    from warmkv.simulator import traces

    reading = traces.Reading(block_size, *([] if characters_per_token is None else [characters_per_token]))
    try:
        with bar(f"reading {file.name}") as progress:
            trace = traces.read(file, format, reading=reading, strict=strict, progress=progress)
    except traces.TraceError as error:
        fail(what, str(error))
    told(trace.broken, trace.skipped, trace.faults)
    for note in trace.notes:
        errors.print(f"{trace.format}: {note}", highlight=False, markup=False)
    if not len(trace):
        fail(what, f"{file} has no request")
    return trace


def read_requests(what: str, source: Source, base: Config) -> Requested:
    """Read a trace; print what was left out, and end the program if nothing is left."""
    from warmkv.simulator.traces import TraceError
    from warmkv.simulator.workload import source as sources

    try:
        with bar(f"reading {source.path.name}") as progress:
            trace = sources.read(source, base, progress)
    except TraceError as error:
        fail(what, str(error))
    told(trace.broken, trace.skipped, trace.faults)
    for note in trace.notes:
        errors.print(f"{source.path.name}: {note}", highlight=False, markup=False)
    if not trace.requests.records:
        fail(what, f"{source.path} has no request to replay; the gateway writes one to gateway.access_log")
    return trace


@contextmanager
def bar(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, nothing elsewhere; yield the function that advances it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as shown:
        task = shown.add_task(description, total=total)
        yield lambda done: shown.update(task, completed=done)
