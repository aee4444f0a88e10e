"""A server that batches continuously, as vLLM schedules: every step decodes one token of each running sequence and
fills the rest of a token budget with prompts, first come, first served.

Sequences take KV in blocks as they grow. Where a step finds no free block, the sequence that was admitted last gives
its blocks back, waits at the head of the queue and computes its tokens anew (preemption with recompute). While nothing
joins or leaves the batch, many steps are taken at once: their times add up in closed form.

Pure and without a clock: `Server.run(until)` moves virtual time on.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from warmkv.faults import UserError
from warmkv.simulator.steps.costs import Line, StepCost, run_seconds, steps_until

NEVER = -1.0
WAITING = -1  # admission number of a sequence that is not in the batch


class BatchingError(UserError):
    """Limits, or a request under them, with which no server could run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server may do in a step and hold at a time. Raises BatchingError for limits under which nothing runs."""

    max_num_seqs: int
    max_batched_tokens: int
    kv_tokens: int | None = None  # None: never short of memory
    kv_block: int = 16  # tokens
    whole_prompts: bool = True  # admit a sequence only if there are blocks for all its prompt, not only its first chunk

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.kv_block < 1:
            raise BatchingError("max_num_seqs and kv_block must be at least 1")
        if self.max_batched_tokens < self.max_num_seqs:
            raise BatchingError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "every sequence takes a token of a step"
            )
        if self.kv_tokens is not None and self.kv_tokens < self.kv_block:
            raise BatchingError(f"kv_tokens ({self.kv_tokens}) must hold a block of {self.kv_block}")

    @property
    def blocks(self) -> int | None:
        return None if self.kv_tokens is None else self.kv_tokens // self.kv_block


Work = tuple[int, int, int]  # steps, tokens computed, context read: what `StepCost` charges for
NONE: Work = (0, 0, 0)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request, and what became of it. Times are virtual seconds, NEVER until they are known."""

    arrival: float
    prompt: int  # tokens, at least 1
    output: int  # tokens, at least 1
    cached: int = 0  # leading prompt tokens whose KV need not be computed when it is first admitted

    scheduled: float = NEVER  # start of the first step that computes some of it
    first: float = NEVER  # end of the step that gives its first token
    finished: float = NEVER
    preemptions: int = 0
    noted: float = NEVER  # end of the step during which it arrived, or its arrival

    # All that the server had done when it was noted, at its first token and at its end.
    work_before: Work = NONE
    work_first: Work = NONE
    work_finished: Work = NONE

    drawn: int = 0  # tokens; not kept up to date while it decodes
    computed: int = 0  # tokens with KV; likewise
    admission: int = WAITING

    @property
    def target(self) -> int:
        """Tokens to compute before the next one is drawn."""
        return self.prompt + self.drawn


class Server:
    """Sequences are added in the order of arrival; `run(until)` starts every step that begins before `until`."""

    def __init__(self, cost: StepCost, limits: Limits, *, fast_forward: bool = True) -> None:
        self.now = 0.0
        self.preemptions = 0
        self.waiting: deque[Sequence] = deque()
        self._cost, self._limits, self._fast_forward = cost, limits, fast_forward
        self._prefilling: Sequence | None = None  # at most one: a prompt is cut only where it used up a step's budget
        self._free = limits.blocks  # KV blocks

        # Work done so far.
        self._steps = 0
        self._tokens = 0
        self._read = 0

        # The batch that decodes, in numbers that advance without touching its sequences.
        self._batch = 0
        self._context = 0  # tokens with KV, all together
        self._ends: list[tuple[int, int, Sequence]] = []  # heap: step of the last token, admission
        self._admissions = 0
        self._admitted: list[tuple[int, Sequence]] = []  # in order, to find who came last; only if blocks are limited
        self._phases = [0] * limits.kv_block  # sequences that need a new block in the step of that number, modulo

    @property
    def running(self) -> int:
        return self._batch + (self._prefilling is not None)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence at its arrival. Raises BatchingError if it could never fit."""
        if sequence.prompt < 1 or sequence.output < 1 or not 0 <= sequence.cached < sequence.prompt:
            raise BatchingError("a sequence needs a prompt that is not all cached, and at least one token of output")
        blocks = self._limits.blocks
        if blocks is not None and self._blocks(sequence.prompt + sequence.output - 1) > blocks:
            raise BatchingError(
                f"{sequence.prompt} + {sequence.output} tokens do not fit into {self._limits.kv_tokens} tokens of KV"
            )
        if not self.running and not self.waiting:
            self.now = max(self.now, sequence.arrival)
        sequence.noted, sequence.work_before = self.now, self.work
        self.waiting.append(sequence)

    @property
    def work(self) -> Work:
        return self._steps, self._tokens, self._read

    def run(self, until: float = math.inf) -> None:
        while self.now < until and (self._batch or self._prefilling or self.waiting):
            if self._fast_forward and self._prefilling is None and not self._may_admit():
                steps = self._unchanged(until)
                if steps > 1:
                    self._advance(steps)
                    continue
            self._step()

    # --- many steps at once ---------------------------------------------------------------------------------------

    def _may_admit(self) -> bool:
        if not self.waiting or self._batch >= self._limits.max_num_seqs:
            return False
        budget = self._limits.max_batched_tokens - self._batch
        return budget > 0 and self._chunk_fits(self.waiting[0], budget)

    def _chunk_fits(self, sequence: Sequence, budget: int) -> bool:
        if self._free is None:
            return True
        start = sequence.cached if sequence.scheduled == NEVER else 0
        needed = sequence.target if self._limits.whole_prompts else min(sequence.target, start + budget)
        return self._blocks(needed) <= self._free

    def _unchanged(self, until: float) -> int:
        """Steps until a sequence ends, a block is missing, or one begins at `until` or later."""
        steps = self._ends[0][0] - self._steps
        if until < math.inf:
            steps = steps_until(self._lines(), 0.0, until - self.now, steps)
        if self._free is not None:
            steps = min(steps, self._steps_with_blocks(steps))
        return steps

    def _lines(self) -> list[Line]:
        """Seconds of the next decode step of the batch, and what every further one takes more."""
        cost, batch = self._cost, self._batch
        return [(cost.seconds(batch, self._context + batch), (cost.c + cost.d * batch) * batch)]

    def _steps_with_blocks(self, most: int) -> int:
        """The largest number of steps, up to `most`, for which there are blocks."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self._blocks_for(middle) <= (self._free or 0):
                low = middle
            else:
                high = middle - 1
        return low

    def _blocks_for(self, steps: int) -> int:
        """New blocks that the batch takes in so many steps."""
        rounds, rest = divmod(steps, self._limits.kv_block)
        size = self._limits.kv_block
        return rounds * self._batch + sum(self._phases[(self._steps + step) % size] for step in range(rest))

    def _advance(self, steps: int) -> None:
        self.now += run_seconds(self._lines(), steps)
        if self._free is not None:
            self._free -= self._blocks_for(steps)
        self._steps += steps
        self._tokens += steps * self._batch
        self._read += steps * self._context + self._batch * (steps * (steps + 1) // 2)
        self._context += steps * self._batch
        self._end_sequences()

    # --- one step ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        preempted = self._make_room()
        tokens, context = self._batch, self._context + self._batch
        budget = self._limits.max_batched_tokens - tokens
        if self._free is not None:
            self._free -= self._blocks_for(1)
        computed: list[Sequence] = []  # in full by this step
        current = self._prefilling
        if current is not None:
            if (chunk := self._take(current, budget)) == 0:
                self._preempt_last()
                preempted = True
            else:
                tokens, context, budget = tokens + chunk, context + current.computed, budget - chunk
                if current.computed == current.target:
                    computed.append(current)
                    self._prefilling = None
        while not preempted and budget > 0 and self._prefilling is None and self.waiting:
            if self._batch + len(computed) >= self._limits.max_num_seqs:
                break
            sequence = self.waiting[0]
            if not self._chunk_fits(sequence, budget):
                break
            self._admit(self.waiting.popleft())
            chunk = self._take(sequence, budget)
            tokens, context, budget = tokens + chunk, context + sequence.computed, budget - chunk
            if sequence.computed == sequence.target:
                computed.append(sequence)
            else:
                self._prefilling = sequence

        self.now += self._cost.seconds(tokens, context)
        self._steps += 1
        self._tokens += tokens
        self._read += context
        self._context += self._batch
        self._end_sequences()
        for sequence in computed:
            self._draw_first(sequence)

    def _admit(self, sequence: Sequence) -> None:
        if sequence.scheduled == NEVER:
            sequence.scheduled = self.now
            sequence.computed = sequence.cached
            if self._free is not None:
                self._free -= self._blocks(sequence.cached)
        self._admissions += 1
        sequence.admission = self._admissions
        if self._free is not None:
            self._admitted.append((sequence.admission, sequence))
            if len(self._admitted) > 2 * self.running + 64:  # those that ended are still listed
                self._admitted = [entry for entry in self._admitted if entry[1].admission == entry[0]]

    def _take(self, sequence: Sequence, budget: int) -> int:
        """Compute as much of a sequence as the budget allows; the tokens, or 0 if there are no blocks for them."""
        chunk = min(budget, sequence.target - sequence.computed)
        if self._free is not None:
            blocks = self._blocks(sequence.computed + chunk) - self._blocks(sequence.computed)
            if blocks > self._free:
                return 0
            self._free -= blocks
        sequence.computed += chunk
        return chunk

    def _draw_first(self, sequence: Sequence) -> None:
        """The token that comes with the end of a prompt, or of a recomputation."""
        sequence.drawn += 1
        if sequence.first == NEVER:
            sequence.first, sequence.work_first = self.now, self.work
        if sequence.drawn == sequence.output:
            self._end(sequence, sequence.computed)
            return
        self._batch += 1
        self._context += sequence.computed
        self._phases[self._phase(sequence.computed)] += 1
        end = self._steps + sequence.output - sequence.drawn
        heapq.heappush(self._ends, (end, sequence.admission, sequence))

    def _end_sequences(self) -> None:
        while self._ends and (self._ends[0][0] <= self._steps or self._ends[0][2].admission != self._ends[0][1]):
            end, admission, sequence = heapq.heappop(self._ends)
            if sequence.admission == admission:
                self._leave_batch(sequence, end)
                self._end(sequence, sequence.computed)

    def _end(self, sequence: Sequence, held: int) -> None:
        sequence.finished, sequence.work_finished = self.now, self.work
        sequence.admission = WAITING
        if self._free is not None:
            self._free += self._blocks(held)

    def _leave_batch(self, sequence: Sequence, end: int) -> None:
        """Take a decoding sequence out of the batch's numbers, and bring its own up to date."""
        sequence.drawn = sequence.output - (end - self._steps)
        sequence.computed = sequence.target - 1  # the last token drawn has no KV yet
        self._batch -= 1
        self._context -= sequence.computed
        self._phases[self._phase(sequence.computed)] -= 1

    # --- blocks -----------------------------------------------------------------------------------------------------

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._limits.kv_block)

    def _phase(self, computed: int) -> int:
        """When a decoding sequence that holds so many tokens now takes its next block: the step's number, modulo."""
        return (self._steps - computed) % self._limits.kv_block

    def _make_room(self) -> bool:
        """Preempt, last admitted first, until every decoding sequence can grow by a token; whether any was."""
        preempted = False
        while self._free is not None and self._blocks_for(1) > self._free:
            self._preempt_last()
            preempted = True
        return preempted

    def _preempt_last(self) -> None:
        admission, sequence = self._admitted.pop()
        while sequence.admission != admission:  # it has ended, or was preempted before
            admission, sequence = self._admitted.pop()
        if sequence is self._prefilling:
            self._prefilling = None
        else:
            end = next(end for end, number, _ in self._ends if number == admission)
            self._leave_batch(sequence, end)
        self._free = (self._free or 0) + self._blocks(sequence.computed)
        sequence.computed, sequence.admission = 0, WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)
