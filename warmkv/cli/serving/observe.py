"""`warmkv observe`: the service under steady traffic, with its dashboards."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from warmkv.cli.options import SettingsOptions
from warmkv.terminal import console


def observe(
    options: SettingsOptions,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Which documents and questions.")] = 1,
) -> None:
    """Run two replicas under steady traffic of three tenants, with Prometheus, and Grafana if installed, until Ctrl-C.

    Prometheus scrapes the service and evaluates the alerts; Grafana has the dashboards and data sources.

    Example: `warmkv observe --rate 4`
    """
    from warmkv import observe as observation

    settings = options.under(*observation.SETTINGS).read()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until it serves, both interrupt the start
    with observation.observing(settings, rate, seed) as seen:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        console.print(f"service     {seen.service}")
        console.print(f"what-if     {seen.service}/v1/warmkv/whatif")
        console.print(f"Prometheus  {seen.prometheus}")
        console.print(f"Grafana     {seen.grafana or 'is not installed: import dashboards/*.json into one of yours'}")
        console.print(f"operator    x-api-key: {seen.operator_key}")
        stop.wait()
        console.print("stopping")
