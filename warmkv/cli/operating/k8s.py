"""`warmkv k8s`: what of the manifests follows from settings, what is wrong with the rest; what pods run beside Ray."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from warmkv.cli.command import add_command, fail, write, writing
from warmkv.cli.options import JsonOptions
from warmkv.terminal import console, is_standard

if TYPE_CHECKING:
    from warmkv.platform.kubernetes.findings import RuleFinding
    from warmkv.platform.kubernetes.rendered import RenderedManifests

CRDS = Path("crds")

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="YAML file with the settings of the service.")]

app = typer.Typer(
    no_args_is_help=True,
    help="Write what of the Kubernetes manifests follows from settings, check all; fetch and drain, in pods.",
)


@add_command(app, code=2)
def check(
    output: JsonOptions,
    overlay: Annotated[
        Path, typer.Argument(help="Folder with a kustomization.yaml, a rendered file, or - for standard input.")
    ] = Path("."),
    model: Annotated[
        str | None,
        typer.Option(help="Folder of the model, or its config.json: its sizes.", show_default="the settings' model"),
    ] = None,
    crds: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the operators' CustomResourceDefinitions, as *.yaml or *.yaml.gz.",
            show_default="crds here, if there is one; else those in the package",
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 for notes, too.")] = False,
) -> None:
    """Explain what is wrong with manifests that are about to be applied, and what to do about it.

    Exits 1 if anything is. Notes name what has to be in the cluster first, and what could not be checked.

    Examples: `warmkv k8s check k8s/overlays/demo`, `kubectl kustomize k8s/overlays/demo | warmkv k8s check -`
    """
    from warmkv.platform.kubernetes import fields, rendered, rules

    kinds = fields.known()
    if crds is not None or CRDS.is_dir():
        kinds |= fields.read_crds(crds or CRDS)
    text = sys.stdin.read() if is_standard(overlay) else rendered.render(overlay)
    manifests = rendered.with_model(rendered.read(text, kinds), model)
    findings = rules.check(manifests)
    document = {
        "source": str(overlay),
        "objects": len(manifests.objects),
        "findings": [asdict(one) for one in findings],
    }
    output.give(document, lambda: _show(manifests, findings))
    raise typer.Exit(int(any(strict or finding.level == "error" for finding in findings)))


def _show(manifests: RenderedManifests, findings: Sequence[RuleFinding]) -> None:
    for finding in findings:
        console.print(f"{finding.level}: ", style="red" if finding.level == "error" else "yellow", end="")
        console.print(f"{finding.what}\n    where: {finding.where}\n    to do: {finding.todo}")
    counts = Counter(finding.level for finding in findings)
    console.print(
        f"{len(manifests.objects)} objects: {counts['error'] or 'no'} error{'s' * (counts['error'] != 1)}, "
        f"{counts['note'] or 'no'} note{'s' * (counts['note'] != 1)}"
    )


@add_command(app, code=1)
def render(
    output: JsonOptions,
    config: ConfigOption,
    manifest_path: Annotated[
        Path | None,
        typer.Option(
            "--manifest",
            "-m",
            help="File to write; `serve-config.yaml` beside the settings if absent; `-`: standard output.",
        ),
    ] = None,
) -> None:
    """Write the RayService's `serveConfigV2`, the document that `warmkv serve` starts locally, as a kustomize patch.

    Example: `warmkv k8s render --config k8s/overlays/demo/warmkv.yaml`
    """
    from warmkv.platform import manifest

    path = manifest_path or config.with_name("serve-config.yaml")
    to_output = output.leaves_output_to("--manifest", path)
    if to_output:
        write(manifest.manifest(config), path, code=1)
        changed = True
    else:
        with writing(path, code=1):
            changed = manifest.render(config, path)
    said = f"{'wrote' if changed else 'up to date:'} {path}"
    output.give({"manifest": str(path), "changed": changed}, lambda: None if to_output else print(said))


@add_command(app, code=1)
def fetch(config: ConfigOption) -> None:
    """Download the model of the settings into the hub's cache (`HF_HOME`), unless it is there.

    Example, in a pod: `warmkv k8s fetch --config /etc/warmkv/config/warmkv.yaml`
    """
    from warmkv.config import load
    from warmkv.replicas.loading.load import fetch as fetch_model

    settings = load(config)
    try:
        print(f"{settings.model.name} is in {fetch_model(settings.model)}")
    except OSError as error:
        fail(f"cannot fetch {settings.model.path}: {error}", 1)


@add_command(app, code=1)
def drain(
    config: ConfigOption,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Time until all must have gone, instead of 30 s for replacements to start elsewhere, "
            "`cluster.drain_seconds`, and a third of that to hand blocks over.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Drain the Ray node of this pod: its replicas and gateways start elsewhere, end their requests, hand over blocks.

    Exits 1 if some are still there when the time is over. Example, as a preStop hook:
    `warmkv k8s drain --config /etc/warmkv/config/warmkv.yaml`
    """
    from warmkv.config import load
    from warmkv.platform.drain import drain_node, seconds_to_drain

    if left := drain_node(seconds_to_drain(load(config)) if seconds is None else seconds):
        fail(f"still on this node: {', '.join(left)}", 1)
    print("drained")
