"""Batches that are lost, repeated or late: what is known is what the engine holds, whatever happens on the way."""

import asyncio
import itertools
from collections.abc import Sequence

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.prefixes import hashing
from warmkv.replicas.engines.event_stream import Batch, EventStream
from warmkv.replicas.engines.kv_events import Cleared, Forgotten, KVEvent, VllmBlocks, cache_salt

ROOT = hashing.chain_root(b"salt", "model")


class Engine:
    """Blocks of one token each, of which it tells in batches; the last `buffer` of them can be had again."""

    def __init__(self, buffer: int) -> None:
        self.held: list[int] = []  # a chain of tokens
        self.sent: list[Batch] = []
        self.buffer, self.clock = buffer, itertools.count(1)

    def send(self, *events: dict[str, object]) -> Batch:
        self.sent.append((len(self.sent), msgpack.packb([float(next(self.clock)), list(events), 0])))
        return self.sent[-1]

    def name(self, length: int) -> bytes:
        return bytes(self.held[:length])

    def grow(self, token: int) -> Batch:
        self.held.append(token)
        size = len(self.held)
        stored = {"type": "BlockStored", "block_hashes": [self.name(size)], "token_ids": [token], "block_size": 1}
        parent = self.name(size - 1) if size > 1 else None
        return self.send({**stored, "parent_block_hash": parent, "extra_keys": [[cache_salt(ROOT)]], "medium": "GPU"})

    def shrink(self) -> Batch:
        name = self.name(len(self.held))
        self.held.pop()
        return self.send({"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"})

    def clear(self) -> Batch:
        self.held = []
        return self.send({"type": "AllBlocksCleared"})

    def restart(self) -> None:
        self.held, self.sent = [], []

    async def replay(self, first: int) -> Sequence[Batch]:
        return [batch for batch in self.sent[-self.buffer :] if batch[0] >= first] if self.buffer else []

    def keys(self) -> set[bytes]:
        return set(hashing.block_hashes(self.held, 1, ROOT))


class Follower:
    def __init__(self, engine: Engine, resets: bool = True) -> None:
        self.engine, self.blocks, self.known = engine, VllmBlocks(1), set[bytes]()
        self.due = list[Batch]()  # of a reset: told behind what is on its way
        self.stream = EventStream(self.take, engine.replay, self.reset if resets else None)

    def take(self, events: Sequence[KVEvent]) -> None:
        for event in events:
            changes = self.blocks.apply(event)
            self.known = (self.known - set(changes.gone)) | set(changes.stored)

    async def reset(self) -> None:
        self.due.append(self.engine.clear())


@given(st.data(), st.integers(0, 6))
def test_what_is_known_is_what_the_engine_holds_once_everything_arrived(data: st.DataObject, buffer: int) -> None:
    async def scenario() -> None:
        engine = Engine(buffer)
        follower = Follower(engine)
        for _ in range(data.draw(st.integers(1, 20))):
            what = data.draw(st.sampled_from(["grow", "grow", "shrink", "clear"] if engine.held else ["grow"]))
            batch = engine.grow(data.draw(st.integers(0, 2))) if what == "grow" else getattr(engine, what)()
            for arrived in [batch] * data.draw(st.sampled_from([1, 1, 1, 0, 2])):
                await follower.stream.arrived(*arrived)
            if data.draw(st.booleans()):
                while follower.due:
                    await follower.stream.arrived(*follower.due.pop(0))
        last = engine.send()
        for _ in range(3):  # a reset is told of in a batch of its own
            await follower.stream.arrived(*last)
            while follower.due:
                await follower.stream.arrived(*follower.due.pop(0))
            last = engine.send()
        assert follower.known == engine.keys()

    asyncio.run(scenario())


@pytest.mark.parametrize(("buffer", "resets"), [(10, 0), (0, 1)])
def test_a_gap_is_replayed_or_the_cache_is_cleared(buffer: int, resets: int):
    async def scenario() -> None:
        engine = Engine(buffer)
        follower = Follower(engine)
        batches = [engine.grow(token) for token in range(4)]
        await follower.stream.arrived(*batches[0])
        await follower.stream.arrived(*batches[3])
        assert follower.stream.resets == resets
        assert follower.known == (engine.keys() if buffer else set())
        later = [engine.grow(7)]
        for batch in [*follower.due, *later]:
            await follower.stream.arrived(*batch)
        assert follower.known == engine.keys() != set()

    asyncio.run(scenario())


def test_a_batch_that_cannot_be_read_counts_as_lost():
    async def scenario() -> None:
        engine = Engine(9)
        follower = Follower(engine)
        await follower.stream.arrived(*engine.grow(1))
        number, _ = engine.grow(2)
        await follower.stream.arrived(number, b"\x00")
        assert (follower.known, follower.stream.resets, engine.held) == (set(), 1, [])

    asyncio.run(scenario())


def test_only_what_comes_behind_the_clearing_counts():
    taken: list[KVEvent] = []
    resets = []

    async def nothing(first: int) -> Sequence[Batch]:
        return []

    async def reset() -> None:
        resets.append(True)

    async def scenario() -> None:
        engine, stream = Engine(0), EventStream(taken.extend, nothing, reset)
        engine.grow(1)
        await stream.arrived(*engine.grow(2))
        assert (taken, resets) == ([Forgotten()], [True])
        await stream.arrived(*engine.grow(3))
        assert taken == [Forgotten()]
        await stream.arrived(*engine.clear())
        await stream.arrived(*engine.grow(4))
        assert taken[1] == Cleared()
        assert len(taken) == 3

    asyncio.run(scenario())


@given(st.data(), st.integers(0, 6))
def test_of_an_engine_that_restarts_nothing_is_known_that_it_does_not_hold(data: st.DataObject, buffer: int) -> None:
    """Without resets: what is known is a part of what is held, and all of it while nothing was lost for good."""

    async def scenario() -> None:
        engine = Engine(buffer)
        follower = Follower(engine, resets=False)
        follower.stream.disconnected()
        for _ in range(data.draw(st.integers(1, 25))):
            what = data.draw(st.sampled_from(["grow", "grow", "grow", "shrink", "clear", "restart"]))
            certain = False
            if what == "restart":
                engine.restart()
                if data.draw(st.booleans()):
                    follower.stream.disconnected()
                else:
                    certain = True  # its number tells, as long as it is below the last one
            batch = (
                engine.grow(data.draw(st.integers(0, 2))) if what in ("grow", "restart") or not engine.held else None
            )
            batch = batch or getattr(engine, what)()
            if not certain and data.draw(st.integers(0, 3)) == 0:
                continue  # lost
            await follower.stream.arrived(*batch)
            assert follower.known <= engine.keys()
            if follower.blocks.whole:
                assert follower.known == engine.keys()
        await follower.stream.arrived(*engine.clear())
        await follower.stream.arrived(*engine.grow(1))
        assert (follower.known, follower.blocks.whole) == (engine.keys(), True)

    asyncio.run(scenario())


def test_falling_numbers_are_a_restart_and_late_ones_are_not():
    async def scenario() -> None:
        engine = Engine(9)
        follower = Follower(engine, resets=False)
        batches = [engine.grow(token) for token in range(4)]
        for batch in batches:
            await follower.stream.arrived(*batch)
        for batch in batches:
            await follower.stream.arrived(*batch)
        assert follower.known == engine.keys()
        engine.restart()
        engine.grow(8)
        await follower.stream.arrived(*engine.grow(9))  # the one before it is replayed
        assert follower.known == engine.keys() == set(hashing.block_hashes([8, 9], 1, ROOT))
        assert follower.blocks.whole

    asyncio.run(scenario())
