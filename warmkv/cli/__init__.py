"""The `warmkv` command: a file for each command, without logic of its own."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from warmkv import __version__
from warmkv.cli import (
    bench,
    cachesim,
    calibrate,
    compare,
    config,
    dashboards,
    demo,
    doctor,
    eval,
    k8s,
    packs,
    policy,
    price,
    replay,
    serve,
    sweep,
    tune,
    verify,
    workload,
)
from warmkv.cli.command import add_command
from warmkv.faults import INTERNAL, tell_internal

app = typer.Typer(
    no_args_is_help=True,
    help="Serve language models, replay their traffic, and tune both.",
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"warmkv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve language models with compressed KV caches, replay their traffic, and tune both."""


for acting in (serve.serve, demo.demo):
    add_command(app, code=1)(acting)
for computing in (
    *(doctor.doctor, replay.replay, workload.workload, cachesim.cachesim, calibrate.calibrate, sweep.sweep),
    *(compare.compare, tune.tune, verify.verify, bench.bench, bench.profile, price.price),
):
    add_command(app)(computing)
add_command(app, "eval")(eval.evaluate)
add_command(app, "hash-key")(config.hash_key)
for group in (config, dashboards, k8s, packs, policy):
    app.add_typer(group.app, name=group.__name__.rpartition(".")[2])


def main() -> None:
    """Run the `warmkv` script. An error that no command expects is shown whole and ends with a code of its own."""
    try:
        app()
    except Exception as error:
        tell_internal(error, __version__)
        sys.exit(INTERNAL)
