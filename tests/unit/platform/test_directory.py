"""The prefix directory without Ray: order, gaps, limits, silence, and followers that fall behind."""

from __future__ import annotations

import asyncio
from typing import Any

from warmkv.config import DirectoryConfig
from warmkv.platform.prefix_directory import Change, PrefixDirectory, apply_change
from warmkv.platform.router import Bookings
from warmkv.prefixes.index import PrefixIndex
from warmkv.replicas.protocol import BlockEvents


def run(scenario: Any) -> Any:
    return asyncio.run(scenario)


def snapshot(number: int, *blocks: bytes) -> BlockEvents:
    return BlockEvents(number, blocks, snapshot=True)


def test_a_replica_that_is_not_known_is_asked_for_a_snapshot():
    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig())
        assert not await directory.publish("a", [], {})
        assert not await directory.publish("a", [BlockEvents(0, (b"1",))])
        assert await directory.publish("a", [snapshot(1, b"1", b"2"), BlockEvents(2, (b"3",), (b"2",))])
        assert (await directory.status())["replicas"]["a"]["blocks"] == 2

    run(scenario())


def test_a_gap_asks_for_a_snapshot_and_keeps_what_came_before_it():
    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig())
        await directory.publish("a", [snapshot(0, b"1")])
        assert not await directory.publish("a", [BlockEvents(1, (b"2",)), BlockEvents(3, (b"4",))])
        assert (await directory.status())["replicas"]["a"]["blocks"] == 2
        assert await directory.publish("a", [snapshot(4, b"9")])
        update = await directory.follow("", 0, 0)
        assert update.changes == (Change("a", (b"9",), reset=True),)

    run(scenario())


def test_memory_is_bounded_and_what_is_left_out_is_counted():
    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig(max_blocks=3))
        await directory.publish("a", [snapshot(0, b"1", b"2")])
        await directory.publish("b", [snapshot(0, b"1", b"2")])
        status = await directory.status()
        assert [status["replicas"][name]["blocks"] for name in "ab"] == [2, 1]
        assert status["left_out"] == 1
        await directory.publish("a", [BlockEvents(1, (b"7",), (b"1", b"2"))])
        await directory.publish("b", [BlockEvents(1, (b"8",))])
        status = await directory.status()
        assert [status["replicas"][name]["blocks"] for name in "ab"] == [1, 2]

    run(scenario())


def test_a_silent_replica_is_forgotten():
    async def scenario() -> None:
        now = [0.0]
        directory = PrefixDirectory(DirectoryConfig(silence_seconds=10), clock=lambda: now[0])
        await directory.publish("a", [snapshot(0, b"1")])
        now[0] = 9.0
        await directory.publish("b", [snapshot(0, b"1")])
        copy = PrefixIndex()
        update = await directory.follow("", 0, 0)
        for change in update.changes:
            apply_change(copy, change)
        now[0] = 11.0
        assert list((await directory.status())["replicas"]) == ["b"]
        for change in (await directory.follow(update.epoch, update.version, 0)).changes:
            apply_change(copy, change)
        assert copy.longest_match([b"1"]) == {"b": 1}

    run(scenario())


def test_a_follower_gets_changes_as_they_come_and_everything_if_it_fell_behind():
    async def scenario() -> None:
        directory = PrefixDirectory(DirectoryConfig(log_events=2))
        await directory.publish("a", [snapshot(0, b"0")])
        first = await directory.follow("", 0, 0)
        waiting = asyncio.create_task(directory.follow(first.epoch, first.version, 30))
        await asyncio.sleep(0)
        await directory.publish("a", [BlockEvents(1, (b"1",))])
        assert (await asyncio.wait_for(waiting, 5)).changes == (Change("a", (b"1",)),)
        for number in range(2, 5):
            await directory.publish("a", [BlockEvents(number, (bytes([number]),))])
        late = await directory.follow(first.epoch, first.version, 0)
        assert late.changes[0].reset
        assert set(late.changes[0].stored) == {b"0", b"1", b"\x02", b"\x03", b"\x04"}

    run(scenario())


def test_a_booking_counts_once_however_often_it_is_made_or_released():
    bookings = Bookings()
    bookings.book("x", "a")
    bookings.book("x", "b")  # Serve took another replica than the first choice
    bookings.book("y", "b")
    assert bookings.load == {"b": 2}
    bookings.release("x")
    bookings.release("x")
    bookings.release("unknown")
    assert bookings.load == {"b": 1}
    bookings.release("y")
    assert bookings.load == {}
