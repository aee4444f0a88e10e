"""The Messages API through the real `anthropic` client."""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import Any

import anthropic
import pytest
import requests

from tests.polling import PATIENCE, until
from tests.unit.platform.conftest import OPERATOR
from warmkv.platform.tenants import hash_key
from warmkv.policy_spec import METHODS

LONG = "def rotate(keys, angles):\n    return keys * angles.cos()\n" * 40
GREEDY = {"temperature": 0}


def ask(server: Any, content: Any, *, key: str = "alice", extra: dict[str, Any] | None = None, **more: Any) -> Any:
    options = {"max_tokens": 6, "model": server.config.model.name, **more}
    body = {**GREEDY, **(extra or {})}
    return server.anthropic(key).messages.create(
        messages=[{"role": "user", "content": content}], extra_body=body, **options
    )


def marked(text: str, ttl: str | None = None) -> dict[str, Any]:
    control = {"type": "ephemeral", **({"ttl": ttl} if ttl else {})}
    return {"type": "text", "text": text, "cache_control": control}


def plain(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_a_whole_message(server):
    message = ask(server, "Hello")
    assert message.type == "message"
    assert message.role == "assistant"
    assert message.stop_reason in ("end_turn", "max_tokens")
    usage = message.usage
    assert usage.input_tokens > 0
    assert 0 < usage.output_tokens <= 6
    assert usage.cache_read_input_tokens == usage.cache_creation_input_tokens == 0
    assert usage.warmkv["policy"] == "full"
    parts = usage.warmkv["price"]
    written = sum(parts["write"].values())
    assert parts["total"] == pytest.approx(parts["input"] + parts["read"] + written + parts["output"])


def test_a_stream_says_what_the_whole_message_says(server):
    whole = ask(server, "Once upon a time", max_tokens=12)
    with server.anthropic().messages.stream(
        model=server.config.model.name,
        max_tokens=12,
        messages=[{"role": "user", "content": "Once upon a time"}],
        extra_body=GREEDY,
    ) as events:
        kinds = [event.type for event in events]
        final = events.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens == whole.usage.input_tokens


def test_write_then_read_at_a_breakpoint(server):
    first = ask(server, [marked(LONG), plain("one?")], key="reader").usage
    second = ask(server, [marked(LONG), plain("two and three?")], key="reader").usage
    assert first.cache_read_input_tokens == 0
    assert first.cache_creation_input_tokens > 400
    assert first.cache_creation.ephemeral_5m_input_tokens == first.cache_creation_input_tokens
    assert second.cache_read_input_tokens == first.cache_creation_input_tokens
    assert second.cache_creation_input_tokens == 0
    total = second.input_tokens + second.cache_read_input_tokens
    counted = server.anthropic("reader").messages.count_tokens(
        model=server.config.model.name,
        messages=[{"role": "user", "content": [plain(LONG), plain("two and three?")]}],
    )
    assert counted.input_tokens == total
    assert second.warmkv["cached_tokens"] == second.cache_read_input_tokens


def test_two_lifetimes_are_billed_apart(server):
    usage = ask(server, [marked(LONG, "1h"), marked("and " * 80), plain("?")], key="both").usage
    assert usage.cache_creation.ephemeral_1h_input_tokens > 400
    assert usage.cache_creation.ephemeral_5m_input_tokens > 60
    again = ask(server, [marked(LONG, "1h"), marked("and " * 80), plain("?")], key="both").usage
    assert again.cache_read_input_tokens == usage.cache_creation_input_tokens


def test_a_conversation_reads_what_the_turn_before_wrote(server):
    client, model = server.anthropic("talk"), server.config.model.name
    history: list[Any] = [{"role": "user", "content": LONG + "Question?"}]
    control = {"type": "ephemeral"}
    first = client.messages.create(
        model=model, max_tokens=6, messages=history, cache_control=control, extra_body=GREEDY
    )
    text = first.content[0].text if first.content else "nothing"
    history += [{"role": "assistant", "content": text}, {"role": "user", "content": "And more?"}]
    second = client.messages.create(
        model=model, max_tokens=6, messages=history, cache_control=control, extra_body=GREEDY
    )
    assert first.usage.cache_creation_input_tokens > 400
    assert second.usage.cache_read_input_tokens == first.usage.cache_creation_input_tokens
    assert second.usage.cache_creation_input_tokens > 0


def test_a_short_prefix_is_not_cached_and_nothing_is_said(server):
    usage = ask(server, [marked("short"), plain("?")], key="short").usage
    assert usage.cache_creation_input_tokens == usage.cache_read_input_tokens == 0


def test_tenants_share_nothing(server):
    ask(server, [marked(LONG + "secret"), plain("?")], key="first tenant")
    other = ask(server, [marked(LONG + "secret"), plain("?")], key="second tenant").usage
    assert other.cache_read_input_tokens == 0
    assert other.warmkv["cached_tokens"] == 0


@pytest.mark.parametrize("policy", ["full", "snapkv@0.2", "snapkv@64", "streaming_llm@0.3"])
def test_a_cached_prefix_never_changes_the_answer(server, policy):
    extra = {"warmkv": {"policy": policy}}
    fresh = ask(server, [marked(LONG), plain("What next?")], key=f"cold {policy}", extra=extra, max_tokens=16)
    ask(server, [marked(LONG), plain("Something else")], key=f"warm {policy}")
    warm = ask(server, [marked(LONG), plain("What next?")], key=f"warm {policy}", extra=extra, max_tokens=16)
    assert warm.usage.cache_read_input_tokens > 0
    assert [block.text for block in warm.content] == [block.text for block in fresh.content]
    assert warm.usage.warmkv["policy"] == policy


@pytest.mark.parametrize(
    "policy",
    [
        *(f"{name}@0.2" if method.has_budget else name for name, method in METHODS.items()),
        *("snapkv@128+ring+kivi4", "h2o@0.3+turbo3+protect", "full+fp8", "snapkv@0.2+shots"),
    ],
)
def test_every_policy_is_served_on_request(server, policy):
    extra = {"warmkv": {"policy": policy}}
    answer = ask(server, [marked(LONG), plain("What next?")], key="every policy", extra=extra, max_tokens=6)
    assert answer.usage.output_tokens > 0
    assert answer.usage.warmkv["policy"] == policy
    assert answer.usage.warmkv["kept_tokens"] > 0
    assert answer.usage.warmkv["resident_bytes"] > 0


def test_compression_frees_memory(server):
    resident = {
        policy: ask(server, LONG, extra={"warmkv": {"policy": policy}}).usage.warmkv["resident_bytes"]
        for policy in ("full", "snapkv@0.1")
    }
    assert resident["snapkv@0.1"] < 0.25 * resident["full"]


def test_prewarming_returns_nothing_and_writes(server):
    message = ask(server, [marked(LONG), plain("x")], key="prewarm", max_tokens=0)
    assert message.content == []
    assert message.stop_reason == "max_tokens"
    assert message.usage.cache_creation_input_tokens > 0
    assert ask(server, [marked(LONG), plain("y")], key="prewarm").usage.cache_read_input_tokens > 0


def test_stop_sequences_end_the_answer_before_them(server):
    question = "# the code of harbor is 4821\nWhat is the code of harbor?"
    text = ask(server, question, max_tokens=30).content[0].text
    stop = text[len(text) // 2 :][:3]
    message = ask(server, question, max_tokens=30, stop_sequences=[stop, "never in it"])
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == stop
    assert message.content[0].text == text[: text.index(stop)]


def test_a_seed_gives_the_same_answer(server):
    def draw(seed: int) -> str:
        extra = {"temperature": 1.0, "warmkv": {"seed": seed}}
        return ask(server, "def main():", max_tokens=20, extra=extra).content[0].text

    assert draw(5) == draw(5)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_an_answer_can_be_begun_for_the_model(server):
    client = server.anthropic()
    message = client.messages.create(
        model=server.config.model.name,
        max_tokens=4,
        messages=[{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two,"}],
        extra_body=GREEDY,
    )
    assert message.usage.output_tokens > 0


def document(text: str) -> dict[str, Any]:
    return {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}}


def test_a_text_document_is_read(server):
    as_document = ask(server, [document(LONG), plain("?")])
    as_text = ask(server, [plain(LONG), plain("?")])
    assert as_document.usage.warmkv["kept_tokens"] == as_text.usage.warmkv["kept_tokens"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "too many marks",
        {"content": [marked("a")] * 5},
        "A maximum of 4 blocks with cache_control may be provided. Found 5",
    ),
    ("unknown lifetime", {"content": [marked("a", "2h")]}, "ttl"),
    ("longer after shorter", {"content": [marked("a"), marked("b", "1h")]}, "must not come after"),
    ("empty marked text", {"content": [marked("")]}, "empty text"),
    ("temperature", {"content": "x", "extra": {"temperature": 1.5}}, "temperature"),
    ("context", {"content": "x " * 9000}, r"prompt is too long: 9001 tokens > 4096 maximum"),
    (
        "server tool",
        {"content": "x", "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "this server runs no tools",
    ),
    ("image", {"content": [{"type": "image", "source": {"type": "url", "url": "http://x/"}}]}, "image"),
    ("policy", {"content": "x", "extra": {"warmkv": {"policy": "snapkv@2.0"}}}, "share"),
    ("no blocks", {"content": []}, "content"),
    ("empty stop", {"content": "x", "stop_sequences": [""]}, "stop_sequences"),
    (
        "huge kernel",
        {"content": "x", "extra": {"warmkv": {"policy": {"name": "snapkv", "kernel": 2**70 + 1}}}},
        "kernel",
    ),
    ("knob of another", {"content": "x", "extra": {"warmkv": {"policy": {"name": "full", "window": 8}}}}, "window"),
    ("budget in words", {"content": "x", "extra": {"warmkv": {"policy": {"name": "snapkv", "budget": 1}}}}, "1.0"),
]


@pytest.mark.parametrize(("content", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_is_refused_and_why(server, content, message):
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        ask(server, **content)
    body = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert caught.value.response.headers["request-id"] == body["request_id"]


def test_typed_errors_of_other_kinds(serve, server):
    with pytest.raises(anthropic.NotFoundError, match="gpt"):
        ask(server, "x", model="gpt")
    assert requests.get(f"{server.url}/v1/nothing", timeout=PATIENCE).json()["error"]["type"] == "not_found_error"
    assert (
        requests.get(f"{server.url}/v1/messages", timeout=PATIENCE).json()["error"]["type"] == "invalid_request_error"
    )
    assert requests.post(f"{server.url}/v1/messages", data=b"{", timeout=PATIENCE).status_code == 400
    strict = serve(
        f"gateway.tenants=[{{name: team, key_sha256: {hash_key('right')}, rights: [policy]}}]",
        "gateway.max_body_bytes=2000",
        "compression.allow_request_policy=false",
        "engine.max_queue=1",
        "engine.max_slots=1",
        "engine.threads=1",
    )
    with pytest.raises(anthropic.AuthenticationError):
        ask(strict, "x", key="wrong")
    assert ask(strict, "x", key="right").usage.output_tokens > 0
    with pytest.raises(anthropic.PermissionDeniedError):
        strict.anthropic("right").get("/v1/warmkv/replicas", cast_to=object)
    with pytest.raises(anthropic.PermissionDeniedError):
        strict.anthropic("right").get("/v1/warmkv/memory", cast_to=object)
    with pytest.raises(anthropic.RequestTooLargeError, match="max_body_bytes"):
        ask(strict, "x" * 3000, key="right")
    with pytest.raises(anthropic.PermissionDeniedError, match="allow_request_policy"):
        ask(strict, "x", key="right", extra={"warmkv": {"policy": "snapkv"}})


def test_a_full_queue_is_overloaded(serve):
    busy = serve("engine.max_queue=1", "engine.max_slots=1", "engine.threads=1")
    gate = threading.Event()
    busy.engine.call(gate.wait)  # the engine's thread stands still, so the queue is what the test makes it
    until(lambda: busy.engine._inbox._queue.empty())
    threads = [threading.Thread(target=lambda: ask(busy, "for the slot, and to wait")) for _ in range(2)]
    try:
        for number, thread in enumerate(threads):
            thread.start()
            until(lambda number=number: busy.engine._inbox.arriving == number + 1)
        with pytest.raises(anthropic.APIStatusError) as caught:
            ask(busy, "one too many")
    finally:
        gate.set()
    assert caught.value.status_code == 529
    assert caught.value.body["error"]["type"] == "overloaded_error"
    assert caught.value.response.headers["retry-after"]
    for thread in threads:
        thread.join(PATIENCE)
    assert ask(busy, "later").usage.output_tokens > 0


def test_a_client_that_leaves_frees_its_slot(server):
    body = {"model": server.config.model.name, "prompt": "def f(", "max_tokens": 3000, "stream": True}
    with server.standing_still(tokens=5):
        response = requests.post(
            f"{server.url}/v1/completions", json={**body, "warmkv": {"ignore_eos": True}}, stream=True, timeout=PATIENCE
        )
        lines = response.iter_lines()  # held on to: the connection closes with it
        next(lines)
        until(lambda: server.engine.stats().decoding == 1)
        before = len(server.records)
        response.close()
        until(lambda: len(server.records) > before, "the request is recorded")
    assert server.records[-1].status == "cancelled"
    until(lambda: server.engine.stats().decoding == 0)
    assert 0 < server.records[-1].output_tokens < 3000


def test_ttl_is_counted_from_the_last_read(serve):
    now = [0.0]
    server = serve("engine.threads=1", clock=lambda: now[0])

    def read() -> int:
        usage = ask(server, [marked(LONG), plain("?")]).usage
        return usage.cache_read_input_tokens

    assert read() == 0
    for later in (200.0, 450.0):
        now[0] = later
        assert read() > 0
    now[0] = 760.0
    assert read() == 0


def test_every_request_is_recorded(server):
    before = len(server.records)
    usage = ask(server, [marked(LONG), plain("logged?")], key="log").usage
    record = server.records[before]
    assert (record.api, record.status, record.policy, record.replica) == ("messages", "ok", "full", "only")
    assert record.input_tokens == record.usage.prompt == usage.input_tokens + usage.cache_creation_input_tokens
    assert record.output_tokens == usage.output_tokens
    assert len(record.hashes) == record.input_tokens // 64
    assert [mark.position for mark in record.marks] == [usage.cache_creation_input_tokens]
    assert 0 < record.ttft <= record.e2e
    assert type(record).from_json(record.to_json()) == record
    counted = {(name, labels.get("kind")): value for name, value, labels in server.metrics.seen[-14:]}
    assert counted["warmkv_tokens", "input"] == usage.input_tokens
    assert counted["warmkv_tokens", "write_5m"] == usage.cache_creation_input_tokens
    ask(server, [marked(LONG), plain("again?")], key="log")
    labels = {"tier": "device", "ttl": "5m", "policy": "full", "model": "tiny", "tenant": "open"}
    cached = [
        value for name, value, those in server.metrics.seen[-14:] if (name, those) == ("warmkv_cached_tokens", labels)
    ]
    assert cached == [server.records[-1].cached_tokens]


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(server):
    begun = len(server.requests)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum \(at least"):
        ask(server, "x" * 2_000_000)
    assert len(server.requests) == begun


def test_what_count_tokens_takes_is_what_a_message_takes(server):
    counted = server.anthropic().messages.count_tokens(
        model=server.config.model.name,
        messages=[{"role": "user", "content": "Hello"}],
        cache_control={"type": "ephemeral"},
        thinking={"type": "disabled"},
        tools=[],
    )
    assert counted.input_tokens == ask(server, "Hello").usage.input_tokens


def test_models_and_health(server):
    name = server.config.model.name
    assert [model.id for model in server.anthropic().models.list().data] == [name]
    assert server.anthropic().models.retrieve(name).id == name
    for path in ("health", "healthz"):  # guidellm asks for the first, without a key
        assert requests.get(f"{server.url}/{path}", timeout=PATIENCE).json()["status"] == "ok"


def test_memory_is_told_by_use_with_its_limits(server):
    ask(server, [marked(LONG), plain("?")], key="memory")
    asked = urllib.request.Request(f"{server.url}/v1/warmkv/memory", headers=OPERATOR)
    with urllib.request.urlopen(asked) as response:
        (memory,) = json.load(response)["replicas"].values()
    uses = [memory[f"{use}_bytes"] for use in ("weight", "slot", "workspace", "store", "step")]
    assert memory["total_bytes"] == sum(uses)
    assert memory["store_bytes"] > 0
    assert memory["weight_bytes"] == server.engine.stats().weight_bytes > 1_000_000
    plan, planned = memory["plan"], server.engine.memory
    assert memory["limits"]["engine.kv_bytes"] == planned.kv.bytes == server.engine.scheduler.kv.bytes
    assert plan["given"]["bytes"] == sum(line["bytes"] for line in plan["lines"]) + plan["left_bytes"]
    assert {line["name"]: line["bytes"] for line in plan["lines"]}["weights"] == memory["weight_bytes"]
    assert memory["allocator_bytes"] is None  # a CPU keeps no account


def test_a_stream_that_loses_its_replica_is_the_same_to_its_client(server):
    """The tokens, the text, the usage and the bill; the access log names it once, with the replica it began on."""

    def stream() -> Any:
        with server.anthropic().messages.stream(
            model=server.config.model.name,
            max_tokens=20,
            messages=[{"role": "user", "content": [marked(LONG), plain("What turns?")]}],
            extra_body={**GREEDY, "warmkv": {"ignore_eos": True, "policy": "snapkv@0.3"}},
        ) as events:
            return events.get_final_message()

    stream()  # both that are compared find the prefix warm
    before = stream()
    lines = len(server.records)
    server.faults += [3, 0, 8]
    after = stream()
    assert server.faults == []
    assert after.content == before.content
    for usage in (before.usage, after.usage):
        for name in ("queue_seconds", "prefill_seconds", "ttft_seconds"):
            assert usage.warmkv.pop(name) >= 0
    assert after.usage == before.usage
    assert len(server.records) == lines + 1
    assert server.records[-1].output_tokens == 20
    assert [value for name, value, labels in server.metrics.seen if name == "warmkv_retried"] == [1, 1, 1]


def test_a_whole_message_loses_its_replica_unnoticed(server):
    whole = ask(server, "Hello", max_tokens=20)
    server.faults += [4, 5]
    assert ask(server, "Hello", max_tokens=20).content == whole.content


def test_what_cannot_be_continued_ends_with_the_error_event(server):
    server.faults += [3] * (1 + server.config.gateway.retries)
    seen = []
    with server.anthropic().messages.stream(
        model=server.config.model.name,
        max_tokens=200,
        messages=[{"role": "user", "content": "Hello"}],
        extra_body={**GREEDY, "warmkv": {"ignore_eos": True}},
    ) as events:
        types = (seen.append(event.type) for event in events)
        with pytest.raises(anthropic.APIStatusError, match="ConnectionError"):
            list(types)
    assert "text" in seen
    assert "message_stop" not in seen
    assert server.records[-1].status == "error"


def test_what_has_not_begun_is_an_error_of_its_own_if_every_replica_fails(server):
    server.faults += [0] * (1 + server.config.gateway.retries)
    with pytest.raises(anthropic.InternalServerError, match="ConnectionError"):
        ask(server, "Hello")
