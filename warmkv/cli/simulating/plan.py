"""`warmkv plan`: the size of a deployment for a trace and an SLO. Imports when it runs, for instant help."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from warmkv.cli.command import fail, make_folder_of, no_standard_output, write, writing
from warmkv.cli.options import JsonOptions, ReplayOptions, SettingsOptions
from warmkv.extras import require
from warmkv.terminal import bar, console

if TYPE_CHECKING:
    from warmkv.config import Config


@dataclass(frozen=True)
class TraceOption(ReplayOptions):
    """The trace as an option, beside others that a plan needs as much."""

    trace: Annotated[
        Path,
        typer.Option(
            "--trace",
            help="An access log, or a trace of any format that is read; a folder: all its files; `-`: standard input.",
            show_default=False,
        ),
    ]


def plan(
    source: TraceOption,
    output: JsonOptions,
    options: SettingsOptions,
    model: Annotated[
        str,
        typer.Option(help="Folder of the model, its config.json, or a hub name in this machine's cache."),
    ],
    slo: Annotated[str, typer.Option(help='Limits on figures of `warmkv sweep`, as in "ttft_p99<1,tpot_p99<0.05".')],
    gpus: Annotated[
        list[str],
        typer.Option(
            "--gpu",
            help="Name in the catalogue (`warmkv replay --gpu list`), or a mapping with figures of its own, as in "
            '"{name: H100, dollars: 2.1}". May be repeated: kinds are compared side by side.',
            show_default="simulator.gpu",
        ),
    ] = [],  # noqa: B006
    profile: Annotated[
        list[str],
        typer.Option(
            help="GPU=FILE: step times measured on it by `warmkv profile`, instead of its roofline. May be repeated.",
            show_default="roofline",
        ),
    ] = [],  # noqa: B006
    quality: Annotated[
        Path | None,
        typer.Option("--eval", help="Folder of a `warmkv eval` run: policies that keep the quality may be chosen."),
    ] = None,
    host_memory: Annotated[
        str, typer.Option(help="Host memory of a replica that a tier of stored prefixes may take; 0: none.")
    ] = "8GiB",
    peer: Annotated[
        bool,
        typer.Option(
            "--peer",
            help="Show beside it the plan of NVIDIA AIConfigurator, which sizes vLLM for the trace's means; a minute "
            "for each GPU. Needs the command aiconfigurator.",
        ),
    ] = False,
    max_replicas: Annotated[int, typer.Option(min=1, help="Most replicas that are tried.")] = 64,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of an overlay to write, as in k8s/overlays/NAME.",
            show_default="none",
            callback=no_standard_output,
        ),
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="Folder of the kustomize base.", show_default="base beside the overlays")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="HTML file for a report with charts; needs the extra `eval`; `-` prints only it.", show_default="none"
        ),
    ] = None,
) -> None:
    """Size a deployment by replays: replicas, GPUs, memory, policy; latency, hit rate and dollars a month; and why.

    Shows what would be cheaper and what it would cost in latency or quality. Exits 1 if nothing meets the SLO.

    Example: `warmkv plan --model Qwen/Qwen3-8B --gpu H100 --gpu L40S --slo "ttft_p99<1,tpot_p99<0.05" --trace
    access.jsonl --out k8s/overlays/mine`
    """
    from warmkv.simulator.reports import plan_page
    from warmkv.simulator.studies.plans import deployment, sizing
    from warmkv.simulator.studies.plans.peer_plan import COMMAND

    to_output = output.leaves_output_to("--report", report)
    if report is not None:
        require("--report", "matplotlib", "pyarrow")
        make_folder_of(report)
    if quality is not None:
        require("--eval", "pyarrow")
    if peer and shutil.which(COMMAND) is None:
        fail(f"--peer needs the command {COMMAND}: pip install aisimulate, in an environment of its own")
    planned = deployment.Deployment.of(model, options.read)
    config = planned.configure(())
    limits = sizing.limits_of(slo, config, quality is not None)
    machines = planned.machines(gpus, _profiles(profile, gpus or [config.simulator.gpu.name]))
    overlay = None if out is None else _overlay(out, base, config)
    host_bytes = _bytes(host_memory)
    trace = source.read(config)
    with bar("planning") as progress:
        sized, peers = deployment.plan(
            planned,
            limits,
            machines,
            trace,
            results=None if quality is None else _results(quality),
            host_bytes=host_bytes,
            max_replicas=max_replicas,
            ask_peer=peer,
            progress=progress,
        )
    document = plan_page.document(sized, planned.configure, planned.shape, trace, peers)
    chosen = sized.chosen
    if report is not None:
        write(plan_page.render(document, sized, planned.configure), report)
    written: list[Path] = []
    if overlay is not None and chosen is not None:
        from warmkv.platform.kubernetes.overlay import write_overlay

        with writing(overlay[0]):
            written = write_overlay(*overlay, planned.configure, chosen.settings, planned.shape, document["why"])

    def show() -> None:
        plan_page.show(document, console)
        for one in [*written, *([report] if report is not None else [])]:
            console.print(f"wrote {one}")

    output.give(document, lambda: None if to_output else show())
    raise typer.Exit(0 if chosen is not None else 1)


def _profiles(given: Sequence[str], gpus: Sequence[str]) -> dict[str, str]:
    """Return the file of each GPU's profile; one without a name is that of the only GPU."""
    found = {}
    for text in given:
        name, equals, file = text.partition("=")
        if not equals and len(set(gpus)) == 1:
            name, file = gpus[0], text
        name = next((gpu for gpu in gpus if name in (gpu, gpu.partition("-")[0])), name)
        if name not in gpus:
            fail(f"--profile {text}: write GPU=FILE, with a GPU that --gpu names ({', '.join(gpus)})")
        found[name] = file
    return found


def _overlay(out: Path, base: Path | None, config: Config) -> tuple[Path, Path]:
    """Return the folders of the overlay and of the base, before an hour of work."""
    from warmkv.platform.kubernetes.overlay import refusal

    if why := refusal(config):
        fail(f"--out {out}: {why}")
    base = base or out.parent.parent / "base"
    if not (base / "kustomization.yaml").is_file():
        fail(f"--out {out}: there is no kustomize base at {base}; name the repository's k8s/base with --base")
    if out.exists() and any(out.iterdir()) and not (out / "warmkv.yaml").is_file():
        fail(f"--out {out}: the folder is not empty and holds no overlay; choose another one")
    return out, base


def _results(folder: Path) -> Path:
    return folder / "results.parquet" if folder.is_dir() else folder


def _bytes(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        fail(f"--host-memory {text}: write bytes as in 8GiB")
