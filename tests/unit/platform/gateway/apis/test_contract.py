"""What of the contract needs a hand on the engine or the clock: parallel writers, time-outs, the parts of a price."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import pytest
import requests

from tests.polling import PATIENCE, until
from warmkv.platform.gateway.apis.messages.content import AssistantMessage, Tool, UserMessage
from warmkv.platform.gateway.apis.messages.turns import MessageReading
from warmkv.platform.tenants import open_tenant

ROOT = Path(__file__).parents[5]
LONG = "for key in keys:\n    total += weights[key]\n" * 30


def ask(server: Any, *texts: str, key: str = "alice", ttl: str = "5m", **more: Any) -> Any:
    """Return one user message; every text but the last is marked."""
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    for block in blocks[:-1]:
        block["cache_control"] = {"type": "ephemeral", "ttl": ttl}
    options = {"max_tokens": 1, "model": server.config.model.name, **more}
    return server.anthropic(key).messages.create(messages=[{"role": "user", "content": blocks}], **options).usage


def test_who_comes_before_the_first_answer_begins_is_a_writer(server):
    before = len(server.requests)
    with ThreadPoolExecutor(3) as pool:
        with server.standing_still():
            waiting = [pool.submit(ask, server, LONG, str(number), key="parallel") for number in range(3)]
            until(lambda: len(server.requests) == before + 3)
        usages = [answer.result() for answer in waiting]
    written = {usage.cache_creation_input_tokens for usage in usages}
    assert len(written) == 1
    assert written.pop() > 200
    assert [usage.cache_read_input_tokens for usage in usages] == [0, 0, 0]
    assert sorted(usage.warmkv["cached_tokens"] > 0 for usage in usages) == [False, True, True]  # computed once
    assert ask(server, LONG, "later", key="parallel").cache_read_input_tokens > 200


def test_who_comes_before_it_reads_what_was_there_before(server):
    """Two requests extend a prefix that was written earlier: both read it, both write the extension."""
    first = ask(server, LONG, "?", key="extended")
    before = len(server.requests)
    with ThreadPoolExecutor(2) as pool:
        with server.standing_still():
            waiting = [pool.submit(ask, server, LONG, LONG[:600], "?", key="extended") for _ in range(2)]
            until(lambda: len(server.requests) == before + 2)
        usages = [answer.result() for answer in waiting]
    for usage in usages:
        assert usage.cache_read_input_tokens == first.cache_creation_input_tokens
        assert usage.cache_creation_input_tokens > 100


def test_the_parts_of_a_price_and_the_tiers_of_what_was_reused(server):
    prices = server.config.prices
    for expected in ("cold", "warm"):
        usage = ask(server, LONG, LONG[:600], "?", key="parts", ttl="1h")
        parts, per_token = usage.warmkv["price"], prices.input / 1e6
        assert parts["write"] == {
            "5m": 0,
            "1h": pytest.approx(usage.cache_creation.ephemeral_1h_input_tokens * per_token * prices.write["1h"]),
        }
        assert parts["input"] == pytest.approx(usage.input_tokens * per_token)
        assert parts["read"] == pytest.approx(usage.cache_read_input_tokens * per_token * prices.read)
        assert parts["output"] == pytest.approx(usage.output_tokens * prices.output / 1e6)
        reused = usage.warmkv["cached_tokens"]
        assert usage.warmkv["tiers"] == ({"device": reused} if expected == "warm" else {})
        assert (reused > 0) == (expected == "warm")


def test_a_model_s_own_prices_are_billed(serve):
    server = serve("engine.threads=1", "pricing.models={tiny: {input: 300, write: {1h: 4}}}")
    usage = ask(server, LONG, "?", ttl="1h")
    assert usage.warmkv["price"]["input"] == pytest.approx(usage.input_tokens * 300 / 1e6)
    assert usage.warmkv["price"]["write"]["1h"] == pytest.approx(usage.cache_creation_input_tokens * 4 * 300 / 1e6)


def test_a_minimum_of_its_own(serve):
    server = serve("engine.threads=1", "prefix_cache.min_tokens=2000")
    for _ in range(2):
        usage = ask(server, LONG, "?")
        assert usage.cache_creation_input_tokens == usage.cache_read_input_tokens == 0
        assert usage.input_tokens > 200


def test_an_operator_s_own_ttl_is_billed_and_expires(serve):
    now = [0.0]
    flags = ["prefix_cache.ttls={5m: 300, 1h: 3600, 1d: 86400}", "pricing.write={5m: 1.25, 1h: 2, 1d: 3}"]
    server = serve("engine.threads=1", *flags, clock=lambda: now[0])
    assert ask(server, LONG, "?", ttl="1d").cache_creation.ephemeral_1d_input_tokens > 200
    now[0] = 80_000.0
    assert ask(server, LONG, "?").cache_read_input_tokens > 200
    now[0] = 160_000.0  # more than a day after the write, less than one after the read
    assert ask(server, LONG, "?").cache_read_input_tokens > 200
    now[0] = 260_000.0
    assert ask(server, LONG, "?").cache_read_input_tokens == 0


def test_a_time_out_is_504_and_in_a_stream_an_event(serve):
    server = serve("engine.threads=1")
    seconds = server.config.gateway.request_timeout_seconds
    with server.standing_still(), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server, "too", "late")
        until(lambda: server.requests, "the request is on its way to the engine")
        server.skip(seconds)
        with pytest.raises(anthropic.APIStatusError) as caught:
            answer.result()
    assert caught.value.status_code == 504
    assert caught.value.body["error"]["type"] == "timeout_error"
    assert caught.value.body["request_id"] == caught.value.response.headers["request-id"]

    body = {
        "model": server.config.model.name,
        "max_tokens": 4000,
        "stream": True,
        "messages": [{"role": "user", "content": "?"}],
        "warmkv": {"ignore_eos": True},
    }
    with (
        server.standing_still(tokens=3),
        requests.post(f"{server.url}/v1/messages", json=body, stream=True, timeout=PATIENCE) as response,
    ):
        lines = response.iter_lines(chunk_size=1)
        assert next(lines) == b"event: message_start"
        server.skip(seconds)
        *_, kind, data = [line for line in lines if line]
    assert kind == b"event: error"
    error = json.loads(data.removeprefix(b"data: "))
    assert error["error"]["type"] == "timeout_error"
    assert error["request_id"] == response.headers["request-id"]


def test_a_tenant_drops_its_own_prefixes(server):
    answer = requests.delete(
        f"{server.url}/v1/warmkv/prefixes", headers={"x-api-key": "carol"}, timeout=PATIENCE
    ).json()
    assert answer == {"type": "prefixes_dropped", "replicas": 2, "freed_bytes": 12}
    assert server.dropped == [open_tenant("carol", server.config.gateway, b"secret").label]


def test_the_example_of_the_documentation_runs(server, monkeypatch, capsys):
    """Every turn of its conversation reads what the one before it wrote."""
    monkeypatch.chdir(ROOT)
    code = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    exec(code.replace("http://127.0.0.1:8400", server.url), {})
    reads = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert reads[0] == 0 < 1000 < reads[1]
    assert len(reads) == 2


def test_results_and_documents_as_the_prompt_shows_them():
    content = [
        {"type": "tool_result", "tool_use_id": "b", "is_error": True, "content": [{"type": "text", "text": "no"}]},
        {"type": "document", "title": "T", "source": {"type": "content", "content": [{"type": "text", "text": "x"}]}},
        {"type": "text", "text": "y"},
        {"type": "document", "context": "C", "source": {"type": "text", "data": "z"}, "citations": {"enabled": False}},
        {"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": ""}},
    ]
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "b", "name": "f", "input": {"ü": 1}}]}

    tool = Tool.model_validate({"name": "f", "input_schema": {"type": "object", "additionalProperties": False}})
    found = MessageReading("5m").turns(
        [tool],
        None,
        [AssistantMessage.model_validate(called), UserMessage.model_validate({"role": "user", "content": content})],
    )
    assert [(turn.role, [block.text for block in turn.blocks]) for turn in found] == [
        (
            "tools",
            [
                '{"type": "function", "function": {"name": "f", "parameters": '
                '{"type": "object", "additionalProperties": false}}}'
            ],
        ),
        ("assistant", ['{"ü": 1}']),
        ("tool", ["Error: no"]),
        ("user", ["T\nx", "y", "C\nz", "T\nC\n"]),
    ]
