"""`warmkv route`: a router in front of servers that run already. Imports when it runs, for instant help."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer

from warmkv.cli.command import fail, make_folder_of, no_standard_output
from warmkv.cli.options import JsonOptions, SettingsOptions
from warmkv.cli.serving.record import check_address, serve_until_stopped
from warmkv.extras import require

if TYPE_CHECKING:
    from warmkv.platform.engine_router.event_feed import Endpoints, EventFeed
    from warmkv.platform.engine_router.router import EngineRouter


def route(
    engine: Annotated[
        list[str],
        typer.Option(help="Address of a server, as in http://gpu-1:8000. Repeated for each.", show_default=False),
    ],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any.")] = 8402,
    kv_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens in each server's prefix cache; vLLM logs them as `GPU KV cache size`.")
    ] = 500_000,
    ttl: Annotated[
        str,
        typer.Option(
            help="Time after its last use for which a prefix is taken to be there: `300`, `5m`, `1h`, `unlimited`."
        ),
    ] = "1h",
    events: Annotated[
        list[str] | None,
        typer.Option(
            help="KV events of each --engine, in their order: tcp://HOST:PORT, or tcp://HOST:PORT,tcp://HOST:PORT with "
            "their replay; ,ranks=N behind it for N data-parallel ranks; none for a server without.",
            show_default="none",
        ),
    ] = None,
    tenant_salts: Annotated[
        bool | None,
        typer.Option(
            "--tenant-salts/--shared-prefixes",
            help="Keep the prefixes of each API key apart by `cache_salt`, or let all keys share them.",
            show_default="apart with --events",
        ),
    ] = None,
    salt: Annotated[
        str, typer.Option(envvar="WARMKV_SALT", help="Secret that salts of keys are derived from.", show_default="none")
    ] = "",
    token_seconds: Annotated[
        float, typer.Option(min=0.01, help="Seconds that a server may take to tokenize a prompt before it is routed.")
    ] = 1.0,
    log: Annotated[
        Path | None,
        typer.Option(
            help="Access log to write, as `warmkv record` does.", show_default="none", callback=no_standard_output
        ),
    ] = None,
    *,
    output: JsonOptions,
    options: SettingsOptions,
) -> None:
    """Route requests to servers that run already, such as vLLM's, by longest warm prefix and load.

    The decision is that of the service (`routing.*`, `engine.max_slots`). What a server holds is known by its KV events
    (`--events`), or else taken to be what it was sent. Bytes pass unchanged but for `cache_salt` and,
    with events, `kv_cache_report_mode`. A server that cannot be reached is passed over. Ends at Ctrl-C.

    Examples: `warmkv route --engine http://gpu-1:8000 --engine http://gpu-2:8000 --kv-tokens 420000`,
    `warmkv route --engine http://gpu-1:8000 --engine http://gpu-2:8000 --log access.jsonl --set routing.load_weight=2`,
    `warmkv route --engine http://gpu-1:8000 --events tcp://gpu-1:5557,tcp://gpu-1:5558`
    """
    settings = options.read()
    require("route", "aiohttp", "brotli", "zstandard")
    from warmkv.platform.access_log import AccessLog
    from warmkv.platform.engine_router.proxy import STATUS_PATH, RoutingProxy
    from warmkv.platform.engine_router.router import EngineRouter
    from warmkv.platform.recording.exchange import Analyst
    from warmkv.platform.recording.proxy import Recorder
    from warmkv.platform.recording.state import State
    from warmkv.simulator.studies import quantities

    lifetime = quantities.seconds(ttl)
    if lifetime < 1:
        fail(f"--ttl {ttl}: it is at least a second")
    engines = [check_address("--engine", address) for address in engine]
    if len(set(engines)) < len(engines):
        fail("--engine: a server is named twice")
    written, recorder = None, None
    if log is not None:
        make_folder_of(log)
        analyst = Analyst(State.of(log.with_name(f".{log.name}.state")), 64)
        lost: list[Recorder] = []
        written = AccessLog(log, 1 << 30, lambda lines: lost[0].lost(lines))
        recorder = Recorder(written, analyst)
        lost.append(recorder)
    followed = _followed(engines, events) if events else {}
    router = EngineRouter(
        [name for each in engines for name in followed.get(each, {each: None})],
        settings,
        kv_tokens=kv_tokens,
        ttl=lifetime,
        random=Random(),
        clock=time.monotonic,
        events=bool(events),
    )
    feeds = _feeds(followed, router)
    apart = bool(feeds) if tenant_salts is None else tenant_salts
    proxy = RoutingProxy(router, recorder, feeds=feeds, secret=salt if apart else None, token_seconds=token_seconds)
    try:
        told = f"listening at {{}}, routing to {len(engines)} servers ({{}}{STATUS_PATH}); Ctrl-C ends it"
        if feeds and (silent := [name for name in engines if name not in followed]):
            told += f"\n  without KV events, by what they are sent: {', '.join(silent)}"
        asyncio.run(serve_until_stopped(proxy, host, port, told))
    finally:
        if written is not None:
            written.close()
    figures = proxy.figures()
    if recorder is not None:
        figures["log"] = recorder.figures

    def show() -> None:
        for name, one in figures["engines"].items():
            print(f"{name}: {one['answered']:,} requests answered")
        print("why: " + (", ".join(f"{why} {count:,}" for why, count in figures["routed"].items()) or "none came"))

    output.give(figures, show)


def _followed(engines: Sequence[str], events: Sequence[str]) -> dict[str, dict[str, Endpoints]]:
    """Return where each server that has events publishes them, by its own name or those of its data-parallel ranks."""
    require("route --events", "zmq", "msgpack")
    from warmkv.platform.engine_router.event_feed import endpoints_of
    from warmkv.platform.engine_router.router import rank_name

    if len(events) != len(engines):
        fail(f"--events: {len(events)} for {len(engines)} servers; give one for each, none for a server without")
    try:
        found = {name: endpoints_of(text) for name, text in zip(engines, events, strict=True) if text != "none"}
    except ValueError as error:
        fail(f"--events: {error}")
    return {
        name: {rank_name(name, rank): one.of_rank(rank) for rank in range(one.ranks)} if one.ranks > 1 else {name: one}
        for name, one in found.items()
    }


def _feeds(followed: Mapping[str, Mapping[str, Endpoints]], router: EngineRouter) -> dict[str, EventFeed]:
    """Return what follows the events of each server and rank."""
    from warmkv.platform.engine_router.event_feed import EventFeed

    return {
        name: EventFeed(name, endpoints, router.block_size, partial(router.changed, name))
        for ranks in followed.values()
        for name, endpoints in ranks.items()
    }
