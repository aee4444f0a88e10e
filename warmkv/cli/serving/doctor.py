"""`warmkv doctor`: the installation, the settings, the device, the memory plan and the model's self-check."""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.text import Text

from warmkv.cli.options import JsonOptions, MetricsPortOption, SettingsOptions
from warmkv.terminal import console, errors

COLOURS = {"ok": "green", "missing": "yellow", "failed": "red"}


def doctor(options: SettingsOptions, output: JsonOptions, metrics_port: MetricsPortOption = 0) -> None:
    """Check the installation, the settings, the device, the memory plan, and the model against its own forward.

    Exits 1 if something that `warmkv serve` needs is missing or fails, a port that is taken among it.

    Example: `warmkv doctor --set model.path=FOLDER`
    """
    from warmkv.doctor import DoctorFinding, examine

    settings, found = options.read(), list[DoctorFinding]()
    with errors.status("looking") as shown:
        for finding in examine(settings, lambda what: shown.update(Text(what)), metrics_port):
            found.append(finding)
            if not output.alone:
                console.print(finding.state, style=COLOURS[finding.state], end=" ")
                console.print(finding.what, style="bold", end=" ")
                console.print(finding.detail)
    output.give([asdict(finding) for finding in found], lambda: None)
    raise typer.Exit(int(any(finding.state == "failed" for finding in found)))
