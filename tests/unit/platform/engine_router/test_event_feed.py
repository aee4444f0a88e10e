"""KV events over real sockets: what a server holds is known, through gaps, restarts and connections that end."""

import asyncio
import contextlib
import logging

import pytest

pytest.importorskip("zmq", reason="the extra route")

from tests.polling import PATIENCE
from tests.unit.platform.engine_router.publisher import SIZE, publishing, removed, stored
from warmkv.platform.engine_router.event_feed import SILENT_ANSWERS, Endpoints, EventFeed, endpoints_of
from warmkv.platform.engine_router.prompts import root_of
from warmkv.prefixes import hashing

X, Y, Z = [1] * 12, [2] * 12, [3] * 12


class Known:
    """Collect what was told of a server's cache."""

    def __init__(self):
        self.keys, self.tiers, self.whole, self.changed = set(), {}, False, asyncio.Event()

    def told(self, changes, whole):
        self.keys = (self.keys - set(changes.gone)) | set(changes.stored)
        self.tiers |= changes.stored
        self.whole = whole
        self.changed.set()

    async def until(self, condition):
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def becomes(self, *prompts, whole=True):
        wanted = keys(*prompts)
        await self.until(lambda: (self.keys, self.whole) == (wanted, whole))


def keys(*prompts, salt=None):
    return {key for tokens in prompts for key in hashing.block_hashes(tokens, SIZE, root_of(salt))}


@contextlib.asynccontextmanager
async def following(ports, replay=True, size=SIZE):
    known = Known()
    addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
    feed = EventFeed("http://a", Endpoints(addresses[0], addresses[1] if replay else ""), size, known.told)
    task = asyncio.create_task(feed.follow())
    try:
        yield known, feed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_events_are_followed_and_gaps_are_filled_from_the_replay_buffer():
    async def scene():
        async with publishing(ports := []) as server:
            await server.send(stored(X), lost=True)  # before anybody listens
            async with following(ports) as (known, feed):
                await server.subscribed()
                await server.send(stored(Y, salt="tenant"))
                await known.until(lambda: known.keys == keys(X) | keys(Y, salt="tenant"))
                await server.send(removed(X), removed(X[:8]), lost=True)
                await server.send(removed(Y, "tenant"), removed(Y[:8], "tenant"), removed(Y[:4], "tenant"))
                await known.becomes(X[:4])
                assert feed.figures == {"whole": True, "batches": 2, "lost": 0, "disconnects": 0}

    asyncio.run(scene())


@pytest.mark.parametrize("replay", [True, False])
def test_what_is_lost_for_good_is_forgotten_and_what_comes_later_is_known(replay):
    async def scene():
        async with publishing(ports := [], buffer=1) as server, following(ports, replay) as (known, feed):
            await server.subscribed()
            await server.send(stored(X))
            await known.becomes(X)
            await server.send(removed(X), lost=True)
            await server.send(stored(Y))
            await known.becomes(Y, whole=False)
            await server.send(stored([*X, 7, 7, 7, 7], 3))  # behind blocks that are not known any more
            await server.send({"type": "AllBlocksCleared"}, stored(Z))
            await known.becomes(Z)
            assert feed.figures["lost"] == 1

    asyncio.run(scene())


@pytest.mark.parametrize("replay", [True, False])
def test_a_server_that_restarts_begins_with_nothing(replay):
    async def scene():
        first = contextlib.AsyncExitStack()
        server = await first.enter_async_context(publishing(ports := []))
        async with following(ports, replay) as (known, feed):
            await server.subscribed()
            for prompt in (X, Y):
                await server.send(stored(prompt))
            await known.becomes(X, Y)
            await first.aclose()
            await known.becomes(whole=False)
            async with publishing(ports) as again:
                await again.send(stored(X), lost=replay)
                await again.subscribed()
                await again.send(stored(Z))
                await known.becomes(*((X, Z) if replay else (Z,)), whole=replay)
                assert feed.figures["disconnects"] == 1

    asyncio.run(scene())


def test_blocks_that_are_offloaded_stay_known_when_they_leave_the_device():
    def offloaded(tokens):
        names = removed(tokens)["block_hashes"]
        placeholder = {"parent_block_hash": None, "token_ids": [], "block_size": 0, "medium": "CPU", "group_idx": 0}
        return {"type": "BlockStored", "block_hashes": names, **placeholder}

    async def scene():
        async with publishing(ports := []) as server, following(ports) as (known, feed):
            await server.subscribed()
            await server.send(stored(X), offloaded(X), offloaded(Y[:4]))  # one of Y that has left already
            await known.becomes(X)
            await server.send(removed(X), stored(Y))
            await known.becomes(X, Y)
            tiers = [known.tiers[key] for key in hashing.block_hashes(X, SIZE, root_of(None))]
            assert tiers == ["device", "device", "host"]
            await server.send(removed(X) | {"medium": "CPU"})
            await known.becomes(X[:8], Y)
            assert feed.figures == {"whole": True, "batches": 3, "lost": 0, "disconnects": 0}

    asyncio.run(scene())


def test_blocks_that_keys_are_no_multiple_of_are_said_once_and_not_counted(caplog):
    async def scene():
        async with publishing(ports := []) as server, following(ports, size=6) as (known, feed):
            await server.subscribed()
            for prompt in (X, Y):
                await server.send(stored(prompt))
            await known.until(lambda: feed.arrived == 2)
            assert (known.keys, known.whole, feed.figures["whole"]) == (set(), False, False)

    with caplog.at_level(logging.ERROR):
        asyncio.run(scene())
    assert [record.message for record in caplog.records] == [
        "http://a has blocks of 4 tokens: set prefix_cache.block_size, now 6, to a multiple of it; "
        "until then its KV events tell nothing"
    ]


def test_a_server_that_restarts_with_blocks_that_keys_are_a_multiple_of_is_known():
    async def scene():
        first = contextlib.AsyncExitStack()
        server = await first.enter_async_context(publishing(ports := []))
        async with following(ports, size=6) as (known, feed):
            await server.subscribed()
            await server.send(stored(X))
            await known.until(lambda: feed.arrived == 1)
            assert not feed.figures["whole"]
            await first.aclose()
            await known.until(lambda: feed.disconnects == 1)
            async with publishing(ports) as again:
                await again.subscribed()
                await again.send(stored(X, size=3))
                await known.until(lambda: known.keys == set(hashing.block_hashes(X, 6, root_of(None))))
                assert feed.figures["whole"]

    asyncio.run(scene())


def test_a_server_that_answers_and_tells_nothing_is_named_once(caplog):
    feed = EventFeed("http://a", Endpoints("tcp://a:1"), SIZE, Known().told)
    for _ in range(3 * SILENT_ANSWERS):
        feed.answered()
    assert [record.message for record in caplog.records] == [
        f"http://a has answered {SILENT_ANSWERS} requests and told of no KV event at tcp://a:1: "
        "it is routed to by what it was sent"
    ]


def test_addresses_of_events():
    assert endpoints_of("tcp://gpu-1:5557") == ("tcp://gpu-1:5557", "", 1)
    assert endpoints_of("tcp://gpu-1:5557,ipc:///run/replay") == ("tcp://gpu-1:5557", "ipc:///run/replay", 1)
    ranks = endpoints_of("tcp://gpu-1:5557,tcp://[::1]:5657,ranks=2")
    assert [ranks.of_rank(rank) for rank in range(ranks.ranks)] == [
        ("tcp://gpu-1:5557", "tcp://[::1]:5657", 1),
        ("tcp://gpu-1:5558", "tcp://[::1]:5658", 1),
    ]
    assert endpoints_of("tcp://gpu-1:5557,ranks=3").of_rank(2) == ("tcp://gpu-1:5559", "", 1)
    for wrong in (
        "",
        "gpu-1:5557",
        "tcp://gpu-1",
        "tcp://a:x",
        "http://a:1",
        "tcp://a:1,",
        "tcp://a:1,tcp://a:2,tcp://a:3",
        "tcp://a:1,ranks=0",
        "tcp://a:1,ranks=many",
        "ranks=2",
        "tcp://a:1,ipc:///run/replay,ranks=2",
    ):
        with pytest.raises(ValueError, match=r"address|port|Port|ranks"):
            endpoints_of(wrong)
