"""The prefix directory without Ray: order, gaps, limits, silence, shards, and followers that fall behind."""

from __future__ import annotations

import asyncio
import pickle
from unittest.mock import Mock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.block_keys import key, names, packed
from tests.clocks import VirtualLoop, run
from warmkv.config import DirectoryConfig
from warmkv.platform import prefix_directory
from warmkv.platform.prefix_directory import Change, DirectoryActor, IndexFollower, PrefixDirectory, merged
from warmkv.prefixes.index import TIERS, PrefixIndex, Shard
from warmkv.prefixes.mask_table import unpack
from warmkv.replicas.protocol import BlockEvents

ALL = (1, 1, 1)  # one block, on the device


def snapshot(number: int, *blocks: bytes) -> BlockEvents:
    return BlockEvents(number, packed(*blocks), snapshot=True)


def copy(now: float = 0.0) -> tuple[PrefixIndex, IndexFollower]:
    index = PrefixIndex()
    return index, IndexFollower(index, Shard(), lambda: now)


async def catch_up(follower: IndexFollower, directory: PrefixDirectory) -> float | None:
    return await follower.apply(await directory.follow(follower.epoch, follower.version, 0))


def test_a_replica_that_is_not_known_is_asked_for_a_snapshot():
    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig())
        assert not await directory.publish("a", [], {})
        assert not await directory.publish("a", [BlockEvents(0, packed(b"1"))])
        assert await directory.publish("a", [snapshot(1, b"1", b"2"), BlockEvents(2, packed(b"3"), packed(b"2"))])
        assert (await directory.status())["replicas"]["a"]["blocks"] == 2

    run(scenario())


def test_a_gap_asks_for_a_snapshot_and_keeps_what_came_before_it():
    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig())
        index, follower = copy()
        await directory.publish("a", [snapshot(0, b"1")])
        assert not await directory.publish("a", [BlockEvents(1, packed(b"2")), BlockEvents(3, packed(b"4"))])
        await catch_up(follower, directory)
        assert names(index.keys_of("a")) == {b"1", b"2"}
        assert await directory.publish("a", [snapshot(4, b"9")])
        await catch_up(follower, directory)
        assert names(index.keys_of("a")) == {b"9"}

    run(scenario())


def test_a_block_is_in_the_tier_that_was_told_last():
    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig())
        index, follower = copy()
        await directory.publish("a", [snapshot(0, b"1", b"2"), BlockEvents(1, packed(b"3"), tier="disk")])
        await directory.publish("a", [BlockEvents(2, packed(b"2"), tier="host")])
        await catch_up(follower, directory)
        assert index.longest_match([key(b"1"), key(b"2"), key(b"3")]) == {"a": (1, 2, 3)}
        late, follower = copy()
        await catch_up(follower, directory)
        assert late.contents() == index.contents()
        await directory.publish("a", [BlockEvents(3, packed(b"2"))])
        await catch_up(follower, directory)
        assert late.longest_match([key(b"1"), key(b"2"), key(b"3")]) == {"a": (2, 2, 3)}
        assert (await directory.status())["replicas"]["a"]["blocks"] == 3

    run(scenario())


def test_who_else_holds_a_block_is_told_to_whoever_leaves():
    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig())
        await directory.publish("a", [snapshot(0, b"1", b"2", b"3")])
        await directory.publish("b", [snapshot(0, b"1", b"2")])
        await directory.publish("c", [BlockEvents(0, packed(b"1"), snapshot=True, tier="disk")])
        one, two, three, four = map(key, (b"1", b"2", b"3", b"4"))
        assert await directory.elsewhere("a", [one, two, three, four]) == {one: ["b", "c"], two: ["b"]}
        assert await directory.elsewhere("b", [one, two, three]) == {one: ["a", "c"], two: ["a"], three: ["a"]}

    run(scenario())


def test_memory_is_bounded_and_what_is_left_out_is_counted():
    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig(max_blocks=3))
        await directory.publish("a", [snapshot(0, b"1", b"2")])
        await directory.publish("b", [snapshot(0, b"1", b"2")])
        status = await directory.status()
        assert [status["replicas"][name]["blocks"] for name in "ab"] == [2, 1]
        assert status["left_out"] == 1
        await directory.publish("a", [BlockEvents(1, packed(b"1", b"2"), tier="host")])  # known already: needs no room
        assert (await directory.status())["left_out"] == 1
        await directory.publish("a", [BlockEvents(2, packed(b"7"), packed(b"1", b"2"))])
        await directory.publish("b", [BlockEvents(1, packed(b"8"))])
        status = await directory.status()
        assert [status["replicas"][name]["blocks"] for name in "ab"] == [1, 2]

    run(scenario())


def test_the_log_is_bounded_by_blocks():
    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig(max_blocks=100))
        await directory.publish("a", [snapshot(0)])
        for number in range(1, 50):
            keys = [bytes([number, each]) for each in range(number % 9)]
            await directory.publish("a", [BlockEvents(number, packed(*keys))])
            assert directory._logged == sum(change.size for change in directory._log) <= 20
        assert directory.nbytes >= directory._index.nbytes
        assert (await directory.status())["bytes"] == directory.nbytes

    run(scenario())


def test_a_silent_replica_is_forgotten():
    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig())
        ticking = asyncio.create_task(directory.run())
        await directory.publish("a", [snapshot(0, b"1")])
        await asyncio.sleep(14.5)
        await directory.publish("b", [snapshot(0, b"1")])
        index, follower = copy()
        await catch_up(follower, directory)
        assert index.longest_match([key(b"1")]) == {"a": ALL, "b": ALL}
        await asyncio.sleep(2)
        assert list((await directory.status())["replicas"]) == ["b"]
        await catch_up(follower, directory)
        assert index.longest_match([key(b"1")]) == {"b": ALL}
        assert index.replicas == ("b",)
        ticking.cancel()

    run(scenario())


def test_nobody_is_silent_while_the_directory_stands_still():
    """Take the reports that waited: replicas that are forgotten send snapshots, and routers start over."""

    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig())
        ticking = asyncio.create_task(directory.run())
        for replica in "abc":
            await directory.publish(replica, [snapshot(0, b"1")])
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for number in (1, 2):
            await asyncio.sleep(1)
            loop.stand_still(60.0)
            await asyncio.sleep(0.5)  # what is due runs before the reports that wait
            assert [await directory.publish(replica, [BlockEvents(number)]) for replica in "abc"] == [True] * 3
        ticking.cancel()

    run(scenario())


def test_a_replica_whose_report_is_missing_is_not_silent():
    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig())
        ticking = asyncio.create_task(directory.run())
        await directory.publish("a", [snapshot(0, b"1")])
        await asyncio.sleep(10)
        assert not await directory.publish("a", [BlockEvents(2)])
        await asyncio.sleep(10)
        assert list((await directory.status())["replicas"]) == ["a"]
        ticking.cancel()

    run(scenario())


def test_the_actor_forgets_replicas_although_nobody_asks_it(monkeypatch):
    monkeypatch.setattr(prefix_directory.recorders, "RayRecorder", Mock())

    async def scenario() -> None:
        actor = DirectoryActor(DirectoryConfig(), "test", Shard())
        assert await actor.publish("a", [snapshot(0, b"1")])
        await asyncio.sleep(17)
        status = await actor.status()
        assert (status["replicas"], status["blocks"]) == ({}, 0)

    run(scenario())


def test_the_status_has_what_routers_said_last_until_they_are_silent():
    async def scenario() -> None:
        config = DirectoryConfig()
        parts = [PrefixDirectory(config) for _ in range(2)]
        ticking = [asyncio.create_task(part.run()) for part in parts]
        for part in parts:
            await part.follow("", 0, 0, "first", 3)
        await asyncio.sleep(9.5)
        await parts[1].follow("", 0, 0, "second", 0)
        both = merged([await part.status() for part in parts])
        assert both["routers"] == {"first": {"booked": 3}, "second": {"booked": 0}}
        await asyncio.sleep(17)
        assert merged([await part.status() for part in parts])["routers"] == {"second": {"booked": 0}}
        for task in ticking:
            task.cancel()

    run(scenario())


def test_a_follower_gets_changes_as_they_come_and_everything_if_it_fell_behind():
    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig(max_blocks=20))
        await directory.publish("a", [snapshot(0, b"0")])
        first = await directory.follow("", 0, 0)
        waiting = asyncio.create_task(directory.follow(first.epoch, first.version, 30))
        await asyncio.sleep(0)
        await directory.publish("a", [BlockEvents(1, packed(b"1"))])
        assert (await asyncio.wait_for(waiting, 5)).changes == (Change("a", packed(b"1")),)
        for number in range(2, 5):
            await directory.publish("a", [BlockEvents(number, packed(bytes([number])))])
        late = await directory.follow(first.epoch, first.version, 0)
        assert late.whole
        assert names(late.changes[0].stored) == {b"0", b"1", b"\x02", b"\x03", b"\x04"}

    run(scenario())


def test_everything_travels_in_pieces(monkeypatch):
    monkeypatch.setattr(prefix_directory, "PIECE", 3)

    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig())
        await directory.publish("a", [snapshot(0, *(bytes([number]) for number in range(8)))])
        update = await directory.follow("", 0, 0)
        assert [len(change.stored) for change in update.changes] == [24, 24, 16]  # bytes
        index, follower = copy()
        index.add("gone", packed(b"1"))
        await follower.apply(update)
        assert index.replicas == ("a",)
        assert index.blocks_of("a") == 8

    run(scenario())


def test_staleness_is_told_from_the_oldest_change():
    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig())
        _, follower = copy(now=10.0)
        assert await catch_up(follower, directory) is None
        await directory.publish("a", [BlockEvents(0, snapshot=True, at=7.0), BlockEvents(1, packed(b"1"), at=9.0)])
        assert await catch_up(follower, directory) == 3.0
        assert await catch_up(follower, directory) is None
        await directory.publish("a", [BlockEvents(2, packed(b"2"), at=11.0)])  # a clock that goes ahead of ours
        assert await catch_up(follower, directory) == 0.0

    run(scenario())


KEYS = st.binary(min_size=2, max_size=2)
EVENTS = st.tuples(st.sampled_from("ab"), st.sampled_from(TIERS), st.sets(KEYS, max_size=6), st.booleans())


@given(st.lists(EVENTS, max_size=15), st.integers(2, 4), st.integers(1, 30))
def test_shards_together_know_what_one_directory_knows(events, shards, log_blocks):
    async def scenario() -> None:
        config = DirectoryConfig()
        whole, parts = PrefixDirectory(config), [PrefixDirectory(config) for _ in range(shards)]
        (expected, alone), found = copy(), PrefixIndex()
        followers = [IndexFollower(found, Shard(number, shards), lambda: 0.0) for number in range(shards)]
        sequences = dict.fromkeys("ab", 0)
        for replica in "ab":
            for directory in (whole, *parts):
                await directory.publish(replica, [snapshot(0)])
        for step, (replica, tier, keys, evict) in enumerate(events):
            sequences[replica] += 1

            def event(mine: set[bytes], replica: str = replica, tier: str = tier, evict: bool = evict) -> BlockEvents:
                stored, evicted = (b"", packed(*mine)) if evict else (packed(*mine), b"")
                return BlockEvents(sequences[replica], stored, evicted, tier=tier)

            await whole.publish(replica, [event(keys)])
            for follower, directory in zip(followers, parts, strict=True):
                await directory.publish(replica, [event({key for key in keys if follower._shard.owns(key)})])
                if step % 3 == 0:
                    await catch_up(follower, directory)
        for follower, directory in zip([alone, *followers], [whole, *parts], strict=True):
            await catch_up(follower, directory)
        for replica in "ab":
            assert names(found.keys_of(replica)) == names(expected.keys_of(replica))
            assert found.blocks_of(replica) == expected.blocks_of(replica)
        for each in unpack(expected.keys_of("a") + expected.keys_of("b")):
            assert found.longest_match([each]) == expected.longest_match([each])
        both = merged([await part.status() for part in parts])
        one = await whole.status()
        assert both["replicas"] == one["replicas"]
        assert both["blocks"] == one["blocks"]

    with patch.object(prefix_directory, "LOG_PART", DirectoryConfig().max_blocks // log_blocks):
        run(scenario())


def test_a_shard_that_starts_anew_leaves_the_others_alone():
    async def scenario() -> None:
        keys = [bytes([number]) * 8 for number in range(20)]
        index = PrefixIndex()
        followers = [IndexFollower(index, Shard(number, 2), lambda: 0.0) for number in range(2)]
        directories = [PrefixDirectory(DirectoryConfig(shards=2)) for _ in range(2)]
        for number, directory in enumerate(directories):
            mine = [key for key in keys if Shard(number, 2).owns(key)]
            await directory.publish("a", [snapshot(0, *mine)])
            await catch_up(followers[number], directory)
        assert set(unpack(index.keys_of("a"))) == set(keys)
        await catch_up(followers[0], PrefixDirectory(DirectoryConfig(shards=2)))
        assert set(unpack(index.keys_of("a"))) == {each for each in keys if each[0] % 2}
        assert index.blocks_of("a") == 10

    run(scenario())


@pytest.mark.parametrize("shards", [1, 3])
def test_the_limits_hold_for_all_shards_together(shards):
    async def scenario() -> None:
        directories = [PrefixDirectory(DirectoryConfig(max_blocks=30, shards=shards)) for _ in range(shards)]
        for number, directory in enumerate(directories):
            await directory.publish("a", [snapshot(0, *(bytes([number, each]) for each in range(40)))])
        assert merged([await directory.status() for directory in directories])["blocks"] == 30

    run(scenario())


def test_an_update_survives_the_wire():
    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig())
        await directory.publish("a", [snapshot(0, b"12345678")])
        update = await directory.follow("", 0, 0)
        assert pickle.loads(pickle.dumps(update)) == update
        assert update.changes[0].stored == b"12345678"

    run(scenario())
