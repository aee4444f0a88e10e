"""The router: which replica a request goes to, by where its longest prefix is warm, unless that one is overloaded.

It lives in every gateway, with its own copy of the prefix index, so that a decision makes no call. A choice is booked
in the same breath and counts as load until the request ends, or concurrent ones would all pick the same replica.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from warmkv import recorders, telemetry
from warmkv.config import Config
from warmkv.platform.gateway.resume import Attempt
from warmkv.platform.named_actors import NAMESPACE
from warmkv.platform.prefix_directory import FOLLOW_SECONDS, IndexFollower, directory_name
from warmkv.policies.dispatcher import Dispatcher
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.prefixes.index import PUBLISH_SECONDS, Shard
from warmkv.replicas.protocol import GenerateRequest

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # between attempts to reach a directory that is away


class Router:
    """The decisions of a gateway, in its event loop. Any fault falls back to the shortest queue and is counted.

    Requests are known by a number that the caller chooses. `clock` is in seconds.
    """

    def __init__(
        self, config: Config, recorder: recorders.Recorder, random: Random, clock: Callable[[], float]
    ) -> None:
        self._config, self._recorder = config, recorder
        self._dispatcher = Dispatcher(config.routing, config.engine.max_slots, random, clock, late=True)
        self._slots = {name: group.engine.max_slots for name, group in config.groups().items()}
        self._lifetimes = Lifetimes.of(config.prefix_cache)

    def taking(self, replicas: Sequence[str]) -> int:
        """Count those of the replicas whose circuit is not open."""
        return len(self._dispatcher.breaker.taking(replicas))

    def load(self, replica: str) -> int:
        """Return the requests of this gateway that a replica has."""
        return self._dispatcher.in_flight.load.get(replica, 0)

    def eligible(self, attempt: Attempt, replicas: Sequence[str]) -> Sequence[str]:
        """Return those of the replicas, at least one, that an attempt may go to."""
        for earlier in attempt.given_up:
            if earlier.booking is not None:
                self._dispatcher.in_flight.give_up(earlier.booking)
        return self._dispatcher.eligible(replicas, _failed(attempt))

    def choose(
        self, number: int, attempt: Attempt, replicas: Sequence[str], *, moves: bool = True, whole: bool = True
    ) -> list[str]:
        """Rank the replicas, at least one, for an attempt, which is booked on the best; the attempt learns of it.

        `moves` says that each of them can fetch blocks from any other, `whole` that there are no others.
        """
        try:
            return self._choose(number, attempt, replicas, moves, whole)
        except Exception:
            log.exception("routing failed; taking the shortest queue")
            self._recorder.add(telemetry.ROUTED, 1, reason="fault")
            order = sorted(replicas, key=self.load)
            self._dispatcher.in_flight.book(number, order[0])
            return order

    def sent(self, number: int, replica: str) -> None:
        """Book a request where it was sent, which may be another replica than the best."""
        self._dispatcher.in_flight.book(number, replica)

    def release(self, number: int, replica: str | None = None) -> None:
        """Forget a booking; with `replica`, only if it is there."""
        self._dispatcher.in_flight.release(number, replica)

    def admitted(self, replica: str, ongoing: int) -> None:
        """Take a replica's word of how many requests it has, one of ours that it has just taken included."""
        if self._config.cluster.gateways > 1:
            self._dispatcher.in_flight.told(replica, ongoing)

    def disconnected(self, replica: str) -> None:
        """Forget what is booked on a replica whose connection is lost."""
        self._dispatcher.in_flight.drop(replica)

    def set_slots(self, groups: Mapping[str, str]) -> None:
        """Count by the groups of the replicas that run how many sequences each decodes together."""
        slots = {replica: self._slots[group] for replica, group in groups.items()}
        usual = self._config.engine.max_slots
        self._dispatcher.slots_of = {replica: own for replica, own in slots.items() if own != usual}

    def gone(self, replica: str, left: Collection[str]) -> None:
        """Forget a replica that does not run any more; `left` are the others, of all groups."""
        self._dispatcher.index.drop_replica(replica)
        self._dispatcher.breaker.keep(left)

    def _choose(self, number: int, attempt: Attempt, replicas: Sequence[str], moves: bool, whole: bool) -> list[str]:
        dispatcher, request = self._dispatcher, attempt.request
        choice = dispatcher.choose(
            number,
            request.hashes,
            replicas,
            wanted=request.replica,
            avoid=_failed(attempt) if attempt.given_up else (),
            leaves=self._leaves(request),
            config=attempt.routing,
            session=request.session.encode(),
            moves=moves,
            whole=whole,
        )
        if choice.fetch != request.fetch:
            attempt.request = replace(request, fetch=choice.fetch)

        def began(cached_tokens: int) -> None:
            dispatcher.in_flight.began(number)
            reads = request.sampling.prompt_logprobs is None  # else all of it is computed
            if reads and attempt.replica == choice.order[0]:
                self._compare(choice.expected * self._config.prefix_cache.block_size, cached_tokens)

        attempt.booking, attempt.began = number, began
        attempt.ended = lambda outcome: dispatcher.ended(number, attempt.replica, outcome)
        self._recorder.add(telemetry.ROUTED, 1, reason=choice.reason)
        if request.hashes:
            self._recorder.observe(telemetry.MATCH, choice.expected / len(request.hashes), reason=choice.reason)
        asyncio.get_running_loop().call_soon(dispatcher.mend, choice, request.hashes)  # not before the decision
        return choice.order

    def _compare(self, expected: int, cached: int) -> None:
        """Count the tokens that were expected to be warm in the chosen replica, against those that were."""
        record = self._recorder.add
        record(telemetry.EXPECTED_TOKENS, min(expected, cached), outcome="found")
        record(telemetry.EXPECTED_TOKENS, max(0, expected - cached), outcome="missing")
        record(telemetry.EXPECTED_TOKENS, max(0, cached - expected), outcome="unexpected")

    def _leaves(self, request: GenerateRequest) -> int:
        """Return the leading blocks of a prompt that the replica which computes it will hold."""
        cache = self._config.prefix_cache
        if not cache.enabled:
            return 0
        lifetimes = request.lifetimes or self._lifetimes
        return lifetimes.stored_blocks(request.marks, len(request.hashes), cache.block_size)

    # --- the prefix directory

    @property
    def shards(self) -> list[Shard]:
        """Return those of the directory, each of which is to be followed."""
        shards = self._config.directory.shards
        return [Shard(number, shards) for number in range(shards)]

    async def follow(self, shard: Shard, name: str) -> None:
        """Keep the copy of the index up to date with a shard; `name` is this gateway's, for the directory's status.

        While the directory is away, the copy goes on serving.
        """
        import ray

        config, label = self._config, str(shard.number)
        follower = IndexFollower(self._dispatcher.index, shard, time.time)
        directory: Any = None
        while True:
            try:
                actor = directory_name(config.cluster.application, shard.number)
                directory = directory or await asyncio.to_thread(ray.get_actor, actor, namespace=NAMESPACE)
                booked = sum(self._dispatcher.in_flight.load.values())
                update = await directory.follow.remote(follower.epoch, follower.version, FOLLOW_SECONDS, name, booked)
                staleness = await follower.apply(update)
                self._recorder.set(telemetry.FOLLOWING, 1, shard=label)
                if staleness is not None:
                    self._recorder.observe(telemetry.STALENESS, staleness)
                await asyncio.sleep(PUBLISH_SECONDS)  # many replicas' reports come together
            except Exception as error:
                log.warning("the prefix directory cannot be reached: %s", error)
                self._recorder.set(telemetry.FOLLOWING, 0, shard=label)
                directory = None
                await asyncio.sleep(RETRY_SECONDS)


def _failed(attempt: Attempt) -> set[str]:
    """Return the replicas that have failed a request, or were full."""
    return {earlier.replica for earlier in attempt.given_up if earlier.replica is not None}
