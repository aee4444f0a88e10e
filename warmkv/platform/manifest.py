"""The Serve document inside a Kubernetes manifest: written from a configuration, never by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from warmkv.config import ConfigError, load
from warmkv.platform.document import serve_document
from warmkv.platform.listening import check_listening

NAME = "warmkv"  # of the RayService that the patch applies to

app = typer.Typer(no_args_is_help=True, help="Write the parts of the Kubernetes manifests that follow from settings.")


class _Block(str):
    """Text that YAML shows as a block, so that a diff of the manifest can be read."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))


def manifest(config_path: Path) -> str:
    """Render a kustomize patch that puts the Serve document of a configuration file into the RayService.

    The environment is left out, so that the same file gives the same manifest everywhere. Raises ConfigError.
    """
    config = load(config_path, environ={})
    check_listening(config.gateway)
    document = serve_document(config)
    patch = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": NAME},
        "spec": {"serveConfigV2": _Block(yaml.safe_dump(document, sort_keys=False))},
    }
    head = f"# Written by `warmkv k8s render` from {config_path.name}: change that file and render again.\n"
    return head + yaml.dump(patch, Dumper=_Dumper, sort_keys=False, width=120)


def render(config_path: Path, manifest_path: Path) -> bool:
    """Write the patch of a configuration; returns whether the file was changed. Raises ConfigError and OSError."""
    text = manifest(config_path)
    if manifest_path.exists() and manifest_path.read_text(encoding="utf-8") == text:
        return False
    manifest_path.write_text(text, encoding="utf-8")
    return True


@app.callback()
def _group() -> None:
    """Keep `render` a subcommand: Typer would otherwise make the only command the group itself."""


@app.command("render")
def render_command(
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML file with the settings of the service.")],
    manifest_path: Annotated[
        Path | None,
        typer.Option("--manifest", "-m", help="File to write; `serve-config.yaml` beside the settings if absent."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write the RayService's `serveConfigV2`, the document that `warmkv serve` starts locally, as a kustomize patch.

    Example: `warmkv k8s render --config k8s/overlays/demo/warmkv.yaml`
    """
    path = manifest_path or config.with_name("serve-config.yaml")
    try:
        changed = render(config, path)
    except ConfigError as error:
        typer.echo(f"configuration: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"k8s: cannot write {error.filename}: {error.strerror}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({"manifest": str(path), "changed": changed}))
    else:
        typer.echo(f"{'wrote' if changed else 'up to date:'} {path}")
