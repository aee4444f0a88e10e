"""One simulated replica: a queue, an engine (`warmkv/simulator/engine/`) and a prefix cache in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from warmkv.config import EngineConfig
from warmkv.policies import batching
from warmkv.policies.contents import Contents
from warmkv.policies.fair_queue import NO_TAG, FairQueue, Tag
from warmkv.policies.prefix_cache import sum_positions
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.record import Mark, RequestRecord
from warmkv.prefixes.record_columns import RecordColumns
from warmkv.simulator.cache.layout import Prompt
from warmkv.simulator.cache.measures import TimeWeightedGauge
from warmkv.simulator.cache.replica_cache import NOTHING, Found, Name, ReplicaCache
from warmkv.simulator.cluster.clock import Alarm, Clock
from warmkv.simulator.cluster.kept_warm import KeptWarm
from warmkv.simulator.engine.batch import Load
from warmkv.simulator.engine.block_pool import BlockPool
from warmkv.simulator.engine.formation import NEVER, BatchFormation
from warmkv.simulator.engine.limits import Limits
from warmkv.simulator.engine.mixed import MixedBudget
from warmkv.simulator.engine.shortest_first import ShortestFirst
from warmkv.simulator.steps.costs import FREE, PhaseCosts, StepKind, StepTimes, keys_per_token

ONE_GROUP = ("",)
NO_COSTS = PhaseCosts(FREE, FREE)
WHOLE_CACHE = StepKind.of(PolicySpec())


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the cluster, and what became of it. Times are virtual seconds."""

    number: int  # among all, in the order of the records
    records: RecordColumns = field(repr=False)  # all
    tenant: str
    block_size: int
    arrival: float
    marks: tuple[Mark, ...]
    prompt: int  # tokens
    output: int  # tokens
    marked: bool  # whether breakpoints say what is read and written, as in the Messages API
    shares: bool  # whether it reads or writes prefixes that are billed by breakpoint
    allowed: int  # tokens that its slot is sized for
    kind: StepKind
    kept: int  # entries of its slot at the hand-off
    capacity: int  # entries it may grow to; 0 if it draws at most one token
    recomputed: int  # prompt tokens that are computed even if they are warm
    slot_bytes: int
    workspace_bytes: int
    sum_bytes: int  # of the column sums of a token, if its policy needs them
    endless: bool  # whether it may go on beyond the context
    blocks: Prompt = field(init=False, repr=False)  # once the prompts are laid out
    gateway: int = 0  # the one that it comes to
    generated: tuple[Name, ...] = ()  # blocks that end within its answer, those that are part of other prompts
    groups: tuple[str, ...] = ONE_GROUP  # of replicas that can serve it

    replica: str = ""  # the last that had it; stays empty if it was refused
    started: float = NEVER
    first: float = NEVER  # its first token, or its end if it draws none
    finished: float = NEVER
    hit: int = 0  # position of the highest breakpoint that could be read at its start
    blocks_found: int = 0  # leading full blocks that were there then
    reused: int = 0  # prompt tokens that were not computed
    written: int = 0  # position of the highest mark that was stored
    read: int = 0  # position up to which it is billed as a reader
    retries: int = 0  # how often it was sent again because its replica failed before its first token
    resumptions: int = 0  # and after it: then another computes the prompt again and decodes what was sent
    failed: bool = False  # its replica failed, and it was not sent again
    too_large: bool = False  # for every replica that there was

    known_keys: Sequence[int] | None = field(default=None, repr=False)

    # On the replica that has it now.
    names: tuple[Name, ...] = field(default=(), repr=False)  # of its full blocks, where the engine has one pool of them
    submitted: float = NEVER
    tag: Tag = NO_TAG
    costs: PhaseCosts = NO_COSTS  # of its steps, known when it is admitted
    load: Load | None = None  # of the batch, likewise
    keys_per_token: float = math.inf  # likewise
    found: Found = NOTHING
    warm: int = 0  # prompt tokens that need not be computed
    lead: float = 0.0  # seconds by which its first step is longer
    passed: int = 0  # how often another was admitted before it
    computed: int = 0  # prompt tokens that are warm or computed so far
    num_output_tokens: int = 0  # as `mixed.MixedRequest` has them
    num_preemptions: int = 0

    @property
    def record(self) -> RequestRecord:
        """Return the record, which is made anew each time."""
        return self.records[self.number]

    @property
    def keys(self) -> Sequence[int]:
        """Return the numbers of the hashes of its full blocks, which are kept until it ends."""
        if self.known_keys is None:
            (numbers,) = self.records.hashes.of(self.number)
            self.known_keys = numbers.tolist()
        return self.known_keys

    @property
    def full_blocks(self) -> int:
        return int(self.records.hashes.counts[self.number])

    @property
    def is_sibling(self) -> bool:
        """Return True for a further answer to a prompt, which is billed with the first one."""
        return bool(self.records.are_siblings(slice(self.number, self.number + 1))[0])


class SimulatedReplica:
    """A replica in the clock's time. `submit` hands it a job, whose times it sets and whose memory it frees at its end.

    It forms batches as warmkv's engine, or with `mixed` limits as vLLM. `tier_seconds` are those of a warm token that
    is read from host memory, in its first step, and from disk, before it. `stores` tells whether prompts are kept.
    """

    def __init__(
        self,
        clock: Clock,
        name: str,
        config: EngineConfig,
        times: StepTimes,
        cache: ReplicaCache,
        slots: TimeWeightedGauge,
        *,
        fast_forward: bool = True,
        began: Callable[[Job], None] = lambda job: None,
        ended: Callable[[Job], None] = lambda job: None,
        tier_seconds: tuple[float, float] = (0.0, 0.0),
        mixed: Limits | None = None,
        stores: bool = True,
        whole_cache: StepKind = WHOLE_CACHE,
        one_pool: bool = False,  # of blocks for requests and prefixes, as vLLM has; with `mixed`
        keep_warm: int = 0,  # blocks of such a pool that touches keep
    ) -> None:
        self.name, self.cache, self.stores = name, cache, stores
        self._clock, self._config, self._times, self._slots = clock, config, times, slots
        self._ended, self._began = ended, began
        self._overhead = times.overhead
        self._tier_seconds = tier_seconds if any(tier_seconds) else None
        self.ongoing = 0
        self._costs: dict[StepKind, tuple[PhaseCosts, Load, float]] = {}  # of all requests so far
        alarm = self._alarm = Alarm(lambda now: None)
        wake = partial(clock.set, alarm)
        self.waiting: FairQueue[Job] = FairQueue()
        self._engine: BatchFormation[Job]
        self._pool: BlockPool[Job] | None = None
        # Of a step, where requests wait by priority: that of an engine over vLLM.
        self._step_tokens = config.tokens_per_step(on_gpu=False) if one_pool and mixed is not None else 0
        self._kept: KeptWarm | None = None
        if mixed is None:
            self._engine = ShortestFirst(
                self, self.waiting, wake, fast_forward,
                step_tokens=config.tokens_per_step(on_gpu=False), max_slots=config.max_slots, room=config.kv_limit,
            )  # fmt: skip
        else:
            if one_pool and stores and mixed.blocks is not None:
                self._pool = BlockPool(mixed.blocks, mixed.kv_block, attrgetter("names"), self._lost)
                if keep_warm:
                    self._kept = KeptWarm(self, clock, cache, self._pool, keep_warm, self._touch)
            owner = self._kept or self
            self._engine = MixedBudget(
                owner, self.waiting, wake, fast_forward, limits=mixed, costs=times.of(whole_cache), pool=self._pool
            )
        alarm.ring, cache.came = self._engine.resume, self._blocks_came

    @property
    def full(self) -> bool:
        """Return True if it has as many requests as it takes."""
        return self.ongoing >= self._config.max_slots + self._config.max_queue

    def ever_fits(self, job: Job) -> bool:
        tokens = job.prompt + (1 if job.endless else job.output)
        too_long = self._config.max_context is not None and tokens > self._config.max_context
        return not too_long and self._engine.ever_fits(job)

    def expect(self) -> None:
        """Announce a job that is submitted once its fetched blocks have come."""
        self.ongoing += 1

    def submit(self, job: Job, *, expected: bool = False) -> None:
        now = self._clock.now
        job.replica, job.submitted, job.num_output_tokens, job.passed = self.name, now, 0, 0
        if not expected:
            self.ongoing += 1
        delay = 0
        if self._pool is not None:
            job.names = (*self.cache.names(job.blocks), *job.generated)
        if self._step_tokens and not job.resumptions:
            warm = self.cache.resident(job.blocks) * job.block_size if self.stores else 0
            delay = batching.delay(job.prompt - warm, self._step_tokens)
        job.tag = self.waiting.push(job, job.tenant, job.prompt + job.allowed, delay=delay)  # fair by tokens
        self._engine.arrived(job, now)

    def _blocks_came(self, now: float) -> None:
        """Let a request that waits be admitted with the next step: of its prompt less may be lacking now."""
        if self.waiting:
            self._engine.cut(now)

    def restore(self, contents: Contents, wall: float) -> None:
        """Begin with what a running replica held at the Unix time `wall`, which is now."""
        names = self.cache.restore(contents, self._clock.now, wall)
        if self._pool is not None:
            self._pool.fill(names[::-1])

    def fail(self) -> list[Job]:
        """Stop for good; return the requests that it had, once."""
        self._alarm.cancel()
        if self._kept is not None:
            self._kept.close()
        if not self.ongoing:
            return []
        self.ongoing = 0
        running = [job for job in self._engine.running if isinstance(job, Job)]
        for job in running:  # what they read may be handed over
            self.cache.release(job.found)
            job.found = NOTHING
        self._slots.change(-sum(job.slot_bytes for job in running), self._clock.now)
        return [*running, *(job for job in self.waiting if isinstance(job, Job))]

    # --- what the engine tells

    def stored_tokens(self, job: Job, now: float) -> int:
        """Return the tokens of the leading blocks of a prompt that are stored in any tier."""
        cache = self.cache
        if cache.deadlines.due <= now:
            cache.expire(now)
        return cache.resident(job.blocks) * job.block_size

    def waits_for_prefix(self, job: Job, computing: Iterable[Job], now: float, *, ever: bool = False) -> bool:
        """Return True if a prompt waits for one of those that are computed; with `ever`, also if it only will later.

        Runs tell what prompts have in common: those that begin alike have the same run at the same place.
        """
        cache, runs, size = self.cache, job.blocks.runs, job.block_size
        prompt: batching.WaitingPrompt | None = None
        if cache.deadlines.due <= now:
            cache.expire(now)
        for other in computing:
            theirs, common = other.blocks.runs, 0
            while common < len(runs) and common < len(theirs) and runs[common] == theirs[common]:
                common += 1
            if not common or cache.holds_all(runs[common - 1]):
                continue
            if prompt is None:
                reusable = max(0, job.prompt - job.recomputed)
                prompt = batching.WaitingPrompt(job.prompt, cache.resident(job.blocks), reusable)
            sums: Sequence[int] | None = None
            if job.sum_bytes:
                sums = sum_positions(other.prompt, size, other.marks) if other.sum_bytes else ()
            leaves = cache.leaves(runs[:common], other.marks, size)
            lacking = 0 if ever else other.prompt - other.computed
            if batching.waits_for(prompt, lacking, leaves, size, sums):
                return True
        return False

    def begin(self, job: Job, now: float) -> float:
        """Look up the prefix of an admitted request; return the seconds that reading files of it takes."""
        job.costs, job.load, job.keys_per_token = self._costs.get(job.kind) or self._learn(job.kind)
        if self._pool is not None:
            job.computed = self._pool.found(job)
            if job.started < job.submitted:  # else it was preempted, and what it finds now is not told
                job.warm = job.computed
            if job.first == NEVER:
                job.started = now
            self._slots.change(job.slot_bytes, now)
            return 0.0
        cache = self.cache
        if cache.deadlines.due <= now:
            cache.expire(now)
        found = job.found = cache.match(job.blocks, now)
        job.warm = max(0, min(found.tokens, job.prompt - job.recomputed))
        if job.sum_bytes:
            job.warm = cache.sums(found, job.blocks, job.warm, now)
        job.computed = job.warm
        if job.first == NEVER:
            job.started, job.hit, job.blocks_found, job.reused = now, found.hit, found.blocks, job.warm
        self._slots.change(job.slot_bytes, now)
        if self._tier_seconds is None or not job.warm:
            return 0.0
        blocks = cache.leading(job.blocks, found.blocks, now)
        device, memory, anywhere = (min(count * job.block_size, job.warm) for count in blocks)
        host, disk = self._tier_seconds
        job.lead = host * (memory - device)
        return disk * (anywhere - memory)

    def _learn(self, kind: StepKind) -> tuple[PhaseCosts, Load, float]:
        """Return the step costs of a kind, its load, shared by all kinds that decode at the same cost, and its keys."""
        costs = self._times.of(kind)
        self._costs[kind] = costs, self._engine.batch.load_of(costs.decode), keys_per_token(costs.prefill)
        return self._costs[kind]

    def prompt_computed(self, job: Job, now: float) -> None:
        """Store the prompt's blocks and give the first token."""
        cache = self.cache
        if self._pool is not None and job.first == NEVER:
            self._read(job, now)
        if cache.deadlines.due <= now:
            cache.expire(now)
        written = cache.store(job.blocks, job.marks, now, job.found, job.submitted)
        if job.sum_bytes:
            cache.store_sums(job.blocks, job.marks, job.warm, job.sum_bytes, now)
        cache.release(job.found)
        job.found = NOTHING
        if job.first == NEVER:
            job.first, job.written = now + self._overhead, written
        if not job.num_output_tokens:  # else it was preempted after its first token
            self._began(job)

    def _read(self, job: Job, now: float) -> None:
        """Bill what of an engine's own cache was found and may be read, which is told with the first token.

        An engine computes the last token of every prompt again, and the whole block that it is in.
        """
        size = job.block_size
        last = job.warm == (job.prompt - 1) // size * size
        found = job.found = self.cache.match(job.blocks, now, (job.prompt if last else job.warm) // size)
        job.hit, job.blocks_found, job.reused = found.hit, found.blocks, min(job.warm, found.tokens)

    def _touch(self, touch: Any) -> None:
        """Queue a touch among the jobs: the engine serves both alike."""
        touch.tag = self.waiting.push(touch, "", 0.0)
        self._engine.arrived(touch, self._clock.now)

    def _lost(self, name: Hashable) -> None:
        if isinstance(name, tuple) and isinstance(name[0], int):
            self.cache.lost(name, self._clock.now)

    def preempted(self, job: Job, now: float) -> None:
        self.cache.release(job.found)
        job.found = NOTHING
        self._slots.change(-job.slot_bytes, now)

    def end(self, job: Job, now: float) -> None:
        if job.generated and self._pool is not None:
            self.cache.keep(job.generated[-1], job.tenant, now)
        job.finished = now + self._overhead
        self._slots.change(-job.slot_bytes, now)
        self.ongoing -= 1
        self._ended(job)
