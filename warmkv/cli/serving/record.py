"""`warmkv record`: a proxy that writes an access log. Imports when it runs, for instant help."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from warmkv.cli.command import fail, make_folder_of, no_standard_output
from warmkv.cli.options import JsonOptions
from warmkv.extras import require
from warmkv.terminal import errors

if TYPE_CHECKING:
    from warmkv.platform.recording.proxy import Proxy


def record(
    log: Annotated[
        Path,
        typer.Argument(
            help="Access log to write; an existing one is continued.", show_default=False, callback=no_standard_output
        ),
    ],
    upstream: Annotated[
        str, typer.Option(help="Address of the API, as in https://api.anthropic.com.", show_default=False)
    ],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any.")] = 8401,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="tokenizer.json of the model, or its folder: prompts are counted in its tokens.",
            show_default="by the text, scaled by reported usage",
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 64,
    state: Annotated[
        Path | None,
        typer.Option(help="File with the salt of hashes and the scale of texts.", show_default=".LOG.state"),
    ] = None,
    salt: Annotated[
        str | None, typer.Option(envvar="WARMKV_RECORD_SALT", help="Salt of hashes instead of the state file's.")
    ] = None,
    rotate_mib: Annotated[
        int,
        typer.Option(min=0, help="MiB of a file of the log; then it is renamed, and four old ones are kept. 0: never."),
    ] = 1024,
    *,
    output: JsonOptions,
) -> None:
    """Pass requests through to an API of OpenAI or Anthropic, and write an access log that can be replayed.

    Bytes pass unchanged. The log has salted hashes, lengths, breakpoints, usage and times, never text or keys. Ends at
    Ctrl-C and tells how many requests were written.

    Examples: `warmkv record access.jsonl --upstream https://api.anthropic.com` and
    `ANTHROPIC_BASE_URL=http://127.0.0.1:8401 claude`, then `warmkv replay access.jsonl --ttl 5m,1h`;
    `warmkv record access.jsonl --upstream http://vllm:8000 --tokenizer models/Llama-3.1-8B`
    """
    require("record", "aiohttp", "brotli", "zstandard")
    from warmkv.platform.access_log import AccessLog
    from warmkv.platform.recording.exchange import Analyst
    from warmkv.platform.recording.proxy import Proxy, Recorder
    from warmkv.platform.recording.state import State

    upstream = check_address("--upstream", upstream)
    make_folder_of(log)
    kept = State.of(state or log.with_name(f".{log.name}.state"), salt)
    analyst = Analyst(kept, block_size, None if tokenizer is None else _tokenize(tokenizer))
    lost: list[Recorder] = []
    written = AccessLog(log, rotate_mib << 20, lambda lines: lost[0].lost(lines))
    recorder = Recorder(written, analyst)
    lost.append(recorder)
    try:
        told = f"listening at {{}}, writing {log}; Ctrl-C ends it\n  ANTHROPIC_BASE_URL={{}}   OPENAI_BASE_URL={{}}/v1"
        asyncio.run(serve_until_stopped(Proxy(upstream, recorder), host, port, told))
    finally:
        written.close()
    output.give({"log": str(log), **recorder.figures}, lambda: _show(recorder.figures, log))


def _tokenize(path: Path) -> Callable[[str], list[int]]:
    """Return what makes token ids of a text."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own
        fail(f"--tokenizer {file}: {error}")
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def check_address(option: str, address: str) -> str:
    """Return the address of a server without a slash at its end; what is none ends the command."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        fail(f"{option} {address}: give the address of a server, as in https://api.anthropic.com")
    return address.rstrip("/")


async def serve_until_stopped(proxy: Proxy, host: str, port: int, told: str) -> None:
    """Run a proxy until Ctrl-C or SIGTERM; `told` is said when it listens, with its address for each `{}`."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with proxy.running(host, port) as bound:
        address = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
        errors.print(told.replace("{}", address))
        await stopped.wait()


def _show(figures: dict[str, int], log: Path) -> None:
    print(f"{figures['passed']:,} requests passed, {figures['recorded']:,} of them written to {log}")
    if figures["left_out"]:
        print(f"{figures['left_out']:,} could not be written: too large, or no JSON")
