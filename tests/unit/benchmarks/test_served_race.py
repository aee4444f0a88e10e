"""The client of the race through HTTP, against a server that answers from a script."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from benchmarks.served.cpu import used_by_root, used_by_title
from benchmarks.served.load import Load, Measured, Server, measure, single_token_words
from benchmarks.served_race import figures_of
from warmkv.models.tiny import PATH

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
WORDS = [f"w{number}" for number in range(1000)]


def served(url: str, name: str = "ours") -> Server:
    return Server(name, url, "tiny", {"ignore_eos": True}, lambda: {"front": 0.0, "core": 0.0}, ("front",))


def asked(load: Load, whole: bool = True) -> tuple[Measured, list[str]]:
    """What a load measures, and the prompts that came, of a server that streams three tokens."""
    prompts: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        body = json.loads(await reader.readexactly(size))
        assert body["ignore_eos"]
        prompts.append(body["prompt"])
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
            return await measure(served(f"http://127.0.0.1:{port}"), load, WORDS, 1)

    return asyncio.run(run()), prompts


def test_every_request_is_counted_and_no_prompt_comes_twice():
    load = Load("many", 4, 5, 3, 2)
    seen, prompts = asked(load)
    assert (seen.tokens, len(seen.first), len(set(prompts))) == (4 * 2 * 3, 8, 8)
    assert {len(prompt.split()) for prompt in prompts} == {5}
    ours, theirs = served("", "ours"), served("", "theirs")
    found = {figure.name: figure for figure in figures_of(load, {"ours": [seen], "theirs": [seen]}, [ours, theirs])}
    assert found["many_tokens_per_second_vs_theirs"].value == 1.0
    assert "many_core_cpu_us_per_token_theirs" in found


def test_only_ratios_that_are_held_are_judged():
    load = Load("long", 2, 5, 200, 1, held=("tokens_per_second",))
    ours, theirs = served("", "ours"), served("", "theirs")
    slow, fast = (Measured(wall, 400, [0.1, 0.1], [0.1], {"front": 4e-3, "core": 1.0}) for wall in (3.0, 2.0))
    slow.cpu["front"] = 1e-3
    found = figures_of(load, {"ours": [slow], "theirs": [fast]}, [ours, theirs])
    assert {figure.name: figure.met for figure in found if figure.target is not None} == {
        "long_tokens_per_second_vs_theirs": False,
        "long_outside_cpu_us_per_token_vs_theirs": True,
    }


def test_one_client_asks_the_same_again_and_its_cold_prompt_does_not_count():
    seen, prompts = asked(Load("warm", 1, 5, 3, 3, again=True))
    assert len(prompts) == 3
    assert len(set(prompts)) == 1
    assert len(seen.first) == 2


def test_what_is_shared_is_sent_ahead_and_begins_every_prompt():
    seen, prompts = asked(Load("shared", 2, 10, 3, 2, shared=8))
    assert len(prompts) == 5
    assert len(set(prompts)) == 5
    assert all(prompt.startswith(prompts[0]) and len(prompt.split()) == 10 for prompt in prompts[1:])
    assert seen.tokens == 4 * 3


def test_an_answer_that_is_cut_off_is_no_measurement():
    with pytest.raises(RuntimeError, match="no whole answer"):
        asked(Load("cut", 1, 5, 3, 1), whole=False)


def test_words_count_tokens():
    from transformers import AutoTokenizer

    words = single_token_words(PATH)
    text = "".join(f" {word}" for word in words)
    assert len(words) > 100
    assert len(AutoTokenizer.from_pretrained(PATH).encode(text, add_special_tokens=False)) == len(words)


def test_processes_of_others_are_not_counted():
    assert used_by_title(os.getpid(), {"any": "init"}) == {}
    assert used_by_root(os.getpid(), "mine", "others")["mine"] > 0
