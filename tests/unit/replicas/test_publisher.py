"""Replica to directory: batched, in order, and whole again after any fault. The real publisher and directory."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from warmkv.config import DirectoryConfig
from warmkv.platform.prefix_directory import PrefixDirectory, apply_change
from warmkv.prefixes.index import PrefixIndex
from warmkv.replicas.publisher import Publisher

CONFIG = DirectoryConfig(publish_seconds=0.001, heartbeat_seconds=0.05, silence_seconds=5)


class Store:
    """Blocks that come and go at random, as the engine's thread would tell."""

    def __init__(self, seed: int) -> None:
        self.blocks: set[bytes] = set()
        self.random = random.Random(seed)
        self.publisher: Publisher

    def churn(self) -> None:
        new = {bytes([self.random.randrange(50)]) for _ in range(3)} - self.blocks
        gone = set(self.random.sample(sorted(self.blocks), min(2, len(self.blocks))))
        self.blocks = (self.blocks | new) - gone
        self.publisher.delta(sorted(new - gone), sorted(gone))

    def snapshot(self) -> None:
        self.publisher.snapshot(sorted(self.blocks))


@pytest.mark.parametrize("seed", range(3))
def test_followers_end_up_with_what_the_replicas_hold_whatever_fails(seed):
    async def scenario() -> None:
        chance = random.Random(seed)
        directory = PrefixDirectory(CONFIG)
        stores = {name: Store(seed + number) for number, name in enumerate("ab")}
        tasks = []
        for name, store in stores.items():

            async def send(batches: Any, status: Any, name: str = name) -> bool:
                if chance.random() < 0.2:
                    raise ConnectionError("the actor is away")
                if chance.random() < 0.1 and batches:
                    batches = batches[1:]  # a report is lost
                return await directory.publish(name, batches, status)

            store.publisher = Publisher(CONFIG, send, store.snapshot, lambda: {"waiting": 0})
            tasks.append(asyncio.create_task(store.publisher.run()))

        copy, epoch, version = PrefixIndex(), "", 0
        for step in range(200):
            stores[chance.choice("ab")].churn()
            if step == 100:
                directory = PrefixDirectory(CONFIG)  # it died and came back empty
            await asyncio.sleep(0.001)
            update = await directory.follow(epoch, version, 0)
            if update.whole:
                copy = PrefixIndex()
            for change in update.changes:
                apply_change(copy, change)
            epoch, version = update.epoch, update.version

        def equal() -> bool:
            return all(set(copy.keys_of(name)) == store.blocks for name, store in stores.items())

        for _ in range(500):
            if equal():
                break
            await asyncio.sleep(0.01)
            update = await directory.follow(epoch, version, 0)
            if update.whole:
                copy = PrefixIndex()
            for change in update.changes:
                apply_change(copy, change)
            epoch, version = update.epoch, update.version
        assert equal()
        for task in tasks:
            task.cancel()

    asyncio.run(scenario())
