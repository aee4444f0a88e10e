"""`warmkv k8s`: the parts of the Kubernetes manifests that follow from settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from warmkv.cli.command import add_command, writing
from warmkv.cli.options import JsonOptions

app = typer.Typer(no_args_is_help=True, help="Write the parts of the Kubernetes manifests that follow from settings.")


@app.callback()
def _group() -> None:
    """Keep `render` a subcommand: Typer would otherwise make the only command the group itself."""


@add_command(app, code=1)
def render(
    output: JsonOptions,
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML file with the settings of the service.")],
    manifest_path: Annotated[
        Path | None,
        typer.Option("--manifest", "-m", help="File to write; `serve-config.yaml` beside the settings if absent."),
    ] = None,
) -> None:
    """Write the RayService's `serveConfigV2`, the document that `warmkv serve` starts locally, as a kustomize patch.

    Example: `warmkv k8s render --config k8s/overlays/demo/warmkv.yaml`
    """
    from warmkv.platform import manifest

    path = manifest_path or config.with_name("serve-config.yaml")
    with writing(path, code=1):
        changed = manifest.render(config, path)
    said = f"{'wrote' if changed else 'up to date:'} {path}"
    output.give({"manifest": str(path), "changed": changed}, lambda: print(said))
