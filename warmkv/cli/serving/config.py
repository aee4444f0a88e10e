"""`warmkv config` and `warmkv hash-key`: the settings in force, their schema, and what they store of a key."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from warmkv.cli.command import add_command, fail
from warmkv.cli.options import SettingsOptions
from warmkv.config import Config

app = typer.Typer(no_args_is_help=True, help="Show the configuration in force, or its schema.")


@add_command(app)
def show(options: SettingsOptions) -> None:
    """Print every setting in force as YAML: file, then `WARMKV_SECTION__KEY` variables, then `--set` flags.

    Example: `warmkv config show --set compression.policy=snapkv@0.2`
    """
    import yaml

    print(yaml.safe_dump(options.read().model_dump(mode="json"), sort_keys=False), end="")


@add_command(app)
def schema() -> None:
    """Print the JSON schema of the configuration, for editors and validators.

    Example: `warmkv config schema > warmkv.schema.json`
    """
    print(json.dumps(Config.model_json_schema(), indent=2))


def hash_key(
    key: Annotated[str, typer.Option(prompt="API key", hide_input=True, help="Asked for if it is not given.")],
) -> None:
    """Print what `gateway.tenants` stores of an API key.

    Example: `warmkv hash-key`, then `--set 'gateway.tenants=[{name: team, key_sha256: <what it printed>}]'`
    """
    from warmkv.platform.tenants import hash_key as hashed

    if not key.strip():
        fail("the key is empty: the variable that was to hold it is perhaps not set")
    if not key.isascii():
        fail("the key has characters beyond ASCII, which no header of HTTP carries")
    print(hashed(key))
