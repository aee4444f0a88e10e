"""`warmkv dashboards`: build dashboards and alerts, publish dashboards. The SDKs are imported when a command runs."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from warmkv.cli.command import add_command, writing
from warmkv.cli.options import JsonOptions, SettingsOptions

app = typer.Typer(no_args_is_help=True, help="Build the Grafana dashboards and the alerts, and publish the dashboards.")

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]


@add_command(app, code=1)
def build(
    output: JsonOptions,
    folder: Annotated[Path, typer.Argument(help="Folder for the files.")] = Path("dashboards"),
    dry_run: DryRunOption = False,
) -> None:
    """Write every dashboard as the JSON that Grafana loads, and the alerts as rules for Prometheus and its operator.

    Example: `warmkv dashboards build`, or into another folder `warmkv dashboards build /tmp/boards`
    """
    from warmkv.dashboards import build as building

    with writing(folder, code=1):
        names = [folder / name for name in building.files()] if dry_run else building.build_all(folder)

    def show() -> None:
        for name in names:
            print(f"{'would write' if dry_run else 'wrote'} {name}")

    output.give({"files": [str(name) for name in names], "dry_run": dry_run}, show)


@add_command(app, code=1)
def metrics(
    file: Annotated[Path, typer.Argument(help="Markdown file to write.")] = Path("docs/metrics.md"),
) -> None:
    """Write the page that lists every metric with its labels and buckets.

    Example: `warmkv dashboards metrics docs/metrics.md`
    """
    from warmkv.dashboards.metrics_page import page

    with writing(file, code=1):
        file.write_text(page(), encoding="utf-8")
    print(f"wrote {file}")


@add_command(app, code=1)
def publish(
    options: SettingsOptions,
    output: JsonOptions,
    url: Annotated[str | None, typer.Option(help="Address of Grafana instead of the configured one.")] = None,
    folder: Annotated[str, typer.Option(help="Grafana's folder; it is made if it is missing.")] = "warmkv",
    datasource: Annotated[
        str, typer.Option(help="Uid of the Prometheus data source that the panels open with.")
    ] = "prometheus",
    dry_run: DryRunOption = False,
) -> None:
    """Upload every dashboard to Grafana, into a folder, replacing older versions.

    The token of a service account is read from the variable GRAFANA_TOKEN.

    Example: `GRAFANA_TOKEN=... warmkv dashboards publish --url http://127.0.0.1:3000`
    """
    configured = options.read().dashboards.grafana_url
    url = url or configured
    from warmkv.dashboards import build as building
    from warmkv.dashboards import publish as publishing

    documents = building.documents()
    if dry_run:
        rows = [{"uid": board["uid"], "title": board["title"]} for board in documents.values()]
    else:
        token = os.environ.get(publishing.TOKEN_ENV, "")
        published = publishing.publish(url, token, documents, folder=folder, datasource=datasource)
        rows = [asdict(board) for board in published]

    def show() -> None:
        for row in rows:
            name, place = f"{row['title']} ({row['uid']})", f"{url}, folder {folder}"
            print(
                f"would publish {name} to {place}"
                if dry_run
                else f"published {row['title']}: {row['url']} (version {row['version']})"
            )

    target = {"grafana": url, "folder": folder, "dry_run": dry_run}
    output.give({**target, "dashboards": rows}, show)
