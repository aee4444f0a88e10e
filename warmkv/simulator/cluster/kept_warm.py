"""Touches of a simulated replica over vLLM: they keep marked prefixes warm, by the rule of `policies/keep_warm.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warmkv.policies.fair_queue import NO_TAG, Tag
from warmkv.policies.keep_warm import KeepWarm, KeptPrefix
from warmkv.simulator.cache.layout import NONE
from warmkv.simulator.cache.replica_cache import Name, ReplicaCache
from warmkv.simulator.cluster.clock import Alarm, Clock
from warmkv.simulator.engine.block_pool import BlockPool
from warmkv.simulator.engine.formation import Owner

if TYPE_CHECKING:
    from warmkv.simulator.cluster.replica import Job


@dataclass(slots=True, eq=False)
class Touch:
    """Request a prefix and one token more. It is no job: it is not billed, and prolongs no life."""

    names: tuple[Name, ...]  # of the prefix's blocks
    prompt: int  # tokens
    output: int = 1
    tenant: str = ""
    tag: Tag = NO_TAG
    computed: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0


class KeptWarm:
    """Stand between an engine and its replica, and add touches: one at a time, when one is due.

    `limit` are the blocks that are kept, `submit` hands the engine a touch. Whether one is due is looked at behind all
    that happens at a moment: vLLM has begun its next step when the replica hears of the last.
    """

    def __init__(
        self,
        inner: Owner[Job],
        clock: Clock,
        cache: ReplicaCache,
        pool: BlockPool[Any],
        limit: int,
        submit: Callable[[Touch], None],
    ) -> None:
        self._inner, self._clock, self._cache, self._pool, self._submit = inner, clock, cache, pool, submit
        self._warm: KeepWarm[Name, int] = KeepWarm(limit)
        self._alarm, self._touching = Alarm(self._look), False
        self._room = self._stored = 0  # as of the end of the last step, which is what vLLM has told by then

    def close(self) -> None:
        """Touch nothing more."""
        self._alarm.cancel()

    def begin(self, request: Job | Touch, now: float) -> float:
        """Look up a touched prefix; a job is the replica's matter."""
        if not isinstance(request, Touch):
            return self._inner.begin(request, now)
        request.computed = self._pool.found(request)
        return 0.0

    def prompt_computed(self, request: Job | Touch, now: float) -> None:
        """Note which prefixes a job has used and marked."""
        if isinstance(request, Touch):
            return
        self._inner.prompt_computed(request, now)
        if not request.num_output_tokens:  # else it was preempted after its first token
            self._follow(request, now)
        self._look_soon(now)

    def preempted(self, request: Job | Touch, now: float) -> None:
        """Leave a touch in the queue."""
        if not isinstance(request, Touch):
            self._inner.preempted(request, now)

    def end(self, request: Job | Touch, now: float) -> None:
        """Look whether another touch is due."""
        if isinstance(request, Touch):
            self._touching = False
        else:
            self._inner.end(request, now)
        self._look_soon(now)

    def _look_soon(self, now: float) -> None:
        self._room, self._stored = self._pool.free, self._pool.stored
        self._clock.set(self._alarm, now)

    def _follow(self, job: Job, now: float) -> None:
        prompt = job.blocks
        chain = job.names[: job.full_blocks]
        self._warm.used(chain, self._pool.stored)
        for write, mark in zip(prompt.writes, job.marks, strict=False):
            number = write.tail if write.tail != NONE else prompt.runs[write.runs - 1]
            blocks = mark.position // prompt.block_size
            if blocks and self._cache.is_marked(number, now):
                self._warm.keep(KeptPrefix(number, b"", chain[:blocks], (), mark.ttl), self._pool.stored)

    def _look(self, now: float) -> None:
        pool, cache = self._pool, self._cache

        def alive(prefix: KeptPrefix[Name, int]) -> bool:
            return cache.is_marked(prefix.mark, now)

        def held(prefix: KeptPrefix[Name, int]) -> bool:
            return all(map(pool.holds, prefix.chain))

        if not self._touching and (prefix := self._warm.due(self._stored, self._room, alive, held)) is not None:
            self._touching = True
            self._submit(Touch(prefix.chain, len(prefix.chain) * pool.size + 1))
