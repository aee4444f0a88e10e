"""The client of the race through HTTP, against a server that answers from a script."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks import served_race
from benchmarks.served_race import Load, Measured, measure

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def asked(load: Load, whole: bool = True) -> tuple[Measured, list[str]]:
    """What a load measures, and the prompts that came, of a server that streams three tokens."""
    prompts: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        prompts.append(json.loads(await reader.readexactly(size))["prompt"])
        writer.write(HEAD)
        for text in "abc":
            writer.write(f'data: {{"choices": [{{"text": "{text}"}}]}}\n\n'.encode())
            await writer.drain()
        if whole:
            writer.write(b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n')
        writer.close()

    async def run() -> Measured:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await measure(f"http://127.0.0.1:{port}", "tiny", load, 1)

    return asyncio.run(run()), prompts


def test_every_request_is_counted_and_no_prompt_comes_twice():
    seen, prompts = asked(Load("many", 4, 5, 3, 2))
    assert (seen.tokens, len(seen.first), len(set(prompts))) == (4 * 2 * 3, 8, 8)
    assert {figure.name for figure in served_race._figures(Load("many", 4, 5, 3, 2), seen)} >= {
        "many_tokens_per_second",
        "many_first_token_seconds",
    }


def test_one_client_asks_the_same_again():
    _, prompts = asked(Load("warm", 1, 5, 3, 3))
    assert len(prompts) == 3
    assert len(set(prompts)) == 1


def test_an_answer_that_is_cut_off_is_no_measurement():
    with pytest.raises(RuntimeError, match="no whole answer"):
        asked(Load("cut", 1, 5, 3, 1), whole=False)


def test_processes_of_others_are_not_counted(monkeypatch):
    monkeypatch.setattr(served_race, "PARTS", {"mine": "ray::"})
    assert served_race.processes() == {}
