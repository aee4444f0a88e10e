"""The `warmkv` command: a file for each command, without logic of its own, in a folder for each panel of `--help`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from warmkv import __version__
from warmkv.cli import commands_page
from warmkv.cli.command import add_command
from warmkv.cli.measuring import bench, eval, profile
from warmkv.cli.operating import dashboards, k8s, policy
from warmkv.cli.serving import config, demo, doctor, observe, packs, record, route, serve
from warmkv.cli.simulating import (
    cachesim,
    calibrate,
    compare,
    plan,
    price,
    replay,
    sweep,
    tune,
    verify,
    workload,
)
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


SERVE, SIMULATE, MEASURE, OPERATE = "Serve", "Simulate and plan", "Measure", "Operate"
COMMANDS = {
    SERVE: (serve.serve, demo.demo, observe.observe, record.record, route.route, doctor.doctor, config.hash_key),
    SIMULATE: (
        *(plan.plan, replay.replay, sweep.sweep, tune.tune, compare.compare, verify.verify),
        *(cachesim.cachesim, workload.workload, calibrate.calibrate, price.price),
    ),
    MEASURE: (eval.evaluate, bench.bench, profile.profile),
}
"""The commands by the panel of `--help` that shows them."""
GROUPS = {SERVE: (config, packs), OPERATE: (policy, dashboards, k8s)}
NAMES = {config.hash_key: "hash-key", eval.evaluate: "eval"}
"""Commands that are not called as their function is."""

for panel, functions in COMMANDS.items():
    for function in functions:
        acts = function in (
            serve.serve,
            demo.demo,
            observe.observe,
            record.record,
            route.route,
        )  # rather than computes: what stops it is the machine
        add_command(app, NAMES.get(function), code=1 if acts else 2, panel=panel)(function)
for panel, groups in GROUPS.items():
    for group in groups:
        app.add_typer(group.app, name=group.__name__.rpartition(".")[2], rich_help_panel=panel)
add_command(app, hidden=True)(commands_page.docs)


def main() -> None:
    """Run the `warmkv` script. An error that no command expects is shown whole and ends with a code of its own."""
    try:
        app()
    except Exception as error:
        tell_internal(error, __version__)
        sys.exit(INTERNAL)
