"""The `warmkv` command: one function a subcommand, no logic of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from warmkv import __version__
from warmkv.config import Config, ConfigError, load
from warmkv.dashboards.commands import app as dashboards_app
from warmkv.evaluation import commands as evaluation_commands
from warmkv.faults import INTERNAL, UserError, tell_internal
from warmkv.measuring import commands as measuring_commands
from warmkv.platform.manifest import app as manifest_app
from warmkv.platform.pack_commands import app as packs_app
from warmkv.platform.policy_commands import app as policy_app
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

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, rich_markup_mode="markdown")
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


def read_config(path: Path | None, flags: list[str]) -> Config:
    """The configuration in force; a fault ends the program with code 2 and a line that says what to do."""
    try:
        return load(path, flags=flags)
    except ConfigError as error:
        _fail("configuration", error, 2)


@contextmanager
def failures_end_the_program(what: str) -> Iterator[None]:
    """A fault of the machine or the settings ends the program with code 1 and its reason, an interrupt with 130."""
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
def serve(config: ConfigOption = None, set_: SetOption = []) -> None:  # noqa: B006
    """Serve the model on a local Ray, in the foreground, until Ctrl-C.

    Examples: `warmkv serve`, `warmkv serve --set cluster.replicas=2 --set compression.policy=snapkv@0.2`
    """
    from warmkv.platform.serving import serve_until_stopped

    settings = read_config(config, set_)
    with failures_end_the_program("cannot serve"):
        serve_until_stopped(settings, console)


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
        tell_internal(error, __version__)
        sys.exit(INTERNAL)
