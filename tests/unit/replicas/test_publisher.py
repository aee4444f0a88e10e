"""Replica to directory: batched, in order, and whole again after any fault. The real publisher and directory."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.block_keys import key
from tests.clocks import run
from warmkv.config import DirectoryConfig
from warmkv.platform.prefix_directory import IndexFollower, PrefixDirectory
from warmkv.prefixes.index import HEARTBEAT_SECONDS, PUBLISH_SECONDS, TIERS, PrefixIndex, Shard
from warmkv.prefixes.mask_table import unpack
from warmkv.replicas.publisher import Publisher

CONFIG = DirectoryConfig()


class Store:
    """Blocks that come, move between tiers and go at random, as the engine's thread would tell."""

    def __init__(self, seed: int) -> None:
        self.blocks: dict[bytes, str] = {}
        self.random = random.Random(seed)
        self.publishers: list[Publisher] = []

    def churn(self) -> None:
        gone = set(self.random.sample(sorted(self.blocks), min(2, len(self.blocks))))
        tier = self.random.choice(TIERS)
        came = {key(bytes([self.random.randrange(50)])) for _ in range(3)} - gone
        for block in gone:
            del self.blocks[block]
        self.blocks.update(dict.fromkeys(came, tier))
        for publisher in self.publishers:
            publisher.delta(sorted(came), sorted(gone), tier)

    def snapshot(self, shard: int) -> None:
        by_tier = {name: [key for key, tier in self.blocks.items() if tier == name] for name in TIERS}
        self.publishers[shard].snapshot(by_tier)


@pytest.mark.parametrize(("seed", "shards"), [(0, 1), (1, 1), (2, 3)])
def test_followers_end_up_with_what_the_replicas_hold_whatever_fails(seed, shards):
    async def scenario() -> None:
        chance = random.Random(seed)
        directories = [PrefixDirectory(CONFIG) for _ in range(shards)]
        stores = {name: Store(seed + number) for number, name in enumerate("ab")}
        tasks = []
        for name, store in stores.items():
            for shard in range(shards):

                async def send(batches: Any, status: Any, name: str = name, shard: int = shard) -> bool:
                    if chance.random() < 0.2:
                        raise ConnectionError("the actor is away")
                    if chance.random() < 0.1 and batches:
                        batches = batches[1:]  # a report is lost
                    return await directories[shard].publish(name, batches, status)

                def ask(store: Store = store, shard: int = shard) -> None:
                    store.snapshot(shard)

                publisher = Publisher(send, ask, lambda: {"waiting": 0}, clock=lambda: 0.0, shard=Shard(shard, shards))
                store.publishers.append(publisher)
                tasks.append(asyncio.create_task(publisher.run()))

        copy = PrefixIndex()
        followers = [IndexFollower(copy, Shard(shard, shards), lambda: 0.0) for shard in range(shards)]

        async def follow() -> None:
            for follower, directory in zip(followers, directories, strict=True):
                await follower.apply(await directory.follow(follower.epoch, follower.version, 0))

        for step in range(200):
            stores[chance.choice("ab")].churn()
            if step == 100:
                directories[-1] = PrefixDirectory(CONFIG)  # it died and came back empty
            await asyncio.sleep(0.001)
            await follow()

        def equal() -> bool:
            found = {
                name: {key: tier for tier, keys in tiers.items() for key in unpack(keys)}
                for name, tiers in copy.contents().items()
            }
            return all(found.get(name, {}) == store.blocks for name, store in stores.items())

        for _ in range(500):
            if equal():
                break
            await asyncio.sleep(0.01)
            await follow()
        assert equal()
        for task in tasks:
            task.cancel()

    run(scenario())


def test_a_status_goes_with_a_snapshot_and_once_in_a_heartbeat():
    """It is made anew for each, which costs more than the blocks of a step."""

    async def scenario() -> None:
        sent: list[tuple[list[bool], bool]] = []

        async def send(batches: Any, status: Any) -> bool:
            sent.append(([batch.snapshot for batch in batches], status is not None))
            return True

        publisher = Publisher(send, lambda: publisher.snapshot({"device": [key(b"a")]}), dict, clock=lambda: 0.0)
        publishing = asyncio.create_task(publisher.run())
        for _ in range(3):
            await asyncio.sleep(1.1 * PUBLISH_SECONDS)
            publisher.delta([key(b"b")], [], "device")
        await asyncio.sleep(2 * PUBLISH_SECONDS)
        publisher.snapshot({"device": [key(b"a")]})
        await asyncio.sleep(2 * PUBLISH_SECONDS)
        publishing.cancel()
        assert sent == [([True], True), *[([False], False)] * 3, ([True], True)]
        sent.clear()
        publishing = asyncio.create_task(publisher.run())
        await asyncio.sleep(3.5 * HEARTBEAT_SECONDS)
        publishing.cancel()
        assert [status for _, status in sent] == [True] * len(sent)
        assert len(sent) >= 3

    run(scenario())
