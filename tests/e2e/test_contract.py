"""The prompt-caching contract, case by case, through the real clients against the running service.

A case is a list of requests (`contract_cases.py` has the notation), each sent when the one before was answered, with
what the contract bills: A, B and C (item 7) as numbers of content blocks from the start. (0, 1, 3) reads nothing,
writes the first block for an hour and the two behind it for 5 minutes; the rest is ordinary input.
"""

from __future__ import annotations

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import requests

from tests.e2e.contract_cases import body, messages, positions
from tests.polling import PATIENCE
from warmkv.config import ModelConfig
from warmkv.policies import pricing
from warmkv.prefixes.usage import Usage
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.loading.tokenizer import load_tokenizer

pytestmark = pytest.mark.cluster

Bill = tuple[int, int, int]
COLD = "T1* S1* U1* U9"


def far(blocks: int, mark_at: int = 0) -> str:
    """Return `blocks` short blocks behind U1, the last of them marked, and one more if asked for."""
    return " ".join(["U1", *(f"U{10 + i}'{'*' if i in (blocks, mark_at) else ''}" for i in range(1, blocks + 1)), "U9"])


NUMBERS = range(10, 35)
PARALLEL = " ".join(["U1", *(f"C{number}'" for number in NUMBERS), *(f"R{number}1'" for number in NUMBERS), "A1 U2*"])
"""A round of 25 calls behind U1, answered, and the next message."""

CASES: dict[str, list[tuple[str, Bill]]] = {
    # items 3, 7, 8: what is written, what is read
    "a mark writes, the same mark reads": [("U1* U2", (0, 0, 1)), ("U1* U3", (1, 1, 1)), ("U1* U2", (1, 1, 1))],
    "the mark on the last block leaves the template": [("U1*", (0, 0, 1)), ("U1*", (1, 1, 1))],
    "nothing is written without a mark": [("U1 U2", (0, 0, 0)), ("U1 U2", (0, 0, 0)), ("U1* U2", (0, 0, 1))],
    "nothing is read without a mark": [("U1* U2", (0, 0, 1)), ("U1 U2", (0, 0, 0))],
    "a write is at its breakpoint only": [("U1 U2* U3", (0, 0, 2)), ("U1* U2 U3", (0, 0, 1))],
    "a mark that moves on reads the earlier one": [("U1* U2", (0, 0, 1)), ("U1 U2* U3", (1, 1, 2))],
    "a changed text behind the first mark": [("U1* U2* U3", (0, 0, 2)), ("U1* U4* U3", (1, 1, 2))],
    "a changed text before all marks": [("U1 U2* U3* U9", (0, 0, 3)), ("U4 U2* U3* U9", (0, 0, 3))],
    "four marks": [("U1* U2* U3* U4* U5", (0, 0, 4)), ("U1* U2* U3* U4* U5", (4, 4, 4))],
    "the highest hit counts": [
        ("U1* U2 U3* U4", (0, 0, 3)),
        ("U1* U2 U3 U4", (1, 1, 1)),
        ("U1* U2* U3* U4", (3, 3, 3)),
    ],
    "two prompts share a beginning": [
        ("S1* U1* U9", (0, 0, 2)),
        ("S1* U2* U9", (1, 1, 2)),
        ("S1* U1* U9", (2, 2, 2)),
    ],
    # items 1, 6, 7: lifetimes
    "an hour": [("U1*h U2", (0, 1, 1)), ("U1*h U3", (1, 1, 1))],
    "an hour, then 5 minutes": [("U1*h U2* U3", (0, 1, 2)), ("U1*h U2* U3", (2, 2, 2))],
    "the last mark of an hour counts": [("U1*h U2*h U3", (0, 2, 2)), ("U1*h U2*h U4* U3", (2, 2, 3))],
    "A, B and C apart": [("U1*h U9", (0, 1, 1)), ("U1*h U2*h U3* U4", (1, 2, 3))],
    "a hit behind the mark of an hour": [("U1* U2* U3", (0, 0, 2)), ("U1*h U2* U3", (2, 2, 2))],
    "a hit behind it, and more to write": [("U1*h U2* U3", (0, 1, 2)), ("U1*h U2* U4* U5", (2, 2, 3))],
    "an hour's mark reads a 5-minute entry": [("U1* U2", (0, 0, 1)), ("U1*h U3", (1, 1, 1))],
    "a 5-minute mark reads an hour's entry": [("U1*h U2", (0, 1, 1)), ("U1* U3", (1, 1, 1))],
    "all four for an hour": [("T1*h S1*h U1*h U2*h U3", (0, 4, 4)), ("T1*h S1*h U1*h U2*h U3", (4, 4, 4))],
    # item 3: lookback
    "19 blocks back is found": [("U1* U2", (0, 0, 1)), (far(19), (1, 1, 20))],
    "20 blocks back is not": [("U1* U2", (0, 0, 1)), (far(20), (0, 0, 21))],
    "a mark between bridges them": [("U1* U2", (0, 0, 1)), (far(20, mark_at=10), (1, 1, 21))],
    "25 calls are one position, their results another": [("U1* U2", (0, 0, 1)), (PARALLEL, (1, 1, 53))],
    "lookback crosses messages": [("U1 +5m", (0, 0, 1)), ("U1 A1' U2' A2' U3' A3' U4* U9", (1, 1, 7))],
    "lookback crosses into the tools": [("T1* U1", (0, 0, 1)), ("T1 S1 U1* U2", (1, 1, 3))],
    # item 5: the minimum
    "a short prefix is ignored": [("U1'* U2", (0, 0, 0)), ("U1'* U2", (0, 0, 0))],
    "a short first mark, a long second": [("U1'* U2* U3", (0, 0, 2)), ("U1'* U2* U3", (2, 2, 2))],
    "a short mark of an hour before 5 minutes": [("U1'*h U2* U3", (0, 0, 2))],
    "a short block at a long position": [("U1 U2'* U3", (0, 0, 2)), ("U1 U2'* U4", (2, 2, 2))],
    # item 2: the top-level mark
    "top-level: the last block": [("U1 U2 +5m", (0, 0, 2)), ("U1 U2 +5m", (2, 2, 2))],
    "top-level: for an hour": [("U1 +1h", (0, 1, 1)), ("U1 A1 U2 +1h", (1, 3, 3))],
    "top-level: a conversation": [
        ("U1 +5m", (0, 0, 1)),
        ("U1 A1 U2 +5m", (1, 1, 3)),
        ("U1 A1 U2 A2 U3 +5m", (3, 3, 5)),
    ],
    "top-level beside marks": [("S1* U1 +5m", (0, 0, 2)), ("S1* U2 +5m", (1, 1, 2))],
    "top-level after an hour": [("S1*h U1 +5m", (0, 1, 2)), ("S1*h U1 +5m", (2, 2, 2))],
    "top-level on a block so marked": [("U1* +5m", (0, 0, 1))],
    "top-level as one of four": [("U1* U2* U3* U4 +5m", (0, 0, 4))],
    "top-level on the fourth of four": [("U1* U2* U3* U4* +5m", (0, 0, 4))],
    "top-level skips empty text": [("U1 E +5m", (0, 0, 1)), ("U1* U2", (1, 1, 1))],
    "top-level skips thinking": [("U1 A1 H1 +5m", (0, 0, 2)), ("U1 A1* U2", (2, 2, 2))],
    "top-level on a tool result": [("U1 C1 R1 +5m", (0, 0, 3)), ("U1 C1 R1* A2 U2", (3, 3, 3))],
    # items 3, 10: tools, system, messages, and what a change makes unreadable
    "tools": [("T1* U1", (0, 0, 1)), ("T1* U2", (1, 1, 1)), ("T1* S1 U1", (1, 1, 1))],
    "system": [("S1 S2* U1", (0, 0, 2)), ("S1 S2* U2", (2, 2, 2))],
    "all three": [("T1 T2* S1* U1* U2", (0, 0, 4)), ("T1 T2* S1* U1* U2", (4, 4, 4))],
    "a changed tool changes everything": [(COLD, (0, 0, 3)), ("T2* S1* U1* U9", (0, 0, 3))],
    "a changed second tool": [("T1* T2* S1* U1", (0, 0, 3)), ("T1* T3* S1* U1", (1, 1, 3))],
    "a tool more": [(COLD, (0, 0, 3)), ("T1* T2 S1* U1* U9", (1, 1, 4))],
    "tools in another order": [("T1 T2* U1", (0, 0, 2)), ("T2 T1* U1", (0, 0, 2))],
    "no tools any more": [(COLD, (0, 0, 3)), ("S1* U1* U9", (0, 0, 2))],
    "a changed system text": [(COLD, (0, 0, 3)), ("T1* S2* U1* U9", (1, 1, 3))],
    "a changed second system text": [("S1* S2* U1", (0, 0, 2)), ("S1* S3* U1", (1, 1, 2))],
    "a changed message": [(COLD, (0, 0, 3)), ("T1* S1* U2* U9", (2, 2, 3))],
    "a changed tool choice changes messages": [
        (COLD, (0, 0, 3)),
        (f"{COLD} !none", (2, 2, 3)),
        (f"{COLD} !none", (3, 3, 3)),
        (f"{COLD} !auto", (3, 3, 3)),
    ],
    "a tool choice without a system text": [("T1* U1* U2", (0, 0, 2)), ("T1* U1* U2 !none", (1, 1, 2))],
    # conversations, tool use, documents, thinking
    "an assistant's text": [("U1 A1* U2", (0, 0, 2)), ("U1 A1* U3", (2, 2, 2)), ("U1 A2* U3", (0, 0, 2))],
    "a conversation that takes another way": [("U1* A1 U2*", (0, 0, 3)), ("U1* A2 U2*", (1, 1, 3))],
    "an answer that is begun": [("U1* A1", (0, 0, 1)), ("U1* A2", (1, 1, 1)), ("U1 A1*", (1, 1, 2))],
    "a tool call": [("T1 U1 C1* R11", (0, 0, 3)), ("T1 U1 C1* R12", (3, 3, 3)), ("T1 U1 C1* R11", (3, 3, 3))],
    "a text and a call": [("U1 A1* C1* R1", (0, 0, 3)), ("U1 A1* C2* R2", (2, 2, 3))],
    "a tool result": [("T1 U1 C1 R1*", (0, 0, 4)), ("T1 U1 C1 R1* A2 U2*", (4, 4, 6))],
    "two calls, two results, a text": [("T1 U1 C1 C2 R1 R2* U2", (0, 0, 6)), ("T1 U1 C1 C2 R1 R2* U3", (6, 6, 6))],
    "a changed result": [("U1 C1* R11*", (0, 0, 3)), ("U1 C1* R12*", (2, 2, 3))],
    "a document": [("D1* U1", (0, 0, 1)), ("D1* U2", (1, 1, 1)), ("D2* U2", (0, 0, 1))],
    "thinking is left out": [("U1 A1 U2*", (0, 0, 3)), ("U1 H1 A1 U2*", (3, 3, 3)), ("U1 H2 A1 U2*", (3, 3, 3))],
    "thinking before a call": [("U1 H1 C1 R1*", (0, 0, 3)), ("U1 C1 R1*", (3, 3, 3))],
}


@functools.cache
def tokenizer() -> Any:
    return load_tokenizer(ModelConfig())


@pytest.fixture(scope="module")
def replica(cluster: Any) -> str:
    """Return all requests of a case go to one replica, so that what it read does not depend on what the router has
    heard.
    """
    return sorted(cluster.replicas())[0]


def send(cluster: Any, replica: str, key: str, request: dict[str, Any], **options: Any) -> Any:
    extra = {"temperature": 0, "warmkv": {"seed": 1, "replica": replica}}
    whole = {"model": cluster.config.model.name, "max_tokens": 1, **request, **options}
    return cluster.anthropic(key).messages.create(**whole, extra_body=extra)


def billed(usage: Any) -> dict[str, int]:
    creation = usage.cache_creation
    assert usage.cache_creation_input_tokens == creation.ephemeral_5m_input_tokens + creation.ephemeral_1h_input_tokens
    return {
        "read": usage.cache_read_input_tokens,
        "1h": creation.ephemeral_1h_input_tokens,
        "5m": creation.ephemeral_5m_input_tokens,
        "input": usage.input_tokens,
    }


def by_contract(request: str, bill: Bill) -> dict[str, int]:
    ends, total = positions(request, tokenizer())
    a, b, c = (([0, *ends])[number] for number in bill)
    return {"read": a, "1h": b - a, "5m": c - b, "input": total - c}


@pytest.mark.parametrize("case", CASES)
def test_what_is_billed(cluster, replica, case):
    for number, (request, bill) in enumerate(CASES[case]):
        expected = by_contract(request, bill)
        usage = send(cluster, replica, f"case: {case}", body(request)).usage
        assert billed(usage) == expected, f"request {number}: {request}"
        parts = usage.warmkv["price"]
        written = {ttl: expected[ttl] for ttl in ("5m", "1h")}
        paid = pricing.price(Usage(expected["input"], expected["read"], written, 1), cluster.config.prices)
        assert parts["write"] == pytest.approx(paid.write)
        assert (parts["read"], parts["total"]) == pytest.approx((paid.read, paid.total))
        reused = usage.warmkv["cached_tokens"]
        assert sum(usage.warmkv["tiers"].values()) == reused
        again = cluster.config.prefix_cache.block_size if cluster.config.engine.kind == "vllm" else 0
        assert reused >= expected["read"] - again  # vLLM computes what is less than a block once more


def test_tenants_read_nothing_of_each_other(cluster, replica):
    request = "T1* S1* U1* U2"
    for key in ("tenant one", "tenant two"):
        usage = send(cluster, replica, key, body(request)).usage
        assert billed(usage) == by_contract(request, (0, 0, 3))
        assert usage.warmkv["cached_tokens"] == 0


def test_prewarming_answers_nothing_and_writes(cluster, replica):
    message = send(cluster, replica, "prewarmed", body("S1*h U1* U2"), max_tokens=0)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    assert billed(message.usage) == by_contract("S1*h U1* U2", (0, 1, 2))
    assert billed(send(cluster, replica, "prewarmed", body("S1*h U1* U3")).usage) == by_contract(
        "S1*h U1* U3", (2, 2, 2)
    )


def test_a_stream_says_what_is_billed_from_its_start(cluster, replica):
    request = "T1* U1* U2"
    extra = {"temperature": 0, "warmkv": {"replica": replica, "ignore_eos": True}}
    with cluster.anthropic("streamed").messages.stream(
        model=cluster.config.model.name, max_tokens=5, **body(request), extra_body=extra
    ) as stream:
        events = [event for event in stream if event.type != "ping"]
        final = stream.get_final_message()
    kinds = [kind for kind, _ in itertools.groupby(event.type for event in events if event.type != "text")]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0].message
    assert (start.content, start.stop_reason) == ([], None)
    assert billed(start.usage) == billed(final.usage) == by_contract(request, (0, 0, 2))
    assert final.usage.output_tokens == 5
    assert final.stop_reason == "max_tokens"
    assert "price" not in start.usage.warmkv
    price = final.usage.output_tokens_details.warmkv["price"]
    assert price["output"] == pytest.approx(5 * cluster.config.prices.output / 1e6)


def test_parallel_requests_all_write_and_later_ones_read(cluster, replica):
    """Let them come while the first is computed. One that comes later, on a busy machine, reads already."""
    given = " ".join(f"U{i}" for i in range(10, 38)) + "* U1"
    clients = [cluster.anthropic("parallel") for _ in range(4)]
    barrier = Barrier(len(clients))
    options: dict[str, Any] = {"model": cluster.config.model.name, "max_tokens": 1, **body(given)}

    def ask(client: Any) -> Any:
        client.models.list()  # the connection is open before they start
        barrier.wait()
        return client.messages.create(**options, extra_body={"warmkv": {"replica": replica}}).usage

    with ThreadPoolExecutor(len(clients)) as pool:
        usages = list(pool.map(ask, clients))
    writes, reads = by_contract(given, (0, 0, 28)), by_contract(given, (28, 28, 28))
    found = [billed(usage) for usage in usages]
    assert writes in found
    assert all(each in (writes, reads) for each in found)
    assert billed(send(cluster, replica, "parallel", body(given)).usage) == by_contract(given, (28, 28, 28))


def test_ten_calls_save_what_the_multipliers_say(cluster, replica):
    """The article's 50,000 + 200 tokens, ten times, save 78%; here 3,500 + 14, which the tiny model's context holds."""
    prices = cluster.config.prices

    def saving(prefix: int, rest: int) -> float:
        cached = prices.write["5m"] * prefix + rest + 9 * (prices.read * prefix + rest)
        return 1 - cached / (10 * (prefix + rest))

    def count(text: str) -> int:
        return len(tokenizer()(text, add_special_tokens=False)["input_ids"])

    document = " a" * (3500 - count("<|im_start|>user\n"))
    question = " b" * (14 - count("\n") - count("<|im_end|>\n<|im_start|>assistant\n"))
    content = [
        {"type": "text", "text": document, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": question},
    ]
    request = {"messages": [{"role": "user", "content": content}]}
    usages = [send(cluster, replica, "ten calls", request).usage for _ in range(10)]
    assert billed(usages[0]) == {"read": 0, "1h": 0, "5m": 3500, "input": 14}
    assert [billed(usage) for usage in usages[1:]] == [{"read": 3500, "1h": 0, "5m": 0, "input": 14}] * 9
    paid = sum(usage.warmkv["price"]["total"] - usage.warmkv["price"]["output"] for usage in usages)
    plain = 10 * pricing.price(Usage(input=3514), prices).total
    assert 1 - paid / plain == pytest.approx(saving(3500, 14))
    assert saving(3500, 14) == pytest.approx(saving(50_000, 200)) == pytest.approx(0.782, abs=0.0005)


def test_an_answer_goes_back_as_the_client_holds_it(cluster, replica):
    request = body("U1* U2")
    first = send(cluster, replica, "back", request, max_tokens=4)
    assert first.content
    request["messages"] += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "go on"}]
    second = send(cluster, replica, "back", request).usage
    assert second.cache_read_input_tokens == first.usage.cache_creation_input_tokens


def test_both_clients_count_the_same_tokens(cluster, replica):
    """The `openai` client's prompt_tokens is the total, and its cached_tokens are the full blocks that were reused."""
    total = positions("S1 U1", tokenizer())[1]
    said = [{"role": role, "content": word.text} for role, (word,) in messages("S1 U1")]
    warmkv = {"warmkv": {"replica": replica}}
    for number in range(2):
        usage = (
            cluster.openai("counted")
            .chat.completions.create(
                model=cluster.config.model.name, max_tokens=1, messages=said, temperature=0, extra_body=warmkv
            )
            .usage
        )
        size = cluster.config.prefix_cache.block_size
        assert usage.prompt_tokens == total
        assert usage.prompt_tokens_details.cached_tokens == number * (total - 1) // size * size
    given = send(cluster, replica, "counted too", body("S1 U1")).usage
    assert given.input_tokens == total


@pytest.mark.skipif(not hasattr(Engine, "drop_prefixes"), reason="the store cannot drop a tenant's prefixes yet")
def test_a_tenant_drops_its_own_prefixes_on_all_replicas(cluster):
    request = "U1* U2"
    for name in cluster.replicas():
        for key in ("dropped", "kept"):
            send(cluster, name, key, body(request))
    answer = requests.delete(
        f"{cluster.url}/v1/warmkv/prefixes", headers={"x-api-key": "dropped"}, timeout=PATIENCE
    ).json()
    assert answer["type"] == "prefixes_dropped"
    assert answer["replicas"] == len(cluster.replicas())
    assert answer["freed_bytes"] > 0
    for name in cluster.replicas():
        assert billed(send(cluster, name, "dropped", body(request)).usage) == by_contract(request, (0, 0, 1))
        assert billed(send(cluster, name, "kept", body(request)).usage) == by_contract(request, (1, 1, 1))
