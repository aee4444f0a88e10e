"""The `warmkv` command: one function a subcommand, no logic of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from warmkv import __version__
from warmkv.config import Config, ConfigError, load
from warmkv.dashboards.commands import app as dashboards_app
from warmkv.evaluation import commands as evaluation_commands
from warmkv.extras import advice
from warmkv.faults import INTERNAL, UserError, tell_internal
from warmkv.measuring import commands as measuring_commands
from warmkv.platform.live_config_commands import app as policy_app
from warmkv.platform.manifest import app as manifest_app
from warmkv.platform.pack_commands import app as packs_app
from warmkv.policies import commands as policy_commands
from warmkv.simulator.commands.cachesim import cachesim
from warmkv.simulator.commands.calibrate import calibrate
from warmkv.simulator.commands.compare import compare
from warmkv.simulator.commands.options import JsonCommand
from warmkv.simulator.commands.replay import replay
from warmkv.simulator.commands.sweep import sweep
from warmkv.simulator.commands.tune import tune
from warmkv.simulator.commands.verify import verify
from warmkv.simulator.commands.workload import workload

app = typer.Typer(
    no_args_is_help=True,
    help="Serve language models, replay their traffic, and tune both.",
    rich_markup_mode="markdown",
)
config_app = typer.Typer(no_args_is_help=True, help="Show the configuration in force, or its schema.")
app.add_typer(config_app, name="config")
app.add_typer(dashboards_app, name="dashboards")
app.add_typer(manifest_app, name="k8s")
app.add_typer(packs_app, name="packs")
app.add_typer(policy_app, name="policy")

console = Console()
errors = Console(stderr=True)

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with settings.")]
SetOption = Annotated[
    list[str], typer.Option("--set", help="A setting, as in `--set engine.max_slots=8`. May be repeated.")
]


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


def read_config(path: Path | None, flags: list[str]) -> Config:
    """Read the configuration; end the program with code 2 and a line that says what to do if it is wrong."""
    try:
        return load(path, flags=flags)
    except ConfigError as error:
        _fail("configuration", error, 2)


@contextmanager
def failures_end_the_program(what: str) -> Iterator[None]:
    """End the program with code 1 and the reason at a fault of machine or settings, with 130 at an interrupt."""
    try:
        yield
    except ConfigError as error:
        _fail("configuration", error, 2)
    except (OSError, UserError) as error:
        _fail(what, error, 1)
    except KeyboardInterrupt:
        errors.print("interrupted")
        raise typer.Exit(130) from None


def _fail(what: str, error: Exception, code: int) -> NoReturn:
    """End the program with what an error says; brackets in it are no markup."""
    errors.print(f"[red]{what}:[/red] ", end="")
    errors.print(str(error), highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(code)


@config_app.command("show")
def config_show(config: ConfigOption = None, set_: SetOption = []) -> None:  # noqa: B006 (Typer copies it)
    """Print every setting in force as YAML: file, then `WARMKV_SECTION__KEY` variables, then `--set` flags.

    Example: `warmkv config show --set compression.policy=snapkv@0.2`
    """
    import yaml

    print(yaml.safe_dump(read_config(config, set_).model_dump(mode="json"), sort_keys=False), end="")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of the configuration, for editors and validators."""
    import json

    print(json.dumps(Config.model_json_schema(), indent=2))


@app.command("hash-key")
def hash_key(
    key: Annotated[str, typer.Option(prompt="API key", hide_input=True, help="Asked for if it is not given.")],
) -> None:
    """Print what `gateway.tenants` stores of an API key.

    Example: `warmkv hash-key`, then `--set 'gateway.tenants=[{name: team, key_sha256: <what it printed>}]'`
    """
    from warmkv.platform.tenants import hash_key as hashed

    print(hashed(key))


@app.command()
def serve(
    model: Annotated[str | None, typer.Argument(help="Folder or hub name.", show_default="model.path")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="gateway.host")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one.", show_default="gateway.port")] = None,
    replicas: Annotated[int | None, typer.Option(help="Copies of the model.", show_default="cluster.replicas")] = None,
    policy: Annotated[str | None, typer.Option(help="As in `snapkv@0.2`.", show_default="compression.policy")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with an API key: nobody without it is answered.", show_default=False)
    ] = None,
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006
) -> None:
    """Serve the model on a local Ray, in the foreground, until Ctrl-C. Options win over `--set`.

    Examples: `warmkv serve`, `warmkv serve Qwen/Qwen3-0.6B --port 8000 --policy snapkv@0.2`,
    `warmkv serve --set cluster.replicas=2 --set engine.max_slots=8`
    """
    import json

    from warmkv.platform.serving import serve_until_stopped, tenant_with_key

    named = {
        "model.path": model,
        "gateway.host": host,
        "gateway.port": port,
        "cluster.replicas": replicas,
        "compression.policy": policy,
    }
    with failures_end_the_program("cannot serve"):
        tenants = [] if api_key_file is None else [tenant_with_key(api_key_file)]
        flags = [*set_, *(f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None), *tenants]
        serve_until_stopped(read_config(config, flags), console)


@app.command()
def doctor(
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006
    json_: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what is installed, which device there is, how memory is planned, and check the model against itself.

    Exits 1 if something that `warmkv serve` needs is missing or fails. Example: `warmkv doctor --set model.path=FOLDER`
    """
    import json
    from dataclasses import asdict

    from warmkv.doctor import Finding, examine

    marks = {"ok": "[green]ok[/green]", "missing": "[yellow]missing[/yellow]", "failed": "[red]failed[/red]"}
    settings, found = read_config(config, set_), list[Finding]()
    with errors.status("looking") as shown:
        for finding in examine(settings, lambda what: shown.update(Text(what))):
            found.append(finding)
            if not json_:
                console.print(f"{marks[finding.state]} [bold]{finding.what}[/bold] ", end="")
                console.print(finding.detail, highlight=False, markup=False, soft_wrap=True)
    if json_:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    needed = [finding for finding in found if finding.state == "failed" or finding.what == "extra serve"]
    raise typer.Exit(int(any(finding.state != "ok" for finding in needed)))


@app.command()
def demo(
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Which document and questions.")] = 1,
    json_: Annotated[Path | None, typer.Option("--json", help="Write the result to this file as well.")] = None,
) -> None:
    """Start two replicas, ask about a long document through both SDKs under three policies, and show the table.

    Exits 0 only if the warm requests read the cache and the answers are right.
    """
    import json

    from warmkv import demo as demonstration

    settings = read_config(config, ["gateway.port=0", *set_])
    with failures_end_the_program("the demo cannot run"):
        result = demonstration.run(settings, console, seed)
    demonstration.show(result, settings, console)
    if json_ is not None:
        json_.write_text(json.dumps(result.to_json(), indent=2) + "\n")
    raise typer.Exit(0 if result.passed else 1)


app.command(cls=JsonCommand)(replay)
app.command()(workload)
app.command(cls=JsonCommand)(cachesim)
app.command(cls=JsonCommand)(calibrate)
app.command(cls=JsonCommand)(sweep)
app.command(cls=JsonCommand)(compare)
app.command(cls=JsonCommand)(tune)
app.command(cls=JsonCommand)(verify)
app.command("eval")(evaluation_commands.evaluate)
app.command()(measuring_commands.bench)
app.command()(measuring_commands.profile)
app.command("price")(policy_commands.price_prefix)


def main() -> None:
    """Entry point of the `warmkv` script. What no command expects is shown whole, and ends with a code of its own."""
    try:
        app()
    except UserError as error:
        print(f"warmkv: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (said := advice(error.name)) is not None:
            print(f"warmkv: {said}", file=sys.stderr)
            sys.exit(2)
        tell_internal(error, __version__)
        sys.exit(INTERNAL)
