"""`warmkv route`: a router in front of servers that run already. Imports when it runs, for instant help."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from warmkv.cli.command import fail, make_folder_of
from warmkv.cli.options import JsonOptions, SettingsOptions
from warmkv.cli.serving.record import check_address, serve_until_stopped
from warmkv.extras import require


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
        float, typer.Option(min=1, help="Seconds after its last use for which a prefix is taken to be there.")
    ] = 3600.0,
    log: Annotated[
        Path | None, typer.Option(help="Access log to write, as `warmkv record` does.", show_default="none")
    ] = None,
    *,
    output: JsonOptions,
    options: SettingsOptions,
) -> None:
    """Route requests to servers that run already, such as vLLM's, by longest warm prefix and load.

    Bytes pass unchanged. The decision is that of the service (`routing.*`, `engine.max_slots`); what a server holds is
    what it was sent. A server that cannot be reached is passed over. Ends at Ctrl-C.

    Examples: `warmkv route --engine http://gpu-1:8000 --engine http://gpu-2:8000 --kv-tokens 420000`,
    `warmkv route --engine http://gpu-1:8000 --engine http://gpu-2:8000 --log access.jsonl --set routing.load_weight=2`
    """
    settings = options.read()
    require("route", "aiohttp", "brotli", "zstandard")
    from warmkv.platform.access_log import AccessLog
    from warmkv.platform.engine_router.proxy import STATUS_PATH, RoutingProxy
    from warmkv.platform.engine_router.router import EngineRouter
    from warmkv.platform.recording.exchange import Analyst
    from warmkv.platform.recording.proxy import Recorder
    from warmkv.platform.recording.state import State

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
    router = EngineRouter(engines, settings, kv_tokens=kv_tokens, ttl=ttl, random=Random(), clock=time.monotonic)
    try:
        told = f"listening at {{}}, routing to {len(engines)} servers ({{}}{STATUS_PATH}); Ctrl-C ends it"
        asyncio.run(serve_until_stopped(RoutingProxy(router, recorder), host, port, told))
    finally:
        if written is not None:
            written.close()
    figures = router.figures()
    if recorder is not None:
        figures["log"] = recorder.figures

    def show() -> None:
        for name, one in figures["engines"].items():
            print(f"{name}: {one['answered']:,} requests answered")
        print("why: " + (", ".join(f"{why} {count:,}" for why, count in figures["routed"].items()) or "none came"))

    output.give(figures, show)
