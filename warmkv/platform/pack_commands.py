"""The `warmkv packs` commands. What they need is imported when they run: help is instant."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from warmkv.config import Config, ConfigError, load

app = typer.Typer(no_args_is_help=True, help="Knowledge packs: prefixes computed once, which replicas keep for good.")

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with the settings in force.")]
SetOption = Annotated[list[str], typer.Option("--set", help="A setting, as in `--set model.path=FOLDER`.")]


@contextmanager
def _faults() -> Iterator[None]:
    """End the program with code 2 at settings that cannot be used, with code 1 at any other failure."""
    from warmkv.platform.gateway.apis.errors import ApiError
    from warmkv.replicas.block_store.packs import PackError

    try:
        yield
    except ConfigError as error:
        typer.echo(f"configuration: {error}", err=True)
        raise typer.Exit(2) from None
    except (PackError, ApiError, LookupError, OSError, UnicodeDecodeError) as error:
        typer.echo(f"packs: {error}", err=True)
        raise typer.Exit(1) from None


def _secret(config: Config) -> bytes:
    if secret := os.environ.get(config.gateway.salt_env, "").encode():
        return secret
    raise ConfigError(f"{config.gateway.salt_env} is not set: without the service's salt nobody would find the pack")


@app.command("build")
def build_command(
    out: Annotated[Path, typer.Argument(help="Folder to write; it must be empty or new.")],
    tenant: Annotated[
        list[str],
        typer.Option(help="Who may read it: a tenant's name, or the API key if none are configured."),
    ],
    system: Annotated[Path | None, typer.Option(help="File with the system prompt, if conversations have one.")] = None,
    document: Annotated[
        list[Path], typer.Option(help="File with a document that is the first block of a user message.")
    ] = [],  # noqa: B006 (Typer copies it)
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006
) -> None:
    """Compute a system prompt, or documents behind it, and write their KV as a pack.

    Hashes are salted by tenant: the pack serves only the tenants given here, under the same model and salt. List it in
    `prefix_cache.packs`.

    Example: `warmkv packs build packs/handbook --tenant support --system system.txt --document handbook.txt`
    """
    with _faults():
        from warmkv.platform import packs
        from warmkv.platform.tenants_file import find_tenant

        settings = load(config, flags=set_)
        secret = _secret(settings)
        built = packs.build(
            settings,
            [find_tenant(name, settings, secret) for name in dict.fromkeys(tenant)],
            system.read_text() if system else None,
            [path.read_text() for path in document],
            out,
            lambda line: typer.echo(line, err=True),
        )
    typer.echo(f"{out}: {built.prefixes} prefixes, {built.tokens} tokens, {built.blocks} blocks, {built.bytes} bytes")
    typer.echo(f"serve with --set 'prefix_cache.packs=[{out}]'")


@app.command("load")
def load_command(
    paths: Annotated[list[Path], typer.Argument(help="Packs.")],
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006
) -> None:
    """Load packs as a replica would at its start: the model, every checksum, and whether memory suffices.

    Example: `warmkv packs load packs/handbook`
    """
    with _faults():
        from warmkv.replicas.engine.engine import Engine
        from warmkv.replicas.loading.load import load_model

        settings = load(config, flags=set_)
        none = type(settings.prefix_cache.disk)()  # a running replica may hold its folder
        cache = settings.prefix_cache.model_copy(update={"enabled": True, "packs": tuple(paths), "disk": none})
        engine = Engine(load_model(settings.model), settings.engine, cache, clock=lambda: 0.0)
    held = ", ".join(f"{size} bytes in the tier {tier}" for tier, size in engine.store.tier_bytes.items() if size)
    typer.echo(f"{len(engine.store)} blocks, {held}")
