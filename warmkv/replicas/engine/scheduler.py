"""Schedule requests: fair among tenants, admitted when slot and workspace fit, within the tokens of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np
from torch import Tensor

from warmkv.config import EngineConfig
from warmkv.policies import batching, budgets
from warmkv.policies.compression.method import Method
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.fair_queue import FairQueue
from warmkv.policies.memory_plan import Limit
from warmkv.policies.prefix_cache import sum_positions
from warmkv.policies.slot_sizes import KVShape, slot_bytes, workspace_bytes
from warmkv.replicas.block_store import BlockStore, WarmPrefix
from warmkv.replicas.completions import Completions
from warmkv.replicas.engine.logits_processors import LogitsProcessor
from warmkv.replicas.protocol import (
    Failed,
    Finished,
    GenerateRequest,
    PromptLogprobs,
    Started,
    TokenLogprobs,
    UnservableRequestError,
)
from warmkv.replicas.refusals import check_queue, check_tokens
from warmkv.replicas.slots.slot import Slot, SlotRequest, SwappedSlot
from warmkv.replicas.slots.slots import SlotPool

# A drawn token comes alone or with its log-probabilities.
EngineEvent = PromptLogprobs | Started | int | TokenLogprobs | Finished | Failed
Emit = Callable[[EngineEvent], None]


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way through the engine."""

    request: GenerateRequest
    method: Method
    emit: Emit
    arrived: float
    random: np.random.Generator
    processor: LogitsProcessor | None = None  # of what changes its logits
    slot: Slot | None = None
    swapped: SwappedSlot | None = None  # its slot while another tenant's request has the room
    queued: float = 0.0  # when it began to wait
    passed: int = 0  # how often another was admitted before it
    slot_bytes: int = 0  # of its slot, and
    workspace_bytes: int = 0  # of its workspace while its prompt is computed
    match: WarmPrefix | None = None
    reused: int = 0  # prompt tokens whose KV was attached
    prefill: PrefillState | None = None
    attaching: PrefillState | None = None  # the same, while what is warm is copied there
    column_sums: dict[int, Tensor] = field(default_factory=dict)  # copies for the store, by prompt position
    admitted: float = 0.0
    number: float | None = None  # random number of the next token, kept until that is drawn: a step may be repeated
    num_output_tokens: int = 0  # tokens drawn so far
    last_token: int = 0
    logprobs: TokenLogprobs | None = None  # of the token just drawn, if the request wants them
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the chunk just computed, likewise

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def workspace(self) -> PrefillState:
        """Return the state of the prompt while it is computed."""
        assert self.prefill is not None
        return self.prefill

    @property
    def lacking_tokens(self) -> int:
        """Return the prompt tokens that are still to be computed once it is admitted."""
        if self.prefill is not None:
            return self.prompt_tokens - self.prefill.computed
        return self.prompt_tokens - (self.match.reused if self.match is not None else 0)

    @property
    def is_scored(self) -> bool:
        """Return True if log-probabilities of its prompt are wanted: cached KV has no logits and is not used."""
        return self.request.sampling.prompt_logprobs is not None

    @property
    def scored(self) -> range:
        """Return the positions of its chunk whose logits give the prompt's log-probabilities."""
        chunk = self.workspace.chunk
        return range(chunk.start, min(chunk.stop, self.prompt_tokens - 1)) if self.is_scored else range(0)

    @property
    def given(self) -> int | None:
        """Return the next token if another replica drew it; None if it is drawn here."""
        resume = self.request.resume
        return resume[self.num_output_tokens] if self.num_output_tokens < len(resume) else None

    @property
    def uniform(self) -> float:
        """Return the random number of the next token, in [0, 1)."""
        if self.number is None:
            self.number = self.random.random()
        return self.number

    def summed_positions(self, size: int) -> list[int]:
        """Return the positions up to which column sums of its prompt are stored; none if its policy needs none."""
        makes = budgets.needs_column_sums(self.method.spec, self.prompt_tokens)
        return sum_positions(self.prompt_tokens, size, self.request.marks) if makes else []

    @property
    def slot_request(self) -> SlotRequest | None:
        """Return the request for its slot; None if it draws at most the token that follows from the prompt itself."""
        new = self.request.sampling.max_tokens
        return SlotRequest(self.method.spec, self.prompt_tokens, new) if new > 1 else None


@dataclass(slots=True)
class Scheduler:
    """The queue, the prompts being computed and the sequences that decode, within the byte limit of the engine."""

    config: EngineConfig
    shape: KVShape
    max_context: int
    vocabulary: int
    pool: SlotPool
    store: BlockStore
    kv: Limit  # of slots and workspaces
    step_tokens: int
    keys_per_token: float = math.inf  # to which a token's attention takes as long as the rest of it
    waiting: FairQueue[Sequence] = field(default_factory=FairQueue)
    prefilling: dict[Sequence, None] = field(default_factory=dict)  # in the order of admission
    decoding: dict[Slot, Sequence] = field(default_factory=dict)
    admitting: Sequence | None = None  # whose memory is being claimed: what goes wrong meanwhile is its failure
    preempted: int = 0  # requests set aside so far
    completions: Completions = field(default_factory=Completions)

    def validate(self, sequence: Sequence) -> None:
        """Raise UnservableRequestError if a request is malformed or exceeds the context."""
        check_tokens(sequence.request, self.vocabulary)
        tokens, new, slot_request = sequence.prompt_tokens, sequence.request.sampling.max_tokens, sequence.slot_request
        if slot_request is not None and slot_request.is_endless(self.max_context):
            new = 1
        if tokens + new > self.max_context:
            raise UnservableRequestError(
                f"{tokens} prompt tokens and max_tokens {new} exceed the context of {self.max_context} tokens"
            )

    def size(self, sequence: Sequence) -> None:
        """Set the bytes of a request's slot and workspace. Raises UnservableRequestError if they can never fit."""
        tokens, slot_request = sequence.prompt_tokens, sequence.slot_request
        sequence.workspace_bytes = workspace_bytes(
            sequence.method.spec, self.shape, tokens, len(sequence.request.marks)
        )
        if slot_request is not None:
            sequence.slot_bytes = slot_bytes(slot_request.spec, self.shape, tokens, slot_request.new_tokens)
        needed = sequence.slot_bytes + sequence.workspace_bytes
        if needed > self.kv.bytes:
            raise UnservableRequestError(f"the request needs {needed} bytes of KV memory, engine.kv_bytes is {self.kv}")

    def check_queue(self, sequence: Sequence, arriving: int) -> None:
        """Raise QueueFullError if too many wait; `arriving` requests are on their way to the queue."""
        free = self.config.max_slots - len(self.decoding) - len(self.prefilling)
        waiting = len(self.waiting) + arriving - free
        check_queue(sequence.request, waiting, self.config.max_queue, self.completions, sequence.arrived)

    def enqueue(self, sequence: Sequence, now: float) -> None:
        """Queue a request; its cost is its prompt and the tokens that it may draw."""
        if not (self.waiting or self.prefilling or self.decoding):
            self.completions.begin(now)
        request, sequence.queued = sequence.request, now
        self.waiting.push(sequence, request.tenant, sequence.prompt_tokens + request.sampling.max_tokens)

    @property
    def room(self) -> int:
        """Return the bytes that slots may take beside the workspaces of prompts."""
        return self.kv.bytes - self.workspace_bytes

    @property
    def workspace_bytes(self) -> int:
        return sum(sequence.workspace_bytes for sequence in self.prefilling)

    @property
    def budget(self) -> int:
        """Return the tokens that a step has for prompts."""
        return max(1, self.step_tokens - len(self.decoding))

    def chunks(self) -> list[tuple[Sequence, int]]:
        """Return the prompts that get tokens of the next step, and how many."""
        ready = self._ready()
        shares = batching.split(self.budget, *self._lacking(ready))
        return [(sequence, tokens) for sequence, tokens in zip(ready, shares, strict=True) if tokens]

    def _ready(self) -> list[Sequence]:
        """Return the prompts that can be computed: those whose files have been read."""
        return [
            sequence
            for sequence in self.prefilling
            if sequence.prefill is not None or (sequence.match is not None and self.store.ready(sequence.match))
        ]

    def _lacking(self, prompts: list[Sequence]) -> tuple[list[int], list[float]]:
        """Return the tokens that prompts lack, and the weight of one of each in the next step."""
        lacking, decoding = [sequence.lacking_tokens for sequence in prompts], len(self.decoding)
        contexts = [sequence.prompt_tokens - tokens for sequence, tokens in zip(prompts, lacking, strict=True)]
        return lacking, [batching.work_per_token(each, self.keys_per_token, decoding) for each in contexts]

    def admit(self, now: float) -> Sequence | None:
        """Admit the next request that gets tokens of the next step, and claim its slot; None if there is none.

        A preempted request that fits again decodes at once. What is raised belongs to `admitting`.
        """
        while self.waiting:
            if self._is_full and self.config.preempt_seconds is None:
                return None
            below = batching.admits_below(self.budget, *self._lacking(self._ready()))
            free = self.room - sum(slot.resident_bytes for slot in self.pool.slots.values())
            fits = partial(self._fits, now=now, below=below, free=free)
            queue = list(islice(self.waiting, batching.PASSES))  # which setting one aside changes
            sequence = batching.next_prompt(queue, fits, partial(self._waits_for_prefix, free=free))
            if sequence is None:
                return None
            self.waiting.take(sequence)
            if sequence.slot is None or sequence.swapped is None:
                return sequence
            sequence.swapped = None
            self.decoding[sequence.slot] = sequence
        return None

    @property
    def _is_full(self) -> bool:
        return len(self.decoding) + len(self.prefilling) >= self.config.max_slots

    def _waits_for_prefix(self, sequence: Sequence, free: int) -> bool:
        """Return True if a request fits, but waits for a prompt in progress to compute a prefix that it lacks."""
        needed = sequence.slot_bytes + sequence.workspace_bytes
        if not self.prefilling or not self.store.enabled or sequence.swapped or sequence.is_scored or needed > free:
            return False
        request, spec, tokens = sequence.request, sequence.method.spec, sequence.prompt_tokens
        size, reusable = self.store.block_size, tokens - min(tokens, budgets.recomputed_tokens(spec, tokens))
        prompt = batching.WaitingPrompt(tokens, self.store.leading(request.hashes)[1], reusable)
        for other in self.prefilling:
            theirs = other.request
            common = batching.common_blocks(request.hashes, theirs.hashes)
            if common <= prompt.resident:
                continue
            leaves = self.store.leaves(common, theirs.marks, theirs.lifetimes)
            sums = other.summed_positions(size) if budgets.needs_column_sums(spec, tokens) else None
            if batching.waits_for(prompt, other.lacking_tokens, leaves, size, sums):
                return True
        return False

    def _fits(self, sequence: Sequence, now: float, below: float, free: int) -> bool:
        """Return True if a request gets tokens, its slot and its workspace now.

        Prompts `below` a length get tokens of the next step; `free` bytes remain if idle rows are given back.
        """
        if not sequence.swapped and sequence.prompt_tokens >= below:
            hashes = () if sequence.is_scored else sequence.request.hashes
            resident = self.store.leading(hashes)[1] * self.store.block_size
            if max(1, sequence.prompt_tokens - resident) >= below:
                return False
        self.admitting = sequence
        roomy = sequence.swapped is not None or sequence.slot_bytes + sequence.workspace_bytes <= free
        fits = (roomy and self._claim(sequence)) or (self._preempt(sequence, now, free) and self._claim(sequence))
        self.admitting = None
        return fits

    def _claim(self, sequence: Sequence) -> bool:
        """Claim the slot and workspace of a request; return True if it has them."""
        if self._is_full:
            return False
        if sequence.swapped:
            sequence.slot = self.pool.resume(sequence.swapped, self.room)
            return sequence.slot is not None
        room = self.room - sequence.workspace_bytes
        if slot_request := sequence.slot_request:
            sequence.slot = self.pool.claim(slot_request, room)
        if sequence.slot or (slot_request is None and self.pool.fit(room)):
            self.prefilling[sequence] = None
            return True
        return False

    def _preempt(self, sequence: Sequence, now: float, free: int) -> bool:
        """Preempt sequences for a request that has waited long enough: as many as make it fit, or none.

        They are the youngest of the tenant that holds most. It is left with no less than the waiting tenant then holds,
        so two tenants never preempt each other in turn. Every policy resumes, for its slot is copied as it is.
        """
        patience, tenant = self.config.preempt_seconds, sequence.request.tenant
        if patience is None or now - sequence.queued < patience or not self.decoding:
            return False
        held: dict[str, int] = {}
        for slot, other in self.decoding.items():
            held[other.request.tenant] = held.get(other.request.tenant, 0) + slot.resident_bytes
        needed = sequence.swapped.slot_bytes if sequence.swapped else sequence.slot_bytes
        lacking = needed + (0 if sequence.swapped else sequence.workspace_bytes) - free
        greedy = max(held, key=lambda name: held[name])
        parked = sum(s.swapped.host_bytes for s in self.waiting if s.swapped)
        most = min(self.config.parked_bytes - parked, held[greedy] - held.get(tenant, 0) - needed)  # none of its own
        victims: list[Slot] = []
        for slot, other in reversed(self.decoding.items()):
            if other.request.tenant == greedy and slot.resident_bytes <= most:
                victims.append(slot)
                most -= slot.resident_bytes
                lacking -= slot.resident_bytes
                if lacking <= 0:
                    break
        if lacking > 0 or not victims:
            return False
        for slot in reversed(victims):  # who is older resumes first
            victim = self.decoding[slot]
            victim.swapped, victim.slot = self.pool.swap_out(slot), None
            del self.decoding[slot]
            victim.queued = now
            self.waiting.push(victim, greedy, 0, behind_next=True)  # its work was counted when it came
            self.preempted += 1
        return True

    def begin_decoding(self, sequence: Sequence) -> None:
        """Let a sequence whose prompt is computed decode in its slot, if it has one."""
        del self.prefilling[sequence]
        if sequence.slot is not None:
            self.decoding[sequence.slot] = sequence

    def everyone(self) -> list[Sequence]:
        return [*self.waiting, *self.prefilling, *self.decoding.values()]

    def find(self, request_id: str) -> Sequence | None:
        return next((sequence for sequence in self.everyone() if sequence.request.id == request_id), None)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from wherever it is, and free its slot."""
        self.prefilling.pop(sequence, None)
        if self.admitting is sequence:
            self.admitting = None
        self.waiting.remove(sequence)
        sequence.swapped = None
        if sequence.slot is not None:
            self.decoding.pop(sequence.slot, None)
            self.pool.release(sequence.slot)
            sequence.slot = None
