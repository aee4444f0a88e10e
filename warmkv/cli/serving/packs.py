"""The `warmkv packs` commands. What they need is imported when they run: help is instant."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from warmkv.cli.command import add_command, fail, no_standard_output
from warmkv.cli.options import JsonOptions, SettingsOptions
from warmkv.config import Config, ConfigError
from warmkv.terminal import console, errors

app = typer.Typer(no_args_is_help=True, help="Knowledge packs: prefixes computed once, which replicas keep for good.")


def _secret() -> bytes:
    from warmkv.platform.tenants import SALT_ENV, secret_of_environment

    if secret := secret_of_environment():
        return secret
    raise ConfigError(f"{SALT_ENV} is not set: without the service's salt nobody would find the pack")


def _serving(options: SettingsOptions, paths: Sequence[Path]) -> Config:
    """Return the settings of a service with these packs. Raises ConfigError, also for an engine that has none."""
    return options.read(f"prefix_cache.packs={json.dumps([str(path) for path in paths])}")


@contextmanager
def _asked_wrongly() -> Iterator[None]:
    """End the command with 2 for what it was asked for; what the machine cannot do ends it with 1."""
    from warmkv.platform.gateway.apis.errors import ApiError
    from warmkv.replicas.block_store.packs import PackError

    try:
        yield
    except (ApiError, PackError) as error:
        fail(str(error), code=2)


@add_command(app, code=1)
def build(
    options: SettingsOptions,
    out: Annotated[Path, typer.Argument(help="Folder to write; it must be empty or new.", callback=no_standard_output)],
    tenant: Annotated[
        list[str],
        typer.Option(
            help="Who may read it: a tenant's name; if none are configured, an API key, or '' for requests without one."
        ),
    ],
    system: Annotated[Path | None, typer.Option(help="File with the system prompt, if conversations have one.")] = None,
    document: Annotated[
        list[Path], typer.Option(help="File with a document that is the first block of a user message.")
    ] = [],  # noqa: B006 (Typer copies it)
) -> None:
    """Compute a system prompt, or documents behind it, and write their KV as a pack.

    Hashes are salted by tenant: the pack serves only the tenants given here, under the same model and salt. List it in
    `prefix_cache.packs`.

    Example: `warmkv packs build packs/handbook --tenant support --system system.txt --document handbook.txt`
    """
    from warmkv.platform import packs

    settings = _serving(options, [out])
    secret = _secret()
    with _asked_wrongly():
        built = packs.build(
            settings,
            tenant,
            secret,
            packs.Source.read(system) if system else None,
            [packs.Source.read(path) for path in document],
            out,
            errors.print,
        )
    print(f"{out}: {built.prefixes} prefixes, {built.tokens} tokens, {built.blocks} blocks, {built.bytes} bytes")
    print(f"serve with --set 'prefix_cache.packs=[{out}]'")


@add_command(app, code=1)
def load(
    options: SettingsOptions,
    paths: Annotated[list[Path], typer.Argument(help="Packs.")],
) -> None:
    """Check packs as a replica does at its start: salt, model, tenants, checksums and memory.

    Example: `warmkv packs load packs/handbook`
    """
    from warmkv.platform.packs import check_packs
    from warmkv.platform.tenants import secret_of_environment
    from warmkv.replicas.engine.engine import Engine
    from warmkv.replicas.loading.load import load_model

    settings = _serving(options, paths)
    none = type(settings.prefix_cache.disk)()  # a running replica may hold its folder
    cache = settings.prefix_cache.model_copy(update={"disk": none})
    with _asked_wrongly():
        check_packs(paths, settings, secret_of_environment())
        engine = Engine(load_model(settings.model), settings.engine, cache, clock=lambda: 0.0)
    held = ", ".join(f"{size} bytes in the tier {tier}" for tier, size in engine.store.tier_bytes.items() if size)
    print(f"{len(engine.store)} blocks, {held}")


@add_command(app, code=1)
def show(
    paths: Annotated[list[Path], typer.Argument(metavar="PACKS...", help="Folders of packs.")], output: JsonOptions
) -> None:
    """Show what packs hold: model, tenants, documents, size. The model is not loaded.

    Example: `warmkv packs show packs/*`
    """
    from warmkv.platform.packs import contents

    with _asked_wrongly():
        found = [contents(path) for path in paths]
    output.give(found, lambda: list(map(_shown, found)))


def _shown(pack: dict[str, Any]) -> None:
    model, copies = pack["model"], pack["prefixes"] // len(pack["documents"])
    documents = [f"{one['name']} ({one['tokens']:,} tokens)" for one in pack["documents"]]
    console.print(pack["path"], style="bold")
    for what, told in (
        ("model", f"{model['name']} ({model['kind']}), {model['dtype']}"),
        ("tenants", f"{copies} by API key" if pack["tenants"] is None else ", ".join(pack["tenants"])),
        ("documents", ", ".join(documents)),
        ("holds", f"{pack['tokens']:,} tokens in {pack['blocks']:,} blocks of {model['block_size']}"),
        ("bytes", f"{pack['bytes']:,}, storage {pack['storage']}"),
    ):
        console.print(f"  {what:<10} {told}")
