"""`warmkv demo`: the service, a long document and questions about it."""

from __future__ import annotations

from typing import Annotated

import typer

from warmkv.cli.options import JsonOptions, SettingsOptions
from warmkv.terminal import console


def demo(
    options: SettingsOptions,
    output: JsonOptions,
    seed: Annotated[int, typer.Option(help="Which document and questions.")] = 1,
) -> None:
    """Start two replicas, ask about a long document through both SDKs under three policies, and show the table.

    Exits 0 only if the warm requests read the cache and the answers are right.

    Example: `warmkv demo --seed 2 --json demo.json`
    """
    from warmkv import demo as demonstration

    settings = options.under("gateway.port=0").read()
    result = demonstration.run(settings, seed)
    output.give(result.to_json(), lambda: demonstration.show(result, settings, console))
    raise typer.Exit(0 if result.passed else 1)
