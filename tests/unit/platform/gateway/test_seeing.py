"""A request can be followed: one id in headers, bodies, log lines and records; errors counted and logged once."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
import requests

from tests import clocks
from tests.polling import PATIENCE
from tests.unit.platform.conftest import Counted
from tests.unit.platform.exchanges import arrival
from warmkv.config import load
from warmkv.logs import LineLimit, RequestFields, about, forward
from warmkv.platform.gateway import faults as faults_module
from warmkv.platform.gateway.apis.answer import Answer
from warmkv.platform.gateway.apis.errors import ApiError, overloaded
from warmkv.platform.gateway.apis.openai.choices import Choices
from warmkv.platform.gateway.apis.schema import ParsedRequest, WarmkvOptions
from warmkv.platform.gateway.apis.tokens import Prompt
from warmkv.platform.gateway.faults import ErrorLog
from warmkv.platform.gateway.paths import APIS
from warmkv.platform.gateway.resume import Attempt
from warmkv.platform.gateway.service import Service
from warmkv.prefixes.record import RequestRecord
from warmkv.replicas.protocol import (
    Admitted,
    Delta,
    Event,
    Failed,
    Finished,
    QueueFullError,
    SamplingParams,
    Started,
)
from warmkv.request_context import RequestContext, TraceContext, checked_client_id, parse_traceparent

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"
SECRET = "the client's own words"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Log lines as an actor writes them, with the fields of their request."""
    fields = RequestFields()
    caplog.handler.addFilter(fields)
    with caplog.at_level(logging.INFO, "warmkv"):
        yield caplog
    caplog.handler.removeFilter(fields)


def post(server: Any, path: str, body: Any, **headers: str) -> requests.Response:
    return requests.post(f"{server.url}{path}", json=body, headers={"x-api-key": "seen", **headers}, timeout=PATIENCE)


def message(server: Any, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": SECRET}]
    return {"model": server.config.model.name, "max_tokens": 8, "messages": turns, "temperature": 0, **more}


def counted(server: Any, name: str) -> list[dict[str, str]]:
    return [labels for seen, _, labels in server.metrics.seen if seen == name]


# --- one id


def test_an_answer_its_request_and_its_record_have_one_id(server):
    answer = post(server, "/v1/messages", message(server), traceparent=TRACEPARENT, **{"x-request-id": "client-7"})
    name = answer.headers["request-id"]
    assert name.startswith("req_")
    assert answer.json()["id"].removeprefix("msg_") == name.removeprefix("req_")
    sent, record = server.requests[-1], server.records[-1]
    assert sent.id == record.id == name
    assert (record.client_id, record.trace_id, record.error) == ("client-7", TRACE, "")
    assert type(record).from_json(record.to_json()) == record
    own = sent.context.trace
    assert sent.context == RequestContext(name, "client-7", own)
    assert (own.trace_id, own.flags) == (TRACE, "01")
    assert own.span_id != CALLER
    assert answer.headers["traceparent"] == own.traceparent


def test_without_a_trace_nothing_is_made_up(server):
    for headers in ({}, {"traceparent": TRACEPARENT.upper()}, {"x-request-id": "x" * 200}, {"x-request-id": "a b"}):
        answer = post(server, "/v1/messages", message(server), **headers)
        assert answer.status_code == 200
        assert "traceparent" not in answer.headers
        context = server.requests[-1].context
        assert (context.client_id, context.trace) == ("", None)


@pytest.mark.parametrize(
    ("header", "flags"),
    [
        (TRACEPARENT, "01"),
        (f"00-{TRACE}-{CALLER}-ff", "03"),  # flags that are not defined are not passed on
        (f"01-{TRACE}-{CALLER}-01-more", "01"),
        (f"00-{TRACE}-{CALLER}-01-more", None),
        (f"ff-{TRACE}-{CALLER}-01", None),
        (f"00-{'0' * 32}-{CALLER}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE}-{CALLER}", None),
        (f"00-{TRACE.upper()}-{CALLER}-01", None),
        (f"00-{TRACE[:-1]}-{CALLER}-01", None),
        (f"00-{TRACE}-{CALLER}-01\n", None),
        (f"00-{'４' * 32}-{CALLER}-01", None),  # digits, but not ASCII
        ("", None),
    ],
)
def test_traceparent_is_taken_by_the_letter(header, flags):
    trace = parse_traceparent([header])
    assert trace == (None if flags is None else TraceContext(TRACE, CALLER, flags))
    assert parse_traceparent([header, header]) is None


def test_only_plain_client_ids_are_noted():
    assert checked_client_id(["7f3a-b.c:d/e@f_g+h="]) == "7f3a-b.c:d/e@f_g+h="
    for bad in (["a\nb"], ["é"], ["x" * 129], [""], ["a", "b"], []):
        assert checked_client_id(bad) == ""


# --- errors


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_a_mistake_is_counted_and_logged_without_the_clients_words(server, lines, path):
    answer = post(server, path, message(server, warmkv={SECRET: SECRET}), **{"x-request-id": "client-8"})
    assert answer.status_code == 400
    name, error = answer.headers["request-id"], answer.json()["error"]
    assert name in (answer.json().get("request_id"), error.get("request_id"))
    assert counted(server, "warmkv_errors")[-1] == {"type": error["type"], "status": "400", "api": APIS[path]}
    (line,) = [record for record in lines.records if name in record.getMessage()]
    assert (line.levelname, line.exc_info) == ("INFO", None)
    assert "client=client-8" in line.getMessage()
    assert SECRET not in lines.text


def test_an_error_within_a_stream_is_counted_and_logged_with_its_traceback(server, lines):
    for path, api in (("/v1/messages", "messages"), ("/v1/chat/completions", "chat")):
        server.faults += [2] * (1 + server.config.gateway.retries)
        before = len(counted(server, "warmkv_errors"))
        answer = post(server, path, message(server, stream=True, warmkv={"ignore_eos": True}), traceparent=TRACEPARENT)
        assert answer.status_code == 200
        name = answer.headers["request-id"]
        last = json.loads(answer.text.strip().rpartition("data: ")[2])
        assert name in (last.get("request_id"), last["error"].get("request_id"))
        assert counted(server, "warmkv_errors")[before:] == [{"type": "api_error", "status": "500", "api": api}]
        (line,) = [record for record in lines.records if name in record.getMessage()]
        assert line.levelname == "ERROR"
        assert f"trace={TRACE}" in line.getMessage()
        assert "ConnectionError: the replica has died" in lines.handler.format(line)
        assert server.records[-1].error == "api_error"


def test_a_fault_that_nobody_expected_names_its_request(server, lines, monkeypatch):
    monkeypatch.setattr(server, "dropped", None)  # which a request to forget prefixes appends to
    answer = requests.delete(f"{server.url}/v1/warmkv/prefixes", headers={"x-api-key": "seen"}, timeout=PATIENCE)
    assert answer.status_code == 500
    assert answer.json()["request_id"] == answer.headers["request-id"]
    assert counted(server, "warmkv_errors")[-1] == {"type": "api_error", "status": "500", "api": "prefixes"}
    (line,) = [record for record in lines.records if answer.headers["request-id"] in record.getMessage()]
    assert "AttributeError" in lines.handler.format(line)


def test_a_request_that_was_accepted_and_failed_has_a_record(server):
    server.faults += [0] * (1 + server.config.gateway.retries)
    answer = post(server, "/v1/messages", message(server), traceparent=TRACEPARENT)
    assert answer.status_code == 500
    record = server.records[-1]
    assert (record.id, record.trace_id) == (answer.headers["request-id"], TRACE)
    assert (record.status, record.error, record.output_tokens, record.replica) == ("error", "api_error", 0, "")
    assert len(record.hashes) == record.input_tokens // record.block_size
    assert type(record).from_json(record.to_json()) == record
    lines = len(server.records)
    post(server, "/v1/messages", message(server, max_tokens=-1))  # refused, so never accepted
    assert len(server.records) == lines


def made(now: list[float]) -> tuple[ErrorLog, Counted]:
    seen = Counted()
    return ErrorLog(seen, lambda: now[0]), seen


def test_a_fault_per_request_does_not_fill_a_disk(lines, monkeypatch):
    monkeypatch.setattr(faults_module, "LINES_PER_MINUTE", 3)
    now = [0.0]
    faults, seen = made(now)
    for _ in range(10):
        faults.report(ValueError(), "chat")
    assert len(lines.records) == 3
    assert seen.seen.count(("warmkv_dropped_lines", 1, {"log": "errors"})) == 7
    faults.report(ApiError("not_found_error", "x"), "chat")  # another kind has lines of its own
    assert len(lines.records) == 4
    now[0] += 20
    faults.report(ValueError(), "chat")
    assert "suppressed=7" in lines.records[-1].getMessage()
    assert len([name for name, _, _ in seen.seen if name == "warmkv_errors"]) == 12


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (QueueFullError("64 wait"), "replica_queue"),
        (overloaded("gateway_queue"), "gateway_queue"),
        (ApiError("rate_limit_error", "slower", reason="tokens_per_minute"), "tokens_per_minute"),
        (ApiError("overloaded_error", "later"), "overloaded_error"),
    ],
)
def test_rejections_are_counted_by_reason(lines, error, reason):
    faults, seen = made([0.0])
    told = faults.report(error, "messages")
    assert ("warmkv_rejected", 1, {"reason": reason}) in seen.seen
    assert lines.records[-1].levelname == "WARNING"
    assert f"reason={reason} type={told.type}" in lines.records[-1].getMessage()
    assert lines.records[-1].exc_info is None


def test_a_client_that_leaves_before_its_answer_begins_has_a_record():
    records: list[RequestRecord] = []
    seen, sent, now = Counted(), asyncio.Event(), itertools.count()

    async def send(attempt: Attempt) -> AsyncGenerator[Event]:
        sent.set()
        await asyncio.Event().wait()
        yield Failed("never")

    clocks = {"clock": lambda: float(next(now)), "wall_clock": lambda: 0.0}
    service = Service(load(), send, seen, write_log=records.append, **clocks)

    async def leave() -> None:
        asked = ParsedRequest(Prompt((1, 2, 3), (3,), (None,)), SamplingParams(5), WarmkvOptions(), stream=False)
        answering = asyncio.create_task(service.start("chat", arrival(service), asked))
        await sent.wait()
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering

    asyncio.run(leave())
    (record,) = records
    assert (record.id, record.status, record.error, record.input_tokens) == ("req_1", "cancelled", "", 3)
    assert record.e2e > 0
    labels = {"api": "chat", "status": "cancelled", "policy": "full", "model": "tiny", "tenant": "a"}
    assert ("warmkv_requests", 1, labels) in seen.seen


# --- several answers to one request


def answered(prompts: list[Prompt], n: int = 1, cached: int = 0) -> tuple[Service, Counted, list[RequestRecord]]:
    """Make n answers to each prompt, a second each, on a virtual clock; `cached` tokens of every prompt are read."""
    seen, records = Counted(), list[RequestRecord]()

    async def send(attempt: Attempt) -> AsyncGenerator[Event]:
        yield Admitted()
        await asyncio.sleep(1)
        yield Started("only", 0, 0, cached, 4, 100, 0.0, 0.0, {"device": cached})
        yield Delta("text", 1)
        yield Finished("end", 1)

    async def take(_: int, answer: Answer, __: ParsedRequest) -> None:
        await answer.text()

    async def run() -> Service:
        clock = asyncio.get_running_loop().time
        service = Service(load(), send, seen, write_log=records.append, clock=clock, wall_clock=clock)
        asked = [ParsedRequest(prompt, SamplingParams(5), WarmkvOptions(), stream=False, n=n) for prompt in prompts]
        choices = Choices(service, "completions", arrival(service), asked, str)
        await choices.queued()
        await choices.run(take)
        return service

    return clocks.run(run()), seen, records


def test_what_is_read_of_a_prompt_is_counted_once_however_many_answers_it_has():
    service, seen, records = answered([Prompt((1, 2, 3), (3,), (None,))], n=3, cached=2)
    counts = [(name, value) for name, value, _ in seen.seen if name in ("warmkv_tokens", "warmkv_cached_tokens")]
    assert sum(value for name, value in counts if name == "warmkv_cached_tokens") == 2
    assert sum(value for name, value in counts if name == "warmkv_tokens") == 3 + len(records)
    figures = service.recent.figures()
    assert figures["tokens"] == {"prompt": 3, "cached": 2, "output": 3}
    assert figures["hit_rate"] <= 1
    assert [record.cached_tokens for record in records] == [2, 2, 2]  # the log says what each found


def test_an_answer_that_waits_for_others_to_its_request_is_timed_from_when_it_is_sent():
    prompts = [Prompt((number,), (1,), (None,)) for number in range(40)]
    _, _, records = answered(prompts)
    first = records[0].arrival
    assert [record.arrival - first for record in records] == pytest.approx([0.0] * 16 + [1.0] * 16 + [2.0] * 8)
    assert [record.ttft for record in records] == pytest.approx([1.0] * 40)
    assert [record.e2e for record in records] == pytest.approx([1.0] * 40)


# --- metrics, health


def test_the_queue_and_the_gateways_own_wait_are_recorded(server):
    before = len(server.metrics.seen)
    post(server, "/v1/messages", message(server))
    assert counted(server, "warmkv_queue_seconds")[-1] == {"model": server.config.model.name}
    assert len(server.metrics.seen) - before <= 18, "a request should not take more to record, however long it is"
    waiting = [value for name, value, _ in server.metrics.seen if name == "warmkv_gateway_waiting_requests"]
    assert (waiting[-1], max(waiting)) == (0, 1)


def test_ready_only_while_a_replica_takes_requests(server):
    ready = requests.get(f"{server.url}/readyz", timeout=PATIENCE)
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "replicas": 1})
    server.taking = 0
    try:
        unready = requests.get(f"{server.url}/readyz", timeout=PATIENCE)
        assert unready.status_code == 503
        assert unready.json()["reason"] == "no replica takes requests"
        assert requests.get(f"{server.url}/healthz", timeout=PATIENCE).status_code == 200
    finally:
        server.taking = 1


# --- log lines


def test_lines_name_the_request_of_their_own_task():
    said: list[str] = []

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(self.format(record))

    target, package = logging.getLogger("actor's own"), logging.getLogger("warmkv")
    before = package.handlers, package.propagate, package.level
    target.handlers, target.propagate = [Said()], False
    target.setLevel(logging.INFO)

    async def serve(name: str) -> None:
        with about(RequestContext(name)):
            await asyncio.sleep(0)
            logging.getLogger("warmkv.replicas").info("%s%%", name)

    async def both() -> None:
        await asyncio.gather(serve("a"), serve("b"))
        logging.getLogger("warmkv.replicas").info("nobody's")

    try:
        forward("actor's own")
        asyncio.run(both())
    finally:
        package.handlers, package.propagate, package.level = before
    assert said == ["a% request=a", "b% request=b", "nobody's"]


def test_a_limit_of_lines_counts_what_it_leaves_out():
    now = [0.0]
    limit = LineLimit(2, lambda: now[0])
    assert [limit.take() for _ in range(4)] == [0, 0, None, None]
    now[0] += 30  # room for one
    assert [limit.take() for _ in range(2)] == [2, None]
    now[0] += 3600  # no more than a minute's are saved up
    assert [limit.take() for _ in range(3)] == [1, 0, None]
