"""Options that several commands have: one dataclass for those that belong together, with what is done with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from warmkv.cli.command import fail, write
from warmkv.config import Config, load
from warmkv.terminal import bar, errors, is_standard, json_text, plain_table, show_table

if TYPE_CHECKING:
    from warmkv.simulator.traces import Trace
    from warmkv.simulator.workload.source import LoadedTrace, Source

NAMED_FILES = 20  # that were left out


@dataclass(frozen=True)
class SettingsOptions:
    """The settings in force: a file, the environment, then `--set`."""

    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with settings.")] = None
    set_: Annotated[
        list[str], typer.Option("--set", help="A setting, as in `--set cluster.replicas=4`. May be repeated.")
    ] = field(default_factory=list)

    def read(self, *flags: str) -> Config:
        """Return the settings; `flags` win over `--set`. Raises ConfigError."""
        return load(self.config, flags=[*self.set_, *flags])

    def under(self, *flags: str) -> Self:
        """Return these options with flags that `--set` wins over."""
        return replace(self, set_=[*flags, *self.set_])


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


@dataclass(frozen=True)
class JsonOptions:
    """Where a command's result goes as JSON."""

    json_file: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="[FILE]",
            help="Write the result as JSON to a file; without one, or with `-`, print only that.",
        ),
    ] = None

    @property
    def alone(self) -> bool:
        """Return True if nothing else is printed."""
        return self.json_file == "-"

    def leaves_output_to(self, option: str, file: Path | None) -> bool:
        """Return True if a file that the command writes is standard output, where nothing else is printed then.

        Ends the command if the JSON is to be printed, too.
        """
        if file is None or not is_standard(file):
            return False
        if self.alone:
            fail(f"{option} - and --json: both print to standard output; give one of them a file")
        return True

    def give(self, document: object, show: Callable[[], object]) -> None:
        """Print the result for people, unless its JSON is to be printed; then write that to the file, if any."""
        text = json_text(document)
        if self.alone:
            print(text)
            return
        show()
        if self.json_file is not None:
            write(text + "\n", self.json_file)


FormatOption = Annotated[str | None, typer.Option(help="The trace's format, if its content does not tell.")]
StrictOption = Annotated[bool, typer.Option("--strict", help="Stop at the first broken row or unrecognised file.")]
MetricsPortOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        help="At which Prometheus finds metrics, at all addresses and without a key; 0 takes a free one.",
    ),
]
SeedOption = Annotated[int, typer.Option(min=0, help="Of prompts and synthetic keys and values.")]


@dataclass(frozen=True)
class TraceOptions:
    """A trace, and how its format is understood."""

    trace: Annotated[
        Path,
        typer.Argument(
            help="An access log, or a trace of any format that is read; a folder: all its files; `-`: standard input.",
            show_default=False,
        ),
    ]
    format: FormatOption = None
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in a block, for formats that do not say.")] = (
        None
    )
    characters_per_token: Annotated[
        float | None, typer.Option(min=0.1, help="Of traces that have texts and no token counts.")
    ] = None
    strict: StrictOption = False

    def read_blocks(self) -> Trace:
        """Read the trace as block hashes, without a cluster; say what was left out. Raises TraceError."""
        from warmkv.simulator import traces

        reading = traces.Reading(self.block_size, self.characters_per_token)
        with bar(f"reading {self.trace.name}") as progress:
            trace = traces.read(self.trace, self.format, reading=reading, strict=self.strict, progress=progress)
        tell_left_out(trace.broken, trace.skipped, trace.faults, trace.unrecognised)
        if not len(trace):
            fail(f"{self.trace} has no request; it was read as {trace.format}")
        for note in trace.notes:
            errors.print(f"{trace.format}: {note}")
        return trace


class Scope(StrEnum):
    GLOBAL = "global"
    SESSION = "session"
    TENANT = "tenant"


@dataclass(frozen=True)
class ReplayOptions(TraceOptions):
    """A trace, and how its requests arrive in a simulated cluster."""

    scope: Annotated[
        Scope,
        typer.Option(help="Who shares blocks in a trace or log of another service. In access logs of warmkv, tenants."),
    ] = Scope.GLOBAL
    open_loop: Annotated[
        bool, typer.Option("--open", help="Let all turns of a session arrive at their recorded times (open loop).")
    ] = False

    def read(self, base: Config) -> LoadedTrace:
        """Read the requests; say what was left out. Raises TraceError."""
        from warmkv.simulator.workload.source import Source

        characters = self.characters_per_token
        return read_requests(
            Source(self.trace, self.format, self.block_size, characters, self.scope.value, self.open_loop, self.strict),
            base,
        )


class StepTimeChoice(StrEnum):
    AUTO = "auto"
    CONFIG = "config"
    LOG = "log"


StepTimesOption = Annotated[
    StepTimeChoice,
    typer.Option(
        help="Where step times come from: a profile, else a model's roofline, else the log's timings, else settings."
    ),
]


def _show_gpus(name: str | None) -> str | None:
    """Print the catalogue instead of running the command, if that is asked for."""
    if name != "list":
        return name
    from warmkv.gpus import CATALOGUE, Gpu

    columns = ("name", "bf16 TFLOP/s", "TB/s", "GB", "PCIe GB/s", "NVLink GB/s", "$/h", "as of", "source")
    table = plain_table(*columns, gap=1)
    for gpu in map(Gpu.model_validate, CATALOGUE):
        rates = (gpu.flops / 1e12, gpu.bandwidth / 1e12, gpu.memory / 1e9, gpu.pcie / 1e9, (gpu.nvlink or 0) / 1e9)
        table.add_row(gpu.name, *(f"{rate:g}" for rate in rates), f"{gpu.dollars:.2f}", str(gpu.as_of), gpu.source)
    show_table(table)
    raise typer.Exit


@dataclass(frozen=True)
class MachineOptions:
    """The simulated machine."""

    step_times: StepTimesOption = StepTimeChoice.AUTO
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Name in the catalogue, or `list` to see it: its price, and with a model the step times of its "
            "roofline.",
            callback=_show_gpus,
            is_eager=True,
            show_default="simulator.gpu",
        ),
    ] = None
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a model, or its config.json: step times of its roofline on the GPU, and its KV shape."
        ),
    ] = None

    def flags(self) -> list[str]:
        """Return the settings that these options stand for."""
        named = {"gpu": self.gpu, "model": None if self.model is None else str(self.model)}
        return [f"simulator.{key}={json.dumps(value)}" for key, value in named.items() if value is not None]


QualityOption = Annotated[
    Path | None, typer.Option(help="results.parquet of `warmkv eval`; without it quality is unknown.")
]


@dataclass(frozen=True)
class WorkerOptions:
    """What many replays run on."""

    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes, or Ray actors.", show_default="one per core")
    ] = None
    on_ray: Annotated[
        bool, typer.Option("--ray", help="On the running Ray cluster that RAY_ADDRESS names, or this machine's.")
    ] = False


def read_requests(source: Source, base: Config) -> LoadedTrace:
    """Read the requests of a trace; say what was left out, fail if nothing is left. Raises TraceError."""
    from warmkv.simulator.workload import source as sources

    with bar(f"reading {source.path.name}") as progress:
        trace = sources.read(source, base, progress)
    tell_left_out(trace.broken, trace.skipped, trace.faults, trace.unrecognised)
    if not trace.requests.records:
        fail(f"{source.path} has no request to replay; it was read as {trace.format}")
    for note in trace.notes:
        errors.print(f"{source.path.name}: {note}")
    return trace


def tell_left_out(broken: int, skipped: int, faults: Sequence[str], files: Sequence[str] = ()) -> None:
    """Say what of a trace was left out: broken lines, failed requests, files of a folder that are no trace."""
    if files:
        more = f" and {len(files) - NAMED_FILES:,} more" if len(files) > NAMED_FILES else ""
        errors.print(f"{len(files):,} files of no recognised format left out", style="yellow", end="")
        errors.print(f": {', '.join(files[:NAMED_FILES])}{more}")
    if broken:
        errors.print(f"{broken:,} broken lines left out", style="yellow", end="")
        errors.print(f"; the first: {faults[0]}")
    if skipped:
        errors.print(f"{skipped:,} requests left out that failed, were cancelled, ran inside another or have no prompt")


def split(values: Sequence[str]) -> list[str]:
    """Return the parts of an option that may be repeated, or hold a list with commas."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def lifetimes(option: str, values: Sequence[str]) -> list[float]:
    """Read TTLs in seconds, each as `300`, `5m`, `1h` or `unlimited`. Raises QuantityError."""
    from warmkv.simulator.studies import quantities

    if values and not split(values):
        fail(f"{option} is empty; write 300, 5m, 1h or unlimited")
    return [quantities.seconds(text) for text in split(values)]


def listed(items: tuple[object, ...]) -> str:
    """Return defaults as they are written on the command line."""
    return ",".join(map(str, items))
