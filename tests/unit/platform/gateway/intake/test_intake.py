"""Bodies: every limit by its name, slow and large ones, threads, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clocks import SkippingLoop, run, skip
from tests.polling import PATIENCE
from tests.unit.platform.exchanges import Exchange, Gateway, arrival, chat, message, until
from warmkv.config import GatewayConfig
from warmkv.platform import json_values
from warmkv.platform.gateway.apis.errors import ApiError
from warmkv.platform.gateway.apis.messages.requests import MessagesRequest
from warmkv.platform.gateway.apis.openai.requests import ChatRequest
from warmkv.platform.gateway.apis.responses.requests import ResponsesRequest
from warmkv.platform.gateway.apis.schema import parse
from warmkv.platform.gateway.apis.tokens import SLICE, Piece, slices
from warmkv.platform.gateway.intake import body as intake_body
from warmkv.platform.gateway.intake.body import Budget, Lane
from warmkv.platform.gateway.intake.body_limits import BodyLimits
from warmkv.platform.gateway.intake.parsing import Parsing
from warmkv.platform.tenants import hash_key
from warmkv.replicas.loading.tokenizer import load_tokenizer

SAID = {"role": "user", "content": "x"}
WHOLE = {"model": "tiny", "max_tokens": 1, "messages": [SAID]}
TOOL = {"name": "t", "input_schema": {"type": "object"}}
BLOCK = {"type": "text", "text": "x"}


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def said(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


DEFAULT = BodyLimits.of(GatewayConfig())
LIMITS = [
    ("values", 40, {"metadata": {"a": [0] * 20}}, {"metadata": {"a": [0] * 40}}),
    ("messages", 3, {"messages": [SAID] * 3}, {"messages": [SAID] * 4}),
    ("blocks", 3, {"messages": [said(BLOCK), said(BLOCK, BLOCK)]}, {"messages": [said(BLOCK, BLOCK)] * 2}),
    ("tools", 1, {"tools": [TOOL]}, {"tools": [TOOL, {**TOOL, "name": "u"}]}),
    ("stop_characters", 5, {"stop_sequences": ["abc", "de"]}, {"stop_sequences": ["abc", "def"]}),
]


@pytest.mark.parametrize(("limit", "most", "inside", "beyond"), LIMITS, ids=[case[0] for case in LIMITS])
def test_a_limit_is_refused_with_its_number_and_takes_what_it_allows(limit, most, inside, beyond):
    limits = replace(DEFAULT, **{limit: most})
    parse(json.dumps({**WHOLE, **inside}).encode(), MessagesRequest, limits)
    with pytest.raises(ApiError, match=rf"are more than {most}, .* gateway\.max_body_bytes") as caught:
        parse(json.dumps({**WHOLE, **beyond}).encode(), MessagesRequest, limits)
    assert caught.value.status == 400


def test_limits_follow_from_the_largest_body_and_small_ones_may_have_any_structure():
    assert BodyLimits(524_288, 104_857, 209_715, 10_485, 17_476) == DEFAULT
    assert BodyLimits.of(GatewayConfig(max_body_bytes=128 << 20)).values == 4 * DEFAULT.values
    assert BodyLimits.of(GatewayConfig(max_body_bytes=1000)) == BodyLimits(500_000, 100_000, 200_000, 10_000, 16_666)


def test_the_parser_s_depth_is_refused():
    parse(json.dumps({**WHOLE, "metadata": nested_object(198)}).encode(), MessagesRequest, DEFAULT)
    with pytest.raises(ApiError, match="nested deeper than 200"):
        parse(json.dumps({**WHOLE, "metadata": nested_object(199)}).encode(), MessagesRequest, DEFAULT)


def nested_object(levels: int) -> Any:
    return {"a": nested(levels)}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1E+400", "1" + "0" * 400 + ".0"])
def test_numbers_that_are_not_finite_are_no_json(number):
    """Refuse them, since the Responses API tells the tools again and could not write its answer."""
    tool = '{"type": "function", "name": "f", "parameters": {"properties": {"x": [0, {"maximum": %s}]}}}'
    body = '{"model": "tiny", "input": "x", "tools": [' + tool + "]}"
    with pytest.raises(ApiError, match="Invalid JSON"):
        parse((body % number).encode(), ResponsesRequest, DEFAULT)
    for taken in ("1e308", "1e-999", "1" + "0" * 400, '"1e999"'):
        parse((body % taken).encode(), ResponsesRequest, DEFAULT)


def test_text_is_no_structure():
    text = '{[,:]}"\\' * 1000
    said = {**WHOLE, "messages": [{"role": "user", "content": text}]}
    assert parse(json.dumps(said).encode(), MessagesRequest, replace(DEFAULT, values=40))
    assert b"".join(json_values.outside_strings(json.dumps({"a": [text, {}]}).encode())) == b"{: [, {}]}"
    assert b"".join(json_values.outside_strings(b'[1, "open \\')) == b"[1, "


@given(st.recursive(st.text('a\\"[,:é\n'), lambda more: st.lists(more) | st.dictionaries(st.text('"\\{'), more)))
def test_escapes_do_not_end_strings(value):
    data = json.dumps(value).encode()
    pieces = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", data)
    assert b"".join(json_values.outside_strings(data)) == pieces


def test_values_are_counted_as_far_as_the_limit(monkeypatch):
    """What follows is not read: a body of empty strings alone took seconds."""
    counted: list[int] = []
    count = json_values._separators
    monkeypatch.setattr(json_values, "_separators", lambda data: counted.append(len(data)) or count(data))
    with pytest.raises(ApiError, match="JSON values are more than 5000"):
        parse(b"[" + b'"",' * 200_000 + b"0]", MessagesRequest, replace(DEFAULT, values=5000))
    assert sum(counted[1:]) < 20_000


@pytest.mark.parametrize("model", [MessagesRequest, ChatRequest, ResponsesRequest])
@pytest.mark.parametrize(
    "body",
    [
        {"messages": [0] * 50_000},
        {"messages": [{"role": "user", "content": [0] * 50_000}]},
        {f"unknown{number}": 0 for number in range(20_000)},
        {"messages": [{"role": "user", "content": "x", **{f"unknown{number}": 0 for number in range(20_000)}}]},
        {"logit_bias": {f"{number}": "x" for number in range(20_000)}},
        {"metadata": {f"{number}": [] for number in range(20_000)}},
        {"chat_template_kwargs": {f"{number}": [] for number in range(20_000)}},
        {"warmkv": {"chat_template_kwargs": {f"{number}": [] for number in range(20_000)}}},
        {"warmkv": {"policy": {f"knob{number}": 0 for number in range(20_000)}}},
        {"warmkv": {"policy": "snapkv" * 20_000}},
        {"model": "x" * 100_000, "tools": [{"name": "a" * 100_000}]},
    ],
)
def test_a_refusal_costs_little_however_many_faults_there_are(model, body):
    """In memory a small multiple of the body; its message is bounded, too."""
    data = json.dumps(body).encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as caught:
            parse(data, model, DEFAULT)
        assert tracemalloc.get_traced_memory()[1] < 40 * len(data)
    finally:
        tracemalloc.stop()
    assert caught.value.status == 400
    assert len(caught.value.message) <= 1000


@pytest.mark.parametrize("field", ["metadata", "chat_template_kwargs"])
def test_an_object_of_16_entries_is_taken_and_one_of_17_refused(field):
    model, said = (ResponsesRequest, {"input": "x"}) if field == "metadata" else (ChatRequest, {"messages": [SAID]})
    body = {"model": "tiny", **said, field: {f"{number}": "x" for number in range(16)}}
    assert len(getattr(parse(json.dumps(body).encode(), model, DEFAULT), field)) == 16
    body[field]["more"] = "x"
    with pytest.raises(ApiError, match=f"{field}: at most 16 entries, not 17"):
        parse(json.dumps(body).encode(), model, DEFAULT)


def test_the_first_unknown_field_is_the_one_that_is_named():
    data = json.dumps({"model": "tiny", "messages": [SAID], "max_tokens": 1, "zero": None, "one": 1, "two": 2}).encode()
    for model in (MessagesRequest, ChatRequest):
        with pytest.raises(ApiError, match=r"^one: "):  # null is the same as leaving a field out
            parse(data, model, DEFAULT)


def test_a_body_that_is_too_large_is_refused_by_its_header_unread(tmp_path):
    async def run() -> None:
        gateway = Gateway(tmp_path, "gateway.max_body_bytes=100")
        whole = await Exchange(gateway, "/v1/messages", headers={"content-length": "101"}).whole()
        assert (whole.status, whole.json["error"]["type"]) == (413, "request_too_large")
        in_pieces = Exchange(gateway, "/v1/messages")
        for _ in range(11):
            in_pieces.send(b" " * 10, last=False)
        assert (await in_pieces.whole()).status == 413
        assert "gateway.max_body_bytes" in in_pieces.error

    asyncio.run(run())


def test_bodies_share_a_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(intake_body, "LARGEST_BODIES", 1)

    async def run() -> None:
        gateway = Gateway(tmp_path, "gateway.max_body_bytes=1000")
        slow = [Exchange(gateway, "/v1/messages", headers={"x-api-key": key}) for key in ("a", "b")]
        for exchange in slow:
            exchange.send(b" " * 400, last=False)
        await asyncio.sleep(0)
        refused = await Exchange(gateway, "/v1/chat/completions", b" " * 400).whole()
        assert (refused.status, refused.json["error"]["type"]) == (529, "overloaded_error")
        assert "gateway.max_body_bytes" in refused.error
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        for exchange in slow:
            exchange.leave()
            await exchange.whole()
        assert (await Exchange(gateway, "/v1/messages", message(gateway, "x " * 150)).whole()).status == 200

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_bodies_of_one_tenant_refuse_nobody_else_s(tmp_path, monkeypatch, path):
    monkeypatch.setattr(intake_body, "LARGEST_BODIES", 2)

    async def run() -> None:
        gateway = Gateway(tmp_path, "gateway.max_body_bytes=1000")
        body = message(gateway)
        del body["max_tokens"]
        slow = Exchange(gateway, path, headers={"x-api-key": "a"})
        slow.send(b" " * 999, last=False)
        await asyncio.sleep(0)
        for key, status in (("a", 529), ("b", 200)):
            told = body if "count" in path else message(gateway)
            asked = await Exchange(gateway, path, told, {"x-api-key": key}).whole()
            assert asked.status == status, asked.body
        slow.leave()
        await slow.whole()

    asyncio.run(run())


def test_a_budget_is_given_back_and_has_half_for_one_owner_and_some_for_small_bodies(monkeypatch):
    monkeypatch.setattr(intake_body, "LARGE_BYTES", 4)
    budget = Budget(20, 5)
    with budget.share(b"a") as one, budget.share(b"b") as two, budget.share(b"b") as small:
        assert one.grow(10)
        assert not one.grow(1)
        assert two.grow(5)
        assert not two.grow(1)  # the rest is for small ones
        assert small.grow(3)
        assert not small.grow(1)  # it is none any more
        assert budget.used == 18
    assert budget.used == len(budget.used_by) == 0


@pytest.mark.parametrize("waits", [True, False])
def test_jobs_of_an_owner_wait_for_its_own_first(waits):
    """Count those, too, that nobody waits for any more and a thread works at still."""
    busy, done, seen = threading.Event(), threading.Event(), []

    async def run() -> None:
        pool = lane()
        try:
            first = asyncio.ensure_future(pool.run(b"a", lambda _: (busy.set(), done.wait(PATIENCE)), 60))
            await asyncio.to_thread(busy.wait, 60)
            if not waits:
                first.cancel()
                await asyncio.wait([first])
            jobs = [(b"a", "a second"), (b"a", "a third"), (b"b", "b first"), (b"c", "c first")]
            asked = [
                asyncio.ensure_future(pool.run(who, lambda _, what=what: seen.append(what), 60)) for who, what in jobs
            ]
            await until(lambda: pool.backlog.waiting == len(jobs) + waits)
        finally:
            done.set()
        await asyncio.gather(*asked)
        assert seen == ["b first", "c first", "a second", "a third"]
        pool.close()

    asyncio.run(run())


def test_a_slow_body_is_refused_in_time_and_pins_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(intake_body, "READ_SECONDS", 0.05)

    async def run() -> None:
        gateway = Gateway(tmp_path)
        slow = [Exchange(gateway, "/v1/messages") for _ in range(50)]
        for exchange in slow:
            exchange.send(b'{"model":', last=False)
        await asyncio.sleep(0)
        assert len(gateway.service._writers) == gateway.service.backlog.waiting == 0
        for exchange in slow:
            await exchange.whole()
            assert (exchange.status, exchange.json["error"]["type"]) == (408, "timeout_error")
            assert "did not come within 0.05 s" in exchange.error

    asyncio.run(run())


FEW = ("engine.max_slots=1", "engine.max_queue=1", "cluster.max_queued_requests=1")
"""One that decodes, one that waits for it, one that waits to be sent, and one that waits to be parsed."""


def test_more_open_requests_than_the_gateway_takes_are_refused_as_its_apis_say_it(tmp_path):
    async def run() -> None:
        gateway = Gateway(tmp_path, *FEW)
        open_ = [Exchange(gateway, "/v1/messages") for _ in range(4)]
        await asyncio.sleep(0)
        for path in ("/v1/messages", "/v1/completions", "/x/v1/warmkv/policy"):
            refused = await Exchange(gateway, path).whole()  # its body is not waited for
            assert (refused.status, refused.json["error"]["type"]) == (529, "overloaded_error")
            assert "cluster.max_queued_requests" in refused.error
            assert refused.headers["request-id"]
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        open_[0].leave()
        await open_[0].whole()
        assert (await Exchange(gateway, "/v1/messages", message(gateway)).whole()).status == 200
        for exchange in open_[1:]:
            exchange.leave()
            await exchange.whole()

    asyncio.run(run())


@pytest.fixture
def one_thread(monkeypatch):
    monkeypatch.setattr(intake_body, "THREADS", 1)


def test_operators_change_the_policy_while_tenants_fill_the_gateway(tmp_path, one_thread, monkeypatch):
    """All requests that it takes are open, its budget of bytes is spent, and its threads are busy."""
    monkeypatch.setattr(intake_body, "LARGEST_BODIES", 1)
    busy, done = threading.Event(), threading.Event()
    operator = f'gateway.operators=[{{"name": "ann", "key_sha256": "{hash_key("ann")}"}}]'
    flags = (*FEW, "gateway.max_body_bytes=100", operator)

    async def run() -> None:
        gateway = Gateway(tmp_path, *flags)
        filling = [Exchange(gateway, "/v1/messages", headers={"x-api-key": key}) for key in "abcd"]
        for exchange in filling[:2]:
            exchange.send(b" " * 50, last=False)
        try:
            working = asyncio.ensure_future(
                gateway.intake._small.run(b"", lambda _: (busy.set(), done.wait(PATIENCE)), 60)
            )
            await asyncio.to_thread(busy.wait, 60)
            assert (await Exchange(gateway, "/v1/messages").whole()).status == 529
            rollback = Exchange(gateway, "/v1/warmkv/policy/rollback", {"to": 0, "why": "calm"}, {"x-api-key": "ann"})
            assert (await rollback.whole()).status == 200, rollback.body
        finally:
            done.set()
        await working
        for exchange in filling:
            exchange.leave()
            await exchange.whole()

    asyncio.run(run())


class Tokenizer:
    """Anything that can be copied."""


def lane(threads: int = 1, waiting: int = 100) -> Lane:
    return Lane("test", threads, waiting, Tokenizer(), lambda: 0.0)


def test_every_thread_has_a_tokenizer_of_its_own():
    meeting = threading.Barrier(3)

    def work(tokenizer: Any) -> Any:
        meeting.wait(PATIENCE)
        return tokenizer

    async def run() -> None:
        pool = lane(3)
        found = await asyncio.gather(*(pool.run(b"", work, 60) for _ in range(3)))
        assert len({id(tokenizer) for tokenizer in found}) == 3
        pool.close()

    asyncio.run(run())


def test_what_takes_too_long_is_a_time_out_and_what_waits_too_long_an_overload():
    busy, done, seen = threading.Event(), threading.Event(), []

    async def scenario() -> None:
        pool = lane(waiting=1)
        try:
            working = asyncio.ensure_future(pool.run(b"", lambda _: (busy.set(), done.wait(PATIENCE)), 1000))
            await asyncio.to_thread(busy.wait, 60)
            waiting = asyncio.ensure_future(pool.run(b"", seen.append, 1000))
            await asyncio.sleep(0)
            with pytest.raises(ApiError, match=r"cluster\.max_queued_requests") as refused:
                await pool.run(b"", seen.append, 1000)
            skip(1000)
            with pytest.raises(ApiError, match="took longer than 1000 s") as late:
                await working
            with pytest.raises(ApiError, match="took longer than 1000 s") as overloaded:
                await waiting
            assert [error.value.status for error in (refused, late, overloaded)] == [529, 504, 529]
            assert refused.value.retry_after is not None
        finally:
            done.set()
        assert await pool.run(b"", lambda _: "later", 1000) == "later"
        assert pool.backlog.waiting == 0
        pool.close()

    run(scenario(), SkippingLoop)
    assert seen == []  # dropped


def test_a_client_that_leaves_is_dropped_from_the_queue(tmp_path, one_thread):
    busy, done = threading.Event(), threading.Event()

    async def run() -> None:
        gateway = Gateway(tmp_path)
        pool = gateway.intake._small
        try:
            working = asyncio.ensure_future(pool.run(b"", lambda _: (busy.set(), done.wait(PATIENCE)), 60))
            await asyncio.to_thread(busy.wait, 60)
            exchange = Exchange(gateway, "/v1/messages", message(gateway))
            await until(lambda: pool.backlog.waiting == 2)
            exchange.leave()
            await exchange.whole()
            assert pool.backlog.waiting == 1
        finally:
            done.set()
        await working
        await pool.run(b"", lambda _: None, 60)
        assert gateway.admitted == 0

    asyncio.run(run())


def test_small_bodies_do_not_wait_behind_large_ones(tmp_path, monkeypatch):
    busy, done = threading.Event(), threading.Event()

    monkeypatch.setattr(intake_body, "LARGE_BYTES", 1000)

    async def run() -> None:
        gateway = Gateway(tmp_path)
        try:
            working = asyncio.ensure_future(
                gateway.intake._large.run(b"", lambda _: (busy.set(), done.wait(PATIENCE)), 60)
            )
            await asyncio.to_thread(busy.wait, 60)
            large = Exchange(gateway, "/v1/messages", message(gateway, "x " * 1000))
            await until(lambda: gateway.intake._large.backlog.waiting == 2)
            assert (await Exchange(gateway, "/v1/messages", message(gateway)).whole()).status == 200
            assert not large.task.done()
        finally:
            done.set()
        await working
        assert (await large.whole()).status == 200

    asyncio.run(run())


class Counting:
    """A tokenizer that counts the tokens it has made."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.tokens = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        found = self._tokenizer(*arguments, **options)
        ids = found["input_ids"]
        self.tokens += sum(map(len, ids)) if ids and isinstance(ids[0], list) else len(ids)
        return found


@pytest.mark.parametrize("text", ["\ue000", "word, ", "\n", "<|im_end|>"])
def test_what_cannot_fit_is_not_tokenized_to_its_end(tmp_path, text):
    """Tokens cost hundreds of bytes each: a megabyte of private use took 600."""
    gateway, context = Gateway(tmp_path), 5000
    tokenizer = Counting(load_tokenizer(gateway.config.model))
    parsing = Parsing(gateway.service, tokenizer, context)
    long = text * (context * parsing.prompts.longest_token // len(text))
    a_slice = len(tokenizer(text * (SLICE // len(text)), split_special_tokens=True)["input_ids"])
    for take, body in (
        (parsing.message, message(gateway, [{"type": "text", "text": "hello"}, {"type": "text", "text": long}])),
        (parsing.chat, chat(gateway, messages=[{"role": "user", "content": part} for part in (long[:9], long[9:])])),
        (parsing.completion, {"model": gateway.config.model.name, "prompt": long}),
    ):
        tokenizer.tokens = 0
        with pytest.raises(ApiError, match=r"prompt is too long: \d+ tokens > 5000 maximum"):
            take(arrival(gateway.service), json.dumps(body).encode(), tokenizer)
        assert tokenizer.tokens <= 2 * context + 2 * a_slice


def test_slices_are_all_of_the_texts():
    texts = ["a" * (2 * SLICE + 5), "", "b", "c" * SLICE]
    groups = [[piece.text for piece in group] for group in slices([Piece(text, "content") for text in texts])]
    assert "".join(map("".join, groups)) == "".join(texts)
    assert [sum(map(len, group)) for group in groups] == [SLICE, SLICE, 6, SLICE]


def test_a_prompt_that_fits_is_taken_whatever_its_bytes(tmp_path):
    """Also one that is counted first: most bytes of a token are spaces."""
    gateway = Gateway(tmp_path)
    tokenizer = load_tokenizer(gateway.config.model)
    parsing = Parsing(gateway.service, tokenizer, 4096)
    for text in (" " * 60_000, "word " * 2000, "<|im_end|>" * 4000):
        body = {"model": gateway.config.model.name, "prompt": text}
        size = len(tokenizer(text)["input_ids"])
        assert size <= 4096
        (taken,) = parsing.completion(arrival(gateway.service), json.dumps(body).encode(), tokenizer)
        assert len(taken.prompt.tokens) == size


def test_defaults_take_what_agents_and_documents_send():
    """80 KB with 21 tools and hundreds of messages; 4 MB of text with more commas than a body may have values."""
    tools = [{**TOOL, "name": f"tool{number}", "description": "does {this}, [that]: " * 150} for number in range(21)]
    turns = [{"role": role, "content": [BLOCK] * 3} for _ in range(300) for role in ("user", "assistant")]
    assert parse(json.dumps({**WHOLE, "tools": tools, "messages": turns}).encode(), MessagesRequest, DEFAULT)
    document = {**WHOLE, "messages": [{"role": "user", "content": "a,b:" * 1_000_000}]}
    assert parse(json.dumps(document).encode(), MessagesRequest, DEFAULT)
