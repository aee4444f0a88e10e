"""`warmkv serve`: the service in the foreground."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from warmkv.cli.options import MetricsPortOption, SettingsOptions
from warmkv.policy_spec import METHODS, STORAGES
from warmkv.terminal import console


def serve(
    options: SettingsOptions,
    model: Annotated[str | None, typer.Argument(help="Folder or hub name.", show_default="model.path")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="gateway.host")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one.", show_default="gateway.port")] = None,
    replicas: Annotated[int | None, typer.Option(help="Copies of the model.", show_default="cluster.replicas")] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help=f"As in `snapkv@0.2+kivi4`. Methods: {', '.join(METHODS)}. Storages: {', '.join(STORAGES)}.",
            show_default="compression.policy",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with an API key: only requests with it are answered.", show_default=False)
    ] = None,
    metrics_port: MetricsPortOption = 0,
) -> None:
    """Serve the model on a local Ray, in the foreground, until Ctrl-C. Options win over `--set`.

    Examples: `warmkv serve`, `warmkv serve Qwen/Qwen3-0.6B --port 8000 --policy snapkv@0.2`,
    `warmkv serve --set cluster.replicas=2 --set engine.max_slots=8`
    """
    from warmkv.platform.serving import serve_until_stopped, tenant_with_key

    named = {
        "model.path": model,
        "gateway.host": host,
        "gateway.port": port,
        "cluster.replicas": replicas,
        "compression.policy": policy,
    }
    flags = [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    tenants = [] if api_key_file is None else [tenant_with_key(api_key_file)]
    serve_until_stopped(options.read(*flags, *tenants), console, metrics_port)
