"""`warmkv dashboards`: build, publish and compare. The SDKs are imported when a command runs."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from warmkv.cli.command import add_command, no_standard_output, write, writing
from warmkv.cli.options import JsonOptions, SettingsOptions
from warmkv.terminal import is_standard

app = typer.Typer(no_args_is_help=True, help="Build the Grafana dashboards and the alerts, and publish the dashboards.")

SHOWN = 10  # differences of a dashboard that are printed; --json has all

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]


@add_command(app, code=1)
def build(
    output: JsonOptions,
    folder: Annotated[Path, typer.Argument(help="Folder for the files.", callback=no_standard_output)] = Path(
        "dashboards"
    ),
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
    file: Annotated[Path, typer.Argument(help="Markdown file to write; `-`: standard output.")] = Path(
        "docs/metrics.md"
    ),
) -> None:
    """Write the page that lists every metric with its labels and buckets.

    Example: `warmkv dashboards metrics docs/metrics.md`
    """
    from warmkv.dashboards.metrics_page import page

    write(page(), file, code=1)
    if not is_standard(file):
        print(f"wrote {file}")


UrlOption = Annotated[str | None, typer.Option(help="Address of Grafana instead of the configured one.")]
FolderOption = Annotated[str, typer.Option(help="Grafana's folder; it is made if it is missing.")]
DatasourceOption = Annotated[str, typer.Option(help="Uid of the Prometheus data source that the panels open with.")]
PrometheusOption = Annotated[
    str | None, typer.Option(help="Address of Prometheus as Grafana reaches it: makes a data source of that uid.")
]
GatewayOption = Annotated[
    str | None,
    typer.Option(
        help="Address of the service: actions send to it, and a data source is made that reads the control API with "
        "the operator's key in WARMKV_API_KEY."
    ),
]


@add_command(app, code=1)
def publish(
    options: SettingsOptions,
    output: JsonOptions,
    url: UrlOption = None,
    folder: FolderOption = "warmkv",
    datasource: DatasourceOption = "prometheus",
    prometheus: PrometheusOption = None,
    gateway: GatewayOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Upload every dashboard that differs to Grafana, into a folder, replacing older versions.

    The token of a service account is read from the variable GRAFANA_TOKEN.

    Example: `GRAFANA_TOKEN=... warmkv dashboards publish --url http://127.0.0.1:3000`
    """
    _bring(options, output, url, folder, datasource, prometheus, gateway, ask=not dry_run, write=True)


@add_command(app, code=1)
def diff(
    options: SettingsOptions,
    output: JsonOptions,
    url: UrlOption = None,
    folder: FolderOption = "warmkv",
    datasource: DatasourceOption = "prometheus",
    prometheus: PrometheusOption = None,
    gateway: GatewayOption = None,
) -> None:
    """Show what `warmkv dashboards publish` with the same options would change in Grafana; change nothing.

    Example: `GRAFANA_TOKEN=... warmkv dashboards diff --url http://127.0.0.1:3000`
    """
    _bring(options, output, url, folder, datasource, prometheus, gateway, ask=True, write=False)


@add_command(app, code=1)
def annotate(
    options: SettingsOptions,
    output: JsonOptions,
    gateway: Annotated[str, typer.Option(help="Address of the service; its operator's key is in WARMKV_API_KEY.")],
    url: UrlOption = None,
) -> None:
    """Write the changes of a service's live configuration into Grafana, as annotations that outlive Prometheus's data.

    Changes that Grafana has are left alone. The token of a service account is read from the variable GRAFANA_TOKEN.

    Example: `GRAFANA_TOKEN=... warmkv dashboards annotate --gateway http://127.0.0.1:8400`
    """
    url = url or options.read().dashboards.grafana_url
    from warmkv.dashboards import annotate as annotating
    from warmkv.dashboards.publish import TOKEN_ENV, Target

    token, key = os.environ.get(TOKEN_ENV, ""), os.environ.get("WARMKV_API_KEY", "")
    done = annotating.annotate(Target(url, token, gateway=gateway, key=key))

    def show() -> None:
        for version in done:
            print(f"annotated version {version.number} by {version.who}: {version.why}")
        if not done:
            print("nothing to annotate: Grafana has every change")

    output.give({"annotated": [version.number for version in done]}, show)


def _bring(
    options: SettingsOptions,
    output: JsonOptions,
    url: str | None,
    folder: str,
    datasource: str,
    prometheus: str | None,
    gateway: str | None,
    *,
    ask: bool,
    write: bool,
) -> None:
    """Compare with Grafana if it may be asked, write what differs if that is wanted, and tell."""
    url = url or options.read().dashboards.grafana_url
    from warmkv.dashboards import build as building
    from warmkv.dashboards import publish as publishing

    documents = building.documents()
    token, key = os.environ.get(publishing.TOKEN_ENV, ""), os.environ.get("WARMKV_API_KEY", "")
    target = publishing.Target(url, token, folder, datasource, prometheus, gateway, key)
    done = publishing.publish(target, documents, write=write) if ask else []
    rows = {what: [asdict(one) for one in done if one.what == what] for what in ("dashboard", "data source", "folder")}
    if not ask:
        rows["dashboard"] = [{"uid": board["uid"], "title": board["title"]} for board in documents.values()]

    def show() -> None:
        if not ask:
            for row in rows["dashboard"]:
                print(f"would publish {row['title']} ({row['uid']}) to {url}, folder {folder}")
        for one in done:
            state = one.state if write or one.state == "unchanged" else f"would be {one.state}"
            print(f"{one.what} {one.title}: {state}" + (f", {one.url} (version {one.version})" if one.url else ""))
            for place in one.differences[:SHOWN]:
                print(f"  {place}")
            if len(one.differences) > SHOWN:
                print(f"  and {len(one.differences) - SHOWN} more")

    given = {"grafana": url, "folder": folder, "dry_run": not (ask and write)}
    output.give({**given, "dashboards": rows["dashboard"], "data_sources": rows["data source"]}, show)
