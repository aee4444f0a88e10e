"""Tenants' limits over HTTP: 429 with a Retry-After that holds, and the headers of each API on every answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from tests.unit.platform.asgi import Gateway, Reply, as_flag, becomes
from warmkv.platform.tenants import hash_key


def limited(folder: Path, **limits: float) -> Gateway:
    return Gateway(folder, as_flag("gateway.limits", limits))


def check_refusal(answer: Reply, setting: str) -> int:
    assert (answer.status, answer.body["error"]["type"]) == (429, "rate_limit_error")
    assert f"gateway.limits.{setting}" in answer.error
    return int(answer.headers["retry-after"])


def test_requests_a_minute(tmp_path: Path) -> None:
    gateway = limited(tmp_path, requests_per_minute=3)
    headers = []
    for ask in (gateway.messages, gateway.messages, gateway.completion):
        answer = ask("alice")
        assert answer.status == 200
        headers.append({name: value for name, value in answer.headers.items() if "ratelimit" in name})
    assert headers == [
        {
            "anthropic-ratelimit-requests-limit": "3",
            "anthropic-ratelimit-requests-remaining": "2",
            "anthropic-ratelimit-requests-reset": "2027-01-15T08:00:20Z",
        },
        {
            "anthropic-ratelimit-requests-limit": "3",
            "anthropic-ratelimit-requests-remaining": "1",
            "anthropic-ratelimit-requests-reset": "2027-01-15T08:00:40Z",
        },
        {
            "x-ratelimit-limit-requests": "3",
            "x-ratelimit-remaining-requests": "0",
            "x-ratelimit-reset-requests": "1m0s",
        },
    ]
    refused = gateway.messages("alice")
    assert check_refusal(refused, "requests_per_minute") == 20
    assert refused.headers["anthropic-ratelimit-requests-remaining"] == "0"
    gateway.now = 19.0
    assert check_refusal(gateway.completion("alice"), "requests_per_minute") == 1
    assert gateway.messages("bob").status == 200
    gateway.now = 20.0
    assert gateway.messages("alice").status == 200


def test_every_endpoint_that_costs_something_counts(tmp_path: Path) -> None:
    gateway = limited(tmp_path, requests_per_minute=2)
    body = {"model": gateway.model, "messages": [{"role": "user", "content": "Hello"}]}
    assert gateway.call("POST", "/v1/messages/count_tokens", "alice", body).status == 200
    assert gateway.call("POST", "/v1/chat/completions", "alice", body).status == 200
    for method, path in (("DELETE", "/v1/warmkv/prefixes"), ("POST", "/v1/messages/count_tokens")):
        check_refusal(gateway.call(method, path, "alice", body), "requests_per_minute")
    assert gateway.dropped == []
    assert gateway.call("GET", "/v1/models", "alice").status == 200


def test_tokens_a_minute_are_settled_by_what_was_used(tmp_path: Path) -> None:
    gateway = limited(tmp_path, tokens_per_minute=1000)
    first = gateway.messages("alice", max_tokens=500)
    used = first.body["usage"]["input_tokens"] + first.body["usage"]["output_tokens"]
    assert int(first.headers["anthropic-ratelimit-tokens-remaining"]) == 1000 - (used - 3 + 500)  # as reserved
    second = gateway.completion("alice", max_tokens=1)
    assert int(second.headers["x-ratelimit-remaining-tokens"]) in range(1000 - 2 * used - 10, 1000 - used)
    refused = gateway.messages("alice", max_tokens=999)
    wait = check_refusal(refused, "tokens_per_minute")
    gateway.now += wait
    assert gateway.messages("alice", max_tokens=999).status == 200  # none was charged for what was refused


def test_tokens_read_from_the_cache_do_not_count(tmp_path: Path) -> None:
    gateway = limited(tmp_path, tokens_per_minute=1000)
    gateway.cached_tokens = 5
    usage = gateway.completion("alice").body["usage"]
    left = int(gateway.completion("alice", max_tokens=1).headers["x-ratelimit-remaining-tokens"])
    assert left == 1000 - (usage["prompt_tokens"] - 5 + 3) - (usage["prompt_tokens"] + 1)


def test_what_fails_gives_its_tokens_back(tmp_path: Path) -> None:
    limits = as_flag("gateway.limits", {"tokens_per_minute": 100_000})
    gateway = Gateway(tmp_path, limits, "compression.allow_request_policy=false")
    assert gateway.messages("alice", max_tokens=4000, warmkv={"policy": "full"}).status == 403
    assert gateway.messages("alice", max_tokens=1, model="gpt").status == 404
    left = int(gateway.messages("alice", max_tokens=1).headers["anthropic-ratelimit-tokens-remaining"])
    assert left > 99_900


def gated(gateway: Gateway, count: int, **more: Any) -> list[Reply]:
    """Return the answers to requests of which none is answered before all have come."""

    async def scenario() -> list[Reply]:
        gateway.gate = asyncio.Event()
        waiting = [asyncio.create_task(gateway.message("alice", **more)) for _ in range(count)]
        await becomes(lambda: sum(task.done() for task in waiting) == count - 2)
        gateway.gate.set()
        return await asyncio.gather(*waiting)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        (['gateway.limits={"concurrent_requests": 2}'], "concurrent_requests"),
        (['gateway.limits={"queue_share": 0.5}', "cluster.max_queued_requests=4"], "queue_share"),
    ],
)
def test_requests_at_a_time_and_the_share_of_the_queue(tmp_path: Path, flags: list[str], setting: str) -> None:
    gateway = Gateway(tmp_path, *flags)
    for streamed in (False, True):
        answers = gated(gateway, 5, stream=streamed)
        assert sorted(answer.status for answer in answers) == [200, 200, 429, 429, 429]
        for answer in answers:
            if answer.status == 429:
                assert check_refusal(answer, setting) >= 1
    assert gateway.messages("alice").status == 200


def test_a_client_that_leaves_as_its_stream_begins_holds_nothing(tmp_path: Path) -> None:
    """Nobody then reads the answer, so that only the end of the request itself can give its place back."""
    gateway = limited(tmp_path, concurrent_requests=1)
    gateway.leaves = True
    with pytest.raises(ClientDisconnect):
        gateway.messages("alice", stream=True)
    gateway.leaves = False
    assert gateway.messages("alice").status == 200


def test_a_client_that_leaves_while_it_waits_holds_nothing(tmp_path: Path) -> None:
    gateway = limited(tmp_path, concurrent_requests=1)

    async def leave() -> None:
        gateway.gate = asyncio.Event()
        leaving = asyncio.create_task(gateway.message("alice", stream=True))
        await becomes(lambda: gateway.asked == 1)
        assert (await gateway.message("alice")).status == 429
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        gateway.gate = None
        assert (await gateway.message("alice")).status == 200

    asyncio.run(leave())


def test_a_tenant_s_own_limits_and_those_of_all(tmp_path: Path) -> None:
    tenants = [
        {"name": "own", "key_sha256": hash_key("own"), "limits": {"requests_per_minute": 1}},
        {"name": "free", "key_sha256": hash_key("free"), "limits": {"requests_per_minute": 0}},
        {"name": "usual", "key_sha256": hash_key("usual")},
    ]
    flags = as_flag("gateway.tenants", tenants), as_flag("gateway.limits", {"requests_per_minute": 2})
    gateway = Gateway(tmp_path, *flags)
    for key, granted in (("own", 1), ("free", 4), ("usual", 2)):
        assert [gateway.messages(key).status for _ in range(4)] == [200] * granted + [429] * (4 - granted)
    halved = Gateway(tmp_path, *flags, "cluster.gateways=2")
    assert [halved.messages("usual").status for _ in range(2)] == [200, 429]


def test_without_limits_no_header_says_so(tmp_path: Path) -> None:
    assert not [name for name in Gateway(tmp_path).messages("alice").headers if "ratelimit" in name]
