"""The router's proxy: answers come from the server that was chosen, from another where that is away, unchanged."""

import asyncio
import contextlib
import json
import threading
import time
from random import Random
from types import SimpleNamespace

import pytest

from tests.unit.platform.recording.test_proxy import Upstream, answer, asked, request, run
from warmkv.config import Config
from warmkv.platform.access_log import AccessLog
from warmkv.platform.engine_router import proxy as module
from warmkv.platform.engine_router.prompts import read_body, root_of, tenant_salt
from warmkv.platform.engine_router.proxy import STATUS_PATH, RoutingProxy
from warmkv.platform.engine_router.router import EngineRouter, rank_name
from warmkv.platform.recording.exchange import Analyst
from warmkv.platform.recording.proxy import Recorder
from warmkv.platform.recording.state import State
from warmkv.prefixes import hashing
from warmkv.prefixes.record import RequestRecord
from warmkv.replicas.engines.kv_events import Changes

CHAT = "/v1/chat/completions"
KEY = {"x-api-key": "k"}  # of `request`


def body(name):
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": name * 9000}]}).encode()


@contextlib.asynccontextmanager
async def routing(*upstreams, recorder=None):
    """Yield the port of a router in front of servers, and their addresses."""
    servers = [await asyncio.start_server(upstream.handle, "127.0.0.1", 0) for upstream in upstreams]
    engines = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    router = EngineRouter(engines, Config(), kv_tokens=10**6, ttl=60, random=Random(0), clock=time.monotonic)
    async with RoutingProxy(router, recorder).running("127.0.0.1", 0) as port:
        yield port, servers, engines
    for server in servers:
        server.close()


def named(name):
    async def serve(reader, writer):
        writer.write(answer(name))

    return Upstream(serve)


async def answered(port, data, length=1):
    reader, writer, head = await asked(port, data)
    found = await reader.readexactly(length)
    writer.close()
    return head, found


async def status(port):
    reader, writer, head = await asked(port, request(b"", STATUS_PATH, "GET"))
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    found = json.loads(await reader.readexactly(length))
    writer.close()
    return found


def test_turns_go_to_the_server_that_answered_and_are_written_with_its_name(tmp_path):
    async def scene():
        log = AccessLog(tmp_path / "log", 0)
        recorder = Recorder(log, Analyst(State(b"salt"), 64))
        async with routing(named(b"1"), named(b"2"), recorder=recorder) as (port, _, engines):
            first = {name: (await answered(port, request(body(name), CHAT)))[1] for name in "xy"}
            assert set(first.values()) == {b"1", b"2"}
            for name in "yxxy":
                assert (await answered(port, request(body(name), CHAT)))[1] == first[name]
            figures = await status(port)
            assert [one["answered"] for one in figures["engines"].values()] == [3, 3]
            _, ready, head = await asked(port, request(b"", "/readyz", "GET"))
            ready.close()
            assert head.startswith(b"HTTP/1.1 200")
        log.close()
        records = [RequestRecord.from_json(line) for line in (tmp_path / "log").read_text().splitlines()]
        assert {record.replica for record in records} == set(engines)

    run(scene())


def test_a_server_that_goes_away_is_passed_over():
    away = set()

    def mortal(name):
        async def serve(reader, writer):
            if name in away:
                writer.transport.abort()  # as a process that is killed
            else:
                writer.write(answer(name))

        return Upstream(serve)

    async def scene():
        async with routing(mortal(b"1"), mortal(b"2")) as (port, servers, engines):
            _, first = await answered(port, request(body("x"), CHAT))
            away.add(first)
            servers[int(first) - 1].close()
            for _ in range(2):
                _, found = await answered(port, request(body("x"), CHAT))
                assert {first, found} == {b"1", b"2"}
            figures = (await status(port))["engines"][engines[int(first) - 1]]
            assert (figures["in_flight"], figures["remembered_tokens"]) == (0, 0)

    run(scene())


def test_none_that_can_be_reached_is_a_bad_gateway_and_a_body_without_end_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "LONGEST_BODY", 20_000)

    async def scene():
        async with routing(named(b"1")) as (port, _, _):
            _, writer, head = await asked(port, request(b"x" * 30_000, CHAT))
            assert head.startswith(b"HTTP/1.1 413")
            writer.close()
        log = AccessLog(tmp_path / "log", 0)
        router = EngineRouter(
            ["http://127.0.0.1:9"], Config(), kv_tokens=1, ttl=60, random=Random(0), clock=time.monotonic
        )
        async with RoutingProxy(router, Recorder(log, Analyst(State(b""), 64))).running("127.0.0.1", 0) as port:
            _, writer, head = await asked(port, request(body("x"), CHAT))
            assert head.startswith(b"HTTP/1.1 502")
            writer.close()
            assert router.figures()["engines"]["http://127.0.0.1:9"]["in_flight"] == 0
        log.close()
        assert RequestRecord.from_json((tmp_path / "log").read_text()).error == "http_502"

    run(scene())


def test_tokens_are_asked_for_and_each_key_s_prompts_are_sent_with_its_salt():
    """What a server told of goes before what it was sent, under the key that it was computed for."""
    told = []

    async def serve(reader, writer):
        writer.write(answer(b'{"tokens": [' + b",".join([b"7"] * 1000) + b"]}"))

    async def scene():
        upstreams = [Upstream(serve), Upstream(serve)]
        servers = [await asyncio.start_server(upstream.handle, "127.0.0.1", 0) for upstream in upstreams]
        engines = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
        router = EngineRouter(
            engines, Config(), kv_tokens=10**6, ttl=60, random=Random(0), clock=time.monotonic, events=True
        )
        salts = {key: tenant_salt("secret", {"x-api-key": key}, {}) for key in ("k", "l")}
        for engine, key in zip(engines, salts, strict=True):
            keys = hashing.block_hashes([7] * 1000, 64, root_of(salts[key]))
            router.changed(engine, Changes(dict.fromkeys(keys, "device"), ()), True)
        feed = SimpleNamespace(
            loras=(), figures={"whole": True}, follow=asyncio.Event().wait, answered=lambda: told.append(1)
        )  # of which the test has told
        proxy = RoutingProxy(router, None, feeds=dict.fromkeys(engines, feed), secret="secret")
        async with proxy.running("127.0.0.1", 0) as port:
            for key in "kllk":
                data = request(body("x"), CHAT).replace(b"X-Api-Key: k", b"X-Api-Key: " + key.encode())
                await answered(port, data)
            figures = await status(port)
        for server in servers:
            server.close()
        sent = [[json.loads(data) for head, data in one.requests if b"POST /v1" in head] for one in upstreams]
        assert [[asked["cache_salt"] for asked in one] for one in sent] == [[salts["k"]] * 2, [salts["l"]] * 2]
        assert all(asked["messages"] == json.loads(body("x"))["messages"] for one in sent for asked in one)
        asked = [head for one in upstreams for head, _ in one.requests if b"POST /tokenize" in head]
        assert all(b"content-type: application/json" in head.lower() for head in asked)
        assert figures["routed"] == {"warm": 4}
        assert (figures["tokenized"], len(told)) == ({"asked": 4, "failed": 0}, 4)

    run(scene())


def test_a_rank_of_a_server_is_named_in_a_header_and_gets_what_is_warm_there():
    async def serve(reader, writer):
        writer.write(answer(b'{"tokens": [' + b",".join([b"7"] * 1000) + b"]}"))

    async def scene():
        upstream = Upstream(serve)
        server = await asyncio.start_server(upstream.handle, "127.0.0.1", 0)
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ranks = [rank_name(address, rank) for rank in range(3)]
        router = EngineRouter(
            ranks, Config(), kv_tokens=10**6, ttl=60, random=Random(0), clock=time.monotonic, events=True
        )
        keys = hashing.block_hashes([7] * 1000, 64, root_of(None))
        router.changed(ranks[2], Changes(dict.fromkeys(keys, "device"), ()), True)
        feed = SimpleNamespace(loras=(), figures={}, follow=asyncio.Event().wait, answered=lambda: None)
        async with RoutingProxy(router, None, feeds=dict.fromkeys(ranks, feed)).running("127.0.0.1", 0) as port:
            await answered(port, request(body("x"), CHAT, headers="x-DATA-parallel-rank: 0\r\n"))
            assert list((await status(port))["engines"]) == ranks
        server.close()
        (tokenized, _), (head, _) = upstream.requests
        assert b"POST /tokenize" in tokenized
        assert [line for line in head.lower().split(b"\r\n") if b"rank" in line] == [b"x-data-parallel-rank: 2"]

    run(scene())


@contextlib.asynccontextmanager
async def salting(upstream):
    """Yield the port of a router in front of one server, whose events it follows."""
    server = await asyncio.start_server(upstream.handle, "127.0.0.1", 0)
    engine = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    router = EngineRouter([engine], Config(), kv_tokens=1, ttl=60, random=Random(0), clock=time.monotonic)
    feed = SimpleNamespace(loras=(), figures={}, follow=asyncio.Event().wait, answered=lambda: None)
    async with RoutingProxy(router, None, feeds={engine: feed}, secret="s").running("127.0.0.1", 0) as port:
        yield port
    server.close()


@pytest.mark.parametrize("path", ["/v1/chat/completion%73", "/v1/chat%2fcompletions", "/v1/chat/completions#x"])
def test_an_encoded_path_is_taken_as_servers_take_it_and_sent_as_it_came(path):
    async def scene():
        upstream = named(b"1")
        async with salting(upstream) as port:
            data = json.dumps({"prompt": "x", "vllm_xargs": {"kv_cache_report_mode": "full"}}).encode()
            assert (await answered(port, request(data, path)))[1] == b"1"
        ((head, sent),) = [each for each in upstream.requests if b"tokenize" not in each[0]]
        assert head.startswith(f"POST {path.partition('#')[0]} HTTP/1.1\r\n".encode())
        assert json.loads(sent) == {"prompt": "x", "vllm_xargs": {}, "cache_salt": tenant_salt("s", KEY, {})}

    run(scene())


def test_halves_of_surrogate_pairs_in_names_are_no_fault():
    async def scene():
        async with salting(named(b"1")) as port:
            for name in ("model", "cache_salt", "prompt_cache_key"):
                data = json.dumps({name: "\ud800", "prompt": "x"}).encode()
                assert (await answered(port, request(data, CHAT)))[1] == b"1"

    run(scene())


def test_no_body_that_is_not_read_passes_without_its_key_s_salt(monkeypatch):
    """Refuse what is nested deeper than this interpreter reads, which is no measure of a server's, or too large."""
    threads = []
    monkeypatch.setattr(module, "read_body", lambda data: threads.append(threading.current_thread()) or read_body(data))

    async def scene():
        upstream = named(b"1")
        async with salting(upstream) as port:
            for body in (b'{"x": ' + b"[" * 100_000, b'{"x": [' + b"[]," * 600_000 + b"0]}"):
                _, writer, head = await asked(port, request(body, CHAT))
                writer.close()
                assert head.startswith(b"HTTP/1.1 400")
        assert not upstream.requests
        assert [thread is threading.main_thread() for thread in threads] == [True, False]  # by size

    run(scene())


def test_no_request_has_a_server_whose_events_are_followed_tell_of_blocks_again():
    async def scene():
        upstream = named(b"1")
        server = await asyncio.start_server(upstream.handle, "127.0.0.1", 0)
        engine = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        router = EngineRouter([engine], Config(), kv_tokens=1, ttl=60, random=Random(0), clock=time.monotonic)
        feed = SimpleNamespace(loras=(), figures={}, follow=asyncio.Event().wait, answered=lambda: None)
        extra = {"kv_cache_report_mode": "full", "a": 1}
        data = json.dumps({"prompt": "x", "vllm_xargs": extra}).encode()
        for feeds in ({engine: feed}, {}):
            async with RoutingProxy(router, None, feeds=feeds).running("127.0.0.1", 0) as port:
                assert (await answered(port, request(data, "/v1/completions")))[1] == b"1"
        server.close()
        sent = [json.loads(data) for head, data in upstream.requests if b"POST /v1" in head]
        assert [one["vllm_xargs"] for one in sent] == [{"a": 1}, extra]

    run(scene())


def test_bodies_that_no_client_sends_are_passed_on_or_refused():
    async def scene():
        deep = b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}"
        feed = SimpleNamespace(loras={"adapter"}, figures={}, follow=asyncio.Event().wait, answered=lambda: None)
        upstream = named(b"1")
        server = await asyncio.start_server(upstream.handle, "127.0.0.1", 0)
        engine = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        router = EngineRouter([engine], Config(), kv_tokens=1, ttl=60, random=Random(0), clock=time.monotonic)
        proxy = RoutingProxy(router, None, feeds={engine: feed}, secret="secret")
        async with proxy.running("127.0.0.1", 0) as port:
            for data in (b'{"model": ["m"], "prompt": {"type": []}}', b'{"model": "adapter", "prompt": "x"}'):
                assert (await answered(port, request(data, CHAT)))[1] == b"1"
            _, writer, head = await asked(port, request(deep, CHAT))
            writer.close()
            assert head.split()[1] in (b"200", b"400")  # as deep as the interpreter reads
            assert (await status(port))["engines"][engine]["in_flight"] == 0
        server.close()
        assert not any(b"tokenize" in head for head, data in upstream.requests if b"adapter" in data)

    run(scene())
