"""A mixed token budget, as vLLM schedules: every step decodes one token of each running sequence and fills the rest of
`max_num_batched_tokens` with prompts in the order of the queue, whose tags vLLM is told as priorities.

Sequences take KV in blocks as they grow. Where a step finds no free block, the sequence with the largest tag gives its
blocks back, waits with its tag and computes its tokens anew (preemption by recompute); where there is none for a chunk
of a prompt, that prompt does. Nothing is compressed: a sequence keeps the KV of all its
tokens. With a `BlockPool` prefixes are found in the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

from warmkv.policies.fair_queue import FairQueue, Tag
from warmkv.simulator.engine.block_pool import BlockPool
from warmkv.simulator.engine.formation import BatchFormation, EngineRequest, Owner
from warmkv.simulator.engine.kv_blocks import KVBlocks
from warmkv.simulator.engine.limits import Limits
from warmkv.simulator.steps.costs import PhaseCosts, StepCost, batch_seconds


class MixedRequest(EngineRequest, Protocol):
    tenant: str
    tag: Tag  # of the queue
    num_output_tokens: int  # not kept up to date while it decodes
    num_preemptions: int


Request = TypeVar("Request", bound=MixedRequest)
Work = tuple[int, int, int]  # steps, tokens computed, context read: what `StepCost` charges for


def _tag(request: MixedRequest) -> Tag:
    return request.tag


class MixedBudget(BatchFormation[Request]):
    """Form batches within a token budget, under one set of step times for all requests."""

    def __init__(
        self,
        owner: Owner[Request],
        waiting: FairQueue[Request],
        wake: Callable[[float], object],
        fast_forward: bool,
        *,
        limits: Limits,
        costs: PhaseCosts,
        pool: BlockPool[Request] | None = None,
    ) -> None:
        super().__init__(owner, wake, fast_forward)
        self._queue, self._limits, self._costs = waiting, limits, costs
        cost = costs.decode
        self._linear = cost if costs.prefill == cost and isinstance(cost, StepCost) and not (cost.d or cost.e) else None
        self._load = self.batch.load_of(cost)
        self._blocks: KVBlocks[Request] | None = pool
        if pool is None and limits.blocks is not None:
            self._blocks = KVBlocks(limits.blocks, limits.kv_block)
        self._running: dict[Request, None] = {}  # in the order of admission
        self._prefilling: Request | None = None  # at most one: a prompt is cut only where it used up a step's budget
        self._computed: list[Request] = []  # whose last prompt tokens are in the step that runs now
        self._step = 0, 0  # tokens and context of the step that runs now
        self.work: Work = (0, 0, 0)  # done so far

    @property
    def running(self) -> list[Request]:
        return list(self._running)

    @property
    def work_ahead(self) -> Work:
        """Return the work that is done when the steps that run now are over."""
        steps, tokens, read = self.work
        if count := self._run_steps:
            batch = self.batch.size
            more = batch * (count * (count + 1) // 2)
            return steps + count, tokens + count * batch, read + count * self._load.context + more
        return (steps + 1, tokens + self._step[0], read + self._step[1]) if self._running else self.work

    def ever_fits(self, request: Request) -> bool:
        return self._blocks is None or self._blocks.ever_fit(request.prompt + max(1, request.output) - 1)

    def _joins(self, request: Request) -> bool:
        return True

    def _steps(self) -> Generator[None, float, None]:
        now = yield
        batch, blocks, queue = self.batch, self._blocks, self._queue
        while True:
            if batch.size and self._fast_forward and self._prefilling is None and not (queue and self._admissible()):
                steps = batch.unchanged() if blocks is None else blocks.steps_that_fit(batch.unchanged())
                if steps > 1:
                    self._run(now, steps, batch.lines())
                    now = yield
                    self.work, steps, self._run_steps = self.work_ahead, self._run_steps, 0
                    if blocks is not None:
                        blocks.grow(steps)
                    self._end_decoded(steps, now)
                    continue
            if self._running or queue:
                self._wake(now + self._begin_step(now))
                now = yield
                self.work = self.work_ahead
                self._end_decoded(1, now)
                self._draw_first(now)
            else:
                self._idle = True
                now = yield

    def _begin_step(self, now: float) -> float:
        """Choose what the next step computes; return its seconds."""
        batch, blocks, preempted = self.batch, self._blocks, False
        if blocks is not None:
            while not blocks.steps_that_fit(1):
                blocks.exhaust()
                self._preempt(max(self._running, key=_tag), blocks, now)
                preempted = True
            blocks.grow(1)
        budget, reading = self._limits.max_batched_tokens - batch.size, 0.0
        chunks: list[tuple[int, int]] = []  # of prompts: tokens, and context up to their end
        if self._prefilling is not None:
            chunk = self._compute(self._prefilling, budget, chunks)
            budget -= chunk
            if not chunk and blocks is not None:
                self._preempt(self._prefilling, blocks, now)
                preempted = True
        while self._queue and budget > 0 and not preempted and self._prefilling is None and self._admissible():
            request = self._queue.pop()
            self._running[request] = None
            reading += self._owner.begin(request, now)
            if blocks is not None:
                blocks.begin(request)
            budget -= self._compute(request, budget, chunks)

        tokens, context = batch.size, self._load.context + batch.size
        loads = [(self._costs.decode, tokens, context)] if tokens else []
        for chunk, end in chunks:
            tokens, context = tokens + chunk, context + end
        self._step = tokens, context
        if self._linear is not None:
            return reading + self._linear.seconds(tokens, context)
        return reading + batch_seconds([*loads, *((self._costs.prefill, chunk, end) for chunk, end in chunks)])

    def _admissible(self) -> bool:
        """Return True if the request that is next may begin."""
        if len(self._running) >= self._limits.max_num_seqs:
            return False
        request = self._queue.peek()
        return self._blocks is None or self._blocks.fit(request)

    def _compute(self, request: Request, budget: int, chunks: list[tuple[int, int]]) -> int:
        """Compute as much of a request as the budget allows; return the tokens, 0 if there are no blocks for them."""
        target = request.prompt + request.num_output_tokens
        chunk = min(budget, target - request.computed)
        if self._blocks is not None and not self._blocks.extend(request, request.computed + chunk):
            return 0
        request.computed += chunk
        chunks.append((chunk, request.computed))
        if request.computed == target:
            self._computed.append(request)
            self._prefilling = None
        else:
            self._prefilling = request
        return chunk

    def _draw_first(self, now: float) -> None:
        """Draw the token that comes with the end of a prompt, or of a recomputation."""
        computed, self._computed = self._computed, []
        for request in computed:
            self._owner.prompt_computed(request, now)
            request.num_output_tokens += 1
            held, left = request.computed, request.output - request.num_output_tokens
            if left > 0:
                if self._blocks is not None:
                    self._blocks.join(held)
                self.batch.join(request, self._load, held, held + left, left)
            else:
                self._end(request, now)

    def _end_decoded(self, steps: int, now: float) -> None:
        for request in self.batch.advance(steps):
            request.num_output_tokens = request.output
            request.computed = request.prompt + request.output - 1  # the last token drawn has no KV
            if self._blocks is not None:
                self._blocks.leave(request.computed)
            self._end(request, now)

    def _end(self, request: Request, now: float) -> None:
        del self._running[request]
        if self._blocks is not None:
            self._blocks.release(request)
        self._owner.end(request, now)

    def _preempt(self, request: Request, blocks: KVBlocks[Request], now: float) -> None:
        del self._running[request]
        if request is self._prefilling:
            self._prefilling = None
        else:
            request.num_output_tokens = request.output - self.batch.remove(request)
            request.computed = request.prompt + request.num_output_tokens - 1
            blocks.leave(request.computed)
        blocks.release(request)
        request.computed = 0
        request.num_preemptions += 1
        self._queue.put_back(request, request.tenant, request.tag)
        self._owner.preempted(request, now)
