"""One simulated replica: continuous batching in virtual time.

It follows the live engine: fair among tenants; one prompt at a time, admitted when its slot and its workspace
fit; a step computes at most one chunk of that prompt and then one token of every sequence that decodes. While
nothing joins or leaves the batch, many steps are taken at once: their times add up in closed form.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from warmkv.config import EngineConfig
from warmkv.policies.fair_queue import FairQueue
from warmkv.policies.prefix_cache import Match
from warmkv.prefixes.record import Mark, RequestRecord
from warmkv.simulator.cache.measures import TimeWeightedGauge
from warmkv.simulator.cache.replica_cache import ReplicaCache
from warmkv.simulator.cache.runs import RunCache
from warmkv.simulator.cluster.clock import Alarm, Clock
from warmkv.simulator.steps.costs import FREE, Line, PhaseCosts, StepCost, StepKind, StepTimes, run_seconds, steps_until

NEVER = -1.0
NO_MATCH = Match()
NO_COSTS = PhaseCosts(FREE, FREE)


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the cluster, and what became of it. Times are virtual seconds."""

    number: int  # among all, in the order of the records
    record: RequestRecord
    arrival: float
    marks: tuple[Mark, ...]
    kind: StepKind
    kept: int  # entries of its slot at the hand-off
    capacity: int  # entries it may grow to; 0 if it draws at most one token
    recomputed: int  # prompt tokens that are computed even if they are warm
    slot_bytes: int
    workspace_bytes: int
    sum_bytes: int = 0  # of the column sums of a token, if its policy needs them
    endless: bool = False  # whether it may go on beyond the context
    shares: bool = False  # whether it reads or writes prefixes that are billed by breakpoint
    gateway: int = 0  # the one that it comes to
    waits: bool = False  # for the turn before it: its arrival is not known before that ends
    think: float = 0.0  # seconds from that end to its arrival
    following: Job | None = field(default=None, repr=False)  # the turn that waits for this one

    replica: str = ""  # the last that had it; stays empty if it was refused
    started: float = NEVER
    first: float = NEVER  # its first token, or its end if it draws none
    finished: float = NEVER
    match: Match = NO_MATCH  # found at its start
    reused: int = 0  # prompt tokens that were not computed
    written: int = 0  # position of the highest mark that was stored
    read: int = 0  # position up to which it is billed as a reader
    retries: int = 0  # how often it was sent again because its replica failed before its first token
    resumptions: int = 0  # and after it: then another computes the prompt again and decodes what was sent
    failed: bool = False  # its replica failed, and it was not sent again

    # On the replica that has it now.
    submitted: float = NEVER
    costs: PhaseCosts = NO_COSTS  # of its steps, known when it is admitted
    found: Match = NO_MATCH
    warm: int = 0  # prompt tokens that need not be computed
    computed: int = 0  # prompt tokens that are warm or computed so far

    @property
    def key(self) -> str:
        """Its name among all jobs, which records need not have."""
        return str(self.number)

    @property
    def work(self) -> int:
        """Tokens that it may take in all, by which the queue is fair among tenants."""
        return self.record.input_tokens + max(self.record.output_tokens, self.record.max_tokens)

    @property
    def decode_steps(self) -> int:
        """Steps after the one that gives the first token."""
        return max(0, self.record.output_tokens - 1)


@dataclass(slots=True, eq=False)
class Load:
    """Sequences that decode at one cost, in numbers that advance without touching them."""

    roofline_terms: Sequence[StepCost]  # of that cost
    batch: int = 0
    context: int = 0  # entries they hold
    growing: int = 0  # how many take one more entry per step


class Replica:
    """A process in SimPy's time. `submit` hands it a job; it sets the job's times and frees what it held at its end.

    Sequences of all kinds decode in one step, as in the live engine; each kind adds what it costs (`batch_seconds`).

    `tier_seconds` pass before a prefill for each warm token that is read from host memory, and from disk.
    """

    def __init__(
        self,
        clock: Clock,
        name: str,
        config: EngineConfig,
        times: StepTimes,
        cache: ReplicaCache | RunCache,
        slots: TimeWeightedGauge,
        fast_forward: bool = True,
        ended: Callable[[Job], None] = lambda job: None,
        began: Callable[[Job], None] = lambda job: None,
        tier_seconds: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.name, self.cache = name, cache
        self._clock, self._config, self._times, self._slots = clock, config, times, slots
        self._room = config.kv_limit
        self._fast_forward, self._ended, self._began = fast_forward, ended, began
        self._overhead = times.overhead
        self._tier_seconds = tier_seconds if any(tier_seconds) else None
        self._reading = 0.0  # seconds that reading takes, before the first chunk of the prompt that has been admitted
        self.in_flight = 0
        self._expected = 0  # of them, those whose blocks are on their way
        self.waiting: FairQueue[Job] = FairQueue()
        self._prefilling: Job | None = None
        self._used = 0  # bytes of slots and workspace

        # The batch that decodes.
        self._steps = 0  # decode steps taken so far
        self._batch = 0
        self._kinds: dict[StepKind, tuple[PhaseCosts, Load]] = {}  # of all requests so far
        self._loads: list[Load] = []  # those that have sequences now
        self._ends: list[tuple[int, int, Job, Load, int, bool]] = []
        """(step after which it ends, order, job, its load, entries that it holds then, whether it grows till then)"""
        self._fulls: list[tuple[int, int, Load]] = []  # (step after which a slot grows no more, order, its load)
        self._order = 0

        # The sleep that an arrival may cut short.
        self._now = 0.0  # when the last alarm rang that counted
        self._idle = True
        self._run_since, self._run_steps = 0.0, 0  # a run of decode steps alone
        self._run_lines: Sequence[Line] = ()
        life = self._process()
        next(life)
        self._alarm = Alarm(life.send)

    @property
    def full(self) -> bool:
        """Whether the next request would be refused."""
        free = self._config.max_slots - self._batch - (self._prefilling is not None)
        return len(self.waiting) + self._expected - free >= self._config.max_queue

    def ever_fits(self, job: Job) -> bool:
        tokens = job.record.input_tokens + job.record.output_tokens
        if job.endless:
            tokens = job.record.input_tokens + 1
        too_long = self._config.max_context is not None and tokens > self._config.max_context
        return not too_long and job.slot_bytes + job.workspace_bytes <= self._room

    def expect(self) -> None:
        """A job will be submitted, once blocks for it have come."""
        self.in_flight += 1
        self._expected += 1

    def submit(self, job: Job, *, expected: bool = False) -> None:
        now = self._clock.now
        job.replica, job.submitted = self.name, now
        if expected:
            self._expected -= 1
        else:
            self.in_flight += 1
        self.waiting.push(job, job.record.tenant, job.work)
        if self._idle:
            self._idle = False
            self._clock.set(self._alarm, now)
        elif self._run_steps and self.waiting.peek() is job and self._fits(job):
            self._cut_run(now)

    def fail(self) -> list[Job]:
        """Stop for good and lose everything; the requests that it had."""
        self._alarm.cancel()
        computing = [] if self._prefilling is None else [self._prefilling]
        decoding = [end[2] for end in self._ends]
        self._slots.change(-sum(job.slot_bytes for job in computing + decoding), self._clock.now)
        return decoding + computing + list(self.waiting)

    # --- the process

    def _process(self) -> Generator[None, float, None]:
        """What the replica does; at every `yield` it waits for its alarm, or idle for a request."""
        chunk, waiting, clock = self._config.prefill_chunk, self.waiting, self._clock
        now = self._now = yield
        while True:
            job = self._prefilling
            if job is None and waiting and self._fits(waiting.peek()):
                job = self._admit()
            if job is not None:
                left, lead, self._reading = job.record.input_tokens - job.computed, self._reading, 0.0
                if left > chunk:
                    whole = (left - 1) // chunk  # chunks but the last
                    count = self._limit(whole)
                    lead += self._chunk_seconds(job, count) + self._decode_seconds(count)
                    pauses = count < whole or self._ends_in(count) or not self._fast_forward
                    if pauses:
                        clock.set(self._alarm, now + lead)
                        now = self._now = yield
                    job.computed += count * chunk
                    self._advance(count)
                    if pauses:
                        continue
                lead += self._last_chunk_seconds(job, job.record.input_tokens - job.computed)
                clock.set(self._alarm, now + lead)
                now = self._now = yield
                self._hand_off(job)
                if self._batch and waiting and self._fits(waiting.peek()):  # else the run has this step, too
                    clock.set(self._alarm, now + self._decode_seconds(1))
                    now = self._now = yield
                    self._advance(1)
            elif self._batch:
                steps = self._run_steps = self._limit(self._ends[0][0] - self._steps)
                lines = self._run_lines = self._lines()
                self._run_since = now
                clock.set(self._alarm, now + run_seconds(lines, steps))
                now = self._now = yield
                steps, self._run_steps = self._run_steps, 0
                self._advance(steps)
            else:
                self._idle = True
                now = self._now = yield

    def _cut_run(self, now: float) -> None:
        """A request arrived that fits: end the run at the first step that ends at or after this moment."""
        since = self._run_since
        steps = steps_until(self._run_lines, since, now, self._run_steps)
        if steps < self._run_steps:
            self._run_steps = steps
            self._clock.set(self._alarm, max(now, since + run_seconds(self._run_lines, steps)))

    # --- requests come and go

    def _fits(self, job: Job) -> bool:
        needed = self._used + job.slot_bytes + job.workspace_bytes
        return self._batch < self._config.max_slots and needed <= self._room

    def _admit(self) -> Job:
        """Begin the prefill of the request that is next, which fits."""
        now = self._now
        job = self._prefilling = self.waiting.pop()
        job.costs, _ = self._kinds.get(job.kind) or self._learn(job.kind)
        cache = self.cache
        if cache.due <= now:
            cache.expire(now)
        found = job.found = cache.match(job.record, now)
        job.warm = max(0, min(found.tokens, job.record.input_tokens - job.recomputed))
        if job.sum_bytes:
            job.warm = cache.sums(found, job.record, job.warm, now)
        job.computed = job.warm
        if self._tier_seconds is not None and job.warm:
            self._reading = self._read_seconds(job, now, *self._tier_seconds)
        if job.first == NEVER:
            job.started, job.match, job.reused = now, found, job.warm
        self._used += job.slot_bytes + job.workspace_bytes
        self._slots.change(job.slot_bytes, now)
        return job

    def _read_seconds(self, job: Job, now: float, host: float, disk: float) -> float:
        """What it takes to bring the warm blocks of a prompt to the device."""
        blocks = self.cache.leading(job.record, job.found.blocks, now)
        device, memory, anywhere = (min(count * job.record.block_size, job.warm) for count in blocks)
        return host * (memory - device) + disk * (anywhere - memory)

    def _learn(self, kind: StepKind) -> tuple[PhaseCosts, Load]:
        """What the steps of a kind take, and its load: that of all kinds which decode at the same cost."""
        costs = self._times.of(kind)
        alike = (load for _, load in self._kinds.values() if load.roofline_terms == costs.decode.roofline_terms)
        found = self._kinds[kind] = (costs, next(alike, None) or Load(costs.decode.roofline_terms))
        return found

    def _hand_off(self, job: Job) -> None:
        """From prefill to decode: store the prompt's blocks, free the workspace, give the first token."""
        now, cache = self._now, self.cache
        if cache.due <= now:
            cache.expire(now)
        written = cache.store(job.record, job.marks, now, job.found, job.submitted)
        if job.sum_bytes:
            cache.store_sums(job.record, job.marks, job.warm, job.sum_bytes, now)
        cache.release(job.found)
        self._used -= job.workspace_bytes
        self._prefilling = None
        if job.first == NEVER:
            job.first, job.written = now + self._overhead, written
        self._began(job)
        steps = job.decode_steps
        if not steps:
            self._finish(job)
            return
        _, load = self._kinds[job.kind]
        if not load.batch:
            self._loads.append(load)
        grown = min(job.capacity - job.kept, steps)  # entries that its slot takes yet: it may end before that is full
        self._batch += 1
        load.batch += 1
        load.context += job.kept
        self._order += 1
        heapq.heappush(self._ends, (self._steps + steps, self._order, job, load, job.kept + grown, grown == steps))
        if grown > 0:
            load.growing += 1
            if grown < steps:
                heapq.heappush(self._fulls, (self._steps + grown, self._order, load))

    def _finish(self, job: Job) -> None:
        now = self._now
        job.finished = now + self._overhead
        self._used -= job.slot_bytes
        self._slots.change(-job.slot_bytes, now)
        self.in_flight -= 1
        self._ended(job)

    # --- many steps at once

    def _limit(self, steps: int) -> int:
        """How many of the next `steps` steps the batch stays as it is for; one if stepping."""
        if not self._fast_forward:
            return 1
        if self._ends and (end := self._ends[0][0] - self._steps) < steps:
            steps = end
        if self._fulls and (full := self._fulls[0][0] - self._steps) < steps:
            steps = full
        return steps

    def _ends_in(self, steps: int) -> bool:
        """Whether a sequence ends within the next steps."""
        return bool(self._ends) and self._ends[0][0] <= self._steps + steps

    def _lines(self) -> list[Line]:
        """Under each roof the seconds of the batch's next decode step, and what every further one takes more."""
        loads = self._loads
        if len(loads) == 1 and len(loads[0].roofline_terms) == 1:  # as below, in fewer steps, for what there mostly is
            (load,) = loads
            (cost,) = load.roofline_terms
            entry = cost.c + cost.d * load.batch
            first = cost.a + (cost.b * load.batch + entry * (load.context + load.growing))
            return [(first, entry * load.growing)]
        lines: list[Line] = []
        for roof, _ in enumerate(loads[0].roofline_terms):
            empty = added = growth = 0.0
            for load in loads:  # `batch_seconds`, which this is, would take generators for every run
                cost, batch = load.roofline_terms[roof], load.batch
                entry = cost.c + cost.d * batch  # seconds for each entry of a slot
                if cost.a > empty:
                    empty = cost.a
                added += cost.b * batch + entry * (load.context + load.growing)
                growth += entry * load.growing
            lines.append((empty + added, growth))
        return lines

    def _decode_seconds(self, steps: int) -> float:
        """Seconds of the next decode steps of an unchanged batch."""
        return run_seconds(self._lines(), steps) if self._batch else 0.0

    def _chunk_seconds(self, job: Job, count: int) -> float:
        """Seconds of the next whole chunks of a prompt; each reads all of the prompt up to its own end."""
        chunk = self._config.prefill_chunk
        end = job.computed + chunk
        roofs = job.costs.prefill.roofline_terms
        return run_seconds([(cost.seconds(chunk, end), (cost.c + cost.d * chunk) * chunk) for cost in roofs], count)

    def _last_chunk_seconds(self, job: Job, tokens: int) -> float:
        """Seconds of a prompt's last chunk and of its hand-off to a slot, where it has one."""
        prompt = job.record.input_tokens
        seconds = job.costs.prefill.seconds(tokens, prompt)
        if job.capacity and job.costs.hand_off is not FREE:
            seconds += job.costs.hand_off.seconds(job.kept, prompt)
        return seconds

    def _advance(self, steps: int) -> None:
        if not self._batch:
            return
        self._steps += steps
        for load in self._loads:
            load.context += load.growing * steps
        while self._fulls and self._fulls[0][0] == self._steps:
            heapq.heappop(self._fulls)[2].growing -= 1
        while self._ends and self._ends[0][0] == self._steps:
            _, _, job, load, entries, growing = heapq.heappop(self._ends)
            self._batch -= 1
            load.batch -= 1
            load.context -= entries
            load.growing -= growing
            if not load.batch:
                self._loads.remove(load)
            self._finish(job)
