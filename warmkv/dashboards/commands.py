"""`warmkv dashboards`: build the JSON, and publish it. The SDKs are imported when a command runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from warmkv.config import Config, ConfigError, load

app = typer.Typer(no_args_is_help=True, help="Build the Grafana dashboards, and publish them.")
errors = Console(stderr=True)

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with settings.")]
SetOption = Annotated[
    list[str], typer.Option("--set", help="A setting, as in `--set dashboards.folder=llm`. May be repeated.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command()
def build(
    folder: Annotated[Path, typer.Argument(help="Folder for the JSON files.")] = Path("dashboards"),
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write every dashboard as the JSON that Grafana loads; the same input gives the same bytes.

    Example: `warmkv dashboards build`, or into another folder `warmkv dashboards build /tmp/boards`
    """
    with _sdks():
        from warmkv.dashboards import build as building
    try:
        names = [folder / f"{name}.json" for name in building.BOARDS] if dry_run else building.build_all(folder)
    except OSError as error:
        _fail("dashboards", f"cannot write {error.filename}: {error.strerror}", code=1)
    if as_json:
        print(json.dumps({"files": [str(name) for name in names], "dry_run": dry_run}))
    else:
        for name in names:
            print(f"{'would write' if dry_run else 'wrote'} {name}")


@app.command()
def metrics(
    file: Annotated[Path, typer.Argument(help="Markdown file to write.")] = Path("docs/metrics.md"),
) -> None:
    """Write the page that lists every metric with its labels and buckets.

    Example: `warmkv dashboards metrics docs/metrics.md`
    """
    from warmkv.dashboards.metrics_page import page

    try:
        file.write_text(page(), encoding="utf-8")
    except OSError as error:
        _fail("metrics", f"cannot write {file}: {error.strerror}", code=1)
    print(f"wrote {file}")


@app.command()
def publish(
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006 (Typer copies it)
    url: Annotated[str | None, typer.Option(help="Address of Grafana instead of the configured one.")] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Upload every dashboard to Grafana, into the folder `dashboards.folder`, replacing older versions.

    The token of a service account is read from the variable that `dashboards.token_env` names.

    Example: `GRAFANA_TOKEN=... warmkv dashboards publish --url http://127.0.0.1:3000`
    """
    settings = _read_config(config, [*set_, *([f"dashboards.grafana_url={url}"] if url else [])]).dashboards
    with _sdks():
        from warmkv.dashboards import build as building
        from warmkv.dashboards import publish as publishing
    documents = building.documents()
    if dry_run:
        rows = [{"uid": board["uid"], "title": board["title"]} for board in documents.values()]
    else:
        try:
            published = publishing.publish(settings, os.environ.get(settings.token_env, ""), documents)
        except publishing.PublishError as error:
            _fail("dashboards", str(error), code=1)
        rows = [asdict(board) for board in published]
    if as_json:
        target = {"grafana": settings.grafana_url, "folder": settings.folder, "dry_run": dry_run}
        print(json.dumps({**target, "dashboards": rows}))
        return
    for row in rows:
        if dry_run:
            print(f"would publish {row['title']} ({row['uid']}) to {settings.grafana_url}, folder {settings.folder}")
        else:
            print(f"published {row['title']}: {row['url']} (version {row['version']})")


@contextmanager
def _sdks() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("grafana_api", "grafana_foundation_sdk", "requests"):
            raise
        _fail("dashboards", f'{error.name} is not installed; run: pip install "warmkv[dashboards]"', code=1)


def _read_config(path: Path | None, flags: list[str]) -> Config:
    try:
        return load(path, flags=flags)
    except ConfigError as error:
        _fail("configuration", str(error), code=2)


def _fail(what: str, message: str, code: int) -> NoReturn:
    errors.print(f"[red]{what}:[/red] ", end="")
    errors.print(message, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(code)
