"""What a replica writes to disk before it ends, and what the next one in its folder finds."""

from __future__ import annotations

import math

import pytest

from tests.unit.replicas.block_store.harness import BLOCK, TOKEN, Harness, Prompt
from warmkv.replicas.block_store.spill import AT_ONCE, spill

FILE = BLOCK * TOKEN + 4096


def tokens(number: int, blocks: int = 1) -> list[int]:
    return [number] * (blocks * BLOCK)


def spilled(harness: Harness, until: float = math.inf) -> int:
    return spill(harness.store, until, lambda seconds: harness.lanes.run("write", 1))


def test_what_only_memory_held_is_found_after_a_restart(tmp_path):
    harness = Harness(tmp_path)
    prompts = [Prompt("a", tokens(number, 3)) for number in range(2)]
    for prompt in prompts:
        harness.write(prompt, {10: "1h"})  # with a tail
    held = harness.keys(0) | harness.keys(1)
    assert not harness.keys(2)
    assert spilled(harness) == len(held)
    assert spilled(harness) == 0
    harness.restart(crash=False)
    assert harness.keys(2) == held
    for prompt in prompts:
        harness.look_up(prompt, [10])
        assert harness.held[-1][1].match.hit == 10
    harness.check_at_rest()


def test_of_more_than_fits_what_would_be_evicted_last_is_kept_and_colder_files_give_way(tmp_path):
    harness = Harness(tmp_path, disk={"memory_bytes": 3 * FILE, "path": tmp_path})
    harness.write(Prompt("a", tokens(0)), {})
    assert spilled(harness) == 1
    for number in range(1, 5):
        harness.wait(1)
        harness.write(Prompt("a", tokens(number)), {})
    assert spilled(harness) == 2  # three came and one left
    hottest = {Prompt("a", tokens(number)).hashes[0] for number in (2, 3, 4)}
    harness.restart(crash=False)
    assert harness.keys(2) == hottest
    harness.check_at_rest()


def spilled_in_time(harness: Harness, writes: int) -> int:
    """Spill until so many blocks are written; return the blocks that came to the disk."""
    until, written = harness.now + 2, 0

    def sleep(seconds: float) -> None:
        nonlocal written
        written += 1
        harness.lanes.run("write", 1)
        if written == writes:
            harness.now = until

    return spill(harness.store, until, sleep)


@pytest.mark.parametrize(("chains", "blocks", "expected"), [(200, 1, AT_ONCE + 10), (1, 300, 2 * AT_ONCE)])
def test_it_ends_in_time_and_what_it_began_is_whole(tmp_path, chains, blocks, expected):
    harness = Harness(tmp_path, memory_bytes=400 * BLOCK * TOKEN, disk={"memory_bytes": 400 * FILE, "path": tmp_path})
    for number in range(chains):
        harness.write(Prompt("a", tokens(number, blocks)), {})
    count = spilled_in_time(harness, 10)
    assert count == expected
    assert len(harness.lanes.jobs["write"]) == count - 10
    harness.restart(crash=False)
    assert len(harness.keys(2)) == count
    harness.check_at_rest()


def test_what_is_on_disk_already_and_hot_does_not_give_way_to_what_is_colder(tmp_path):
    harness = Harness(tmp_path, memory_bytes=20 * BLOCK * TOKEN, disk={"memory_bytes": 10 * FILE, "path": tmp_path})
    hot = Prompt("a", tokens(0, 4))
    harness.write(hot, {})
    assert spilled(harness) == 4
    for number in range(1, 9):
        harness.wait(1)
        harness.write(Prompt("a", tokens(number)), {})
    harness.wait(1)
    harness.look_up(hot, [])
    harness.finish(0, store=False)
    assert spilled(harness) == 6
    harness.restart(crash=False)
    assert harness.keys(2) >= set(hot.hashes)
    assert len(harness.keys(2)) == 10
    harness.check_at_rest()


def test_of_a_chain_that_is_too_long_the_beginning_is_kept(tmp_path):
    harness = Harness(tmp_path, memory_bytes=20 * BLOCK * TOKEN, disk={"memory_bytes": 10 * FILE, "path": tmp_path})
    long = Prompt("a", tokens(0, 12))
    harness.write(long, {})
    assert spilled(harness) == 10
    harness.restart(crash=False)
    assert harness.keys(2) == set(long.hashes[:10])
    harness.check_at_rest()


def test_without_a_disk_or_time_nothing_is_written(tmp_path):
    harness = Harness(tmp_path)
    harness.write(Prompt("a", tokens(0)), {})
    assert spilled(harness, until=harness.now) == 0
    assert not harness.files()
    harness.store.places[-1].folder, folder = None, harness.store.places[-1].folder
    assert spilled(harness) == 0
    harness.store.places[-1].folder = folder


def test_what_has_expired_is_not_written(tmp_path):
    harness = Harness(tmp_path)
    harness.write(Prompt("a", tokens(0)), {})
    harness.now += 31
    assert spilled(harness) == 0
