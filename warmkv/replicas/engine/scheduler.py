"""Who is computed when: fair among tenants, admitted when slot and workspace fit, one prompt at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from warmkv.config import EngineConfig
from warmkv.policies.compression.method import Method
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.fair_queue import FairQueue
from warmkv.policies.memory_plan import Limit
from warmkv.policies.slot_sizes import KVShape, slot_bytes, workspace_bytes
from warmkv.replicas.block_store import WarmPrefix
from warmkv.replicas.completions import Completions
from warmkv.replicas.protocol import (
    Failed,
    Finished,
    GenerateRequest,
    QueueFullError,
    Started,
    UnservableRequestError,
)
from warmkv.replicas.slots.slots import Slot, SlotPool, SlotRequest, SwappedSlot

EngineEvent = Started | int | Finished | Failed  # an int is a drawn token
Emit = Callable[[EngineEvent], None]


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way through the engine."""

    request: GenerateRequest
    policy: Method
    emit: Emit
    arrived: float
    random: np.random.Generator
    slot: Slot | None = None
    swapped: SwappedSlot | None = None  # its slot while another tenant's request has the room
    queued: float = 0.0  # when it began to wait
    match: WarmPrefix | None = None
    reused: int = 0  # prompt tokens whose KV was attached
    prefill: PrefillState | None = None
    column_sums: dict[int, Tensor] = field(default_factory=dict)  # copies for the store, by prompt position
    admitted: float = 0.0
    number: float | None = None  # random number of the next token, kept until that is drawn: a step may be repeated
    num_output_tokens: int = 0  # tokens drawn so far
    last_token: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def uniform(self) -> float:
        """Return the random number of the next token, in [0, 1)."""
        if self.number is None:
            self.number = self.random.random()
        return self.number

    @property
    def slot_request(self) -> SlotRequest | None:
        """Return what its slot must hold; None if it draws at most the token that follows from the prompt itself."""
        new = self.request.sampling.max_tokens
        return SlotRequest(self.policy.spec, self.prompt_tokens, new) if new > 1 else None


@dataclass(slots=True)
class Scheduler:
    """The queue, the prompt being computed and the sequences that decode, within the byte limit of the engine."""

    config: EngineConfig
    shape: KVShape
    max_context: int
    vocabulary: int
    pool: SlotPool
    kv: Limit  # of slots and workspace
    waiting: FairQueue[Sequence] = field(default_factory=FairQueue)
    prefilling: Sequence | None = None
    decoding: dict[Slot, Sequence] = field(default_factory=dict)
    preempted: int = 0  # requests set aside so far
    completions: Completions = field(default_factory=Completions)

    def check(self, sequence: Sequence, arriving: int) -> None:
        """Raise UnservableRequestError if the request can never be admitted, QueueFullError if too many wait.

        `arriving` requests are on their way to the queue.
        """
        tokens, new = sequence.prompt_tokens, sequence.request.sampling.max_tokens
        given = (*sequence.request.token_ids, *sequence.request.resume)
        if not tokens or not all(0 <= token < self.vocabulary for token in given):
            raise UnservableRequestError(f"a prompt needs tokens, each below the vocabulary of {self.vocabulary}")
        slot_request = sequence.slot_request
        if slot_request is not None and slot_request.is_endless(self.max_context):
            new = 1
        if tokens + new > self.max_context:
            raise UnservableRequestError(
                f"{tokens} prompt tokens and max_tokens {new} exceed the context of {self.max_context} tokens"
            )
        needed = self.workspace_bytes(sequence)
        if slot_request is not None:
            needed += slot_bytes(slot_request.spec, self.shape, tokens, slot_request.new_tokens)
        if needed > self.kv.bytes:
            raise UnservableRequestError(f"the request needs {needed} bytes of KV memory, engine.kv_bytes is {self.kv}")
        if sequence.request.resume:  # its client has a part of the answer: it was given a place elsewhere
            return
        free = self.config.max_slots - len(self.decoding) - (self.prefilling is not None)
        if (waiting := len(self.waiting) + arriving - free) >= self.config.max_queue:
            seconds = self.completions.seconds(waiting - self.config.max_queue + 1, sequence.arrived)
            raise QueueFullError(f"{waiting} requests are waiting already (engine.max_queue)", waiting, seconds)

    def enqueue(self, sequence: Sequence, now: float) -> None:
        """Let a request wait; its work is its prompt and what it may draw."""
        if not (self.waiting or self.prefilling or self.decoding):
            self.completions.begin(now)
        request, sequence.queued = sequence.request, now
        self.waiting.push(sequence, request.tenant, sequence.prompt_tokens + request.sampling.max_tokens)

    def workspace_bytes(self, sequence: Sequence) -> int:
        return workspace_bytes(sequence.policy.spec, self.shape, sequence.prompt_tokens, len(sequence.request.marks))

    def admit(self, now: float) -> Sequence | None:
        """Admit the next request and claim its slot; None if none waits or it does not fit yet.

        What was set aside and fits again decodes at once.
        """
        while not self.prefilling and self.waiting:
            sequence = self.waiting.peek()
            if not self._fits(sequence) and not (self._preempt(sequence, now) and self._fits(sequence)):
                return None
            self.waiting.pop()
            if sequence.slot is None or sequence.swapped is None:
                return sequence
            sequence.swapped = None
            self.decoding[sequence.slot] = sequence
        return None

    def _fits(self, sequence: Sequence) -> bool:
        """Return True if a request has its slot now, and is the one to compute."""
        if len(self.decoding) >= self.config.max_slots:
            return False
        if sequence.swapped:
            sequence.slot = self.pool.resume(sequence.swapped, self.kv.bytes)
            return sequence.slot is not None
        # Already the prefilling one when memory is asked for: whatever goes wrong goes wrong with this request alone.
        self.prefilling = sequence
        room = self.kv.bytes - self.workspace_bytes(sequence)
        if slot_request := sequence.slot_request:
            sequence.slot = self.pool.claim(slot_request, room)
        if sequence.slot or (slot_request is None and self.pool.fit(room)):
            return True
        self.prefilling = None
        return False

    def _preempt(self, sequence: Sequence, now: float) -> bool:
        """Set aside what holds the room for a request that has waited long enough; whether anything was.

        It is the youngest of the tenant that holds most, if that is more than the waiting one would hold: so two
        tenants never set each other aside in turn. Every policy resumes, for its slot is copied as it is.
        """
        patience, tenant = self.config.preempt_seconds, sequence.request.tenant
        if patience is None or now - sequence.queued < patience or not self.decoding:
            return False
        held: dict[str, int] = {}
        for slot, other in self.decoding.items():
            held[other.request.tenant] = held.get(other.request.tenant, 0) + slot.resident_bytes
        needed = self._slot_bytes(sequence)
        greedy = max(held, key=lambda name: held[name])
        room = self.config.parked_bytes - sum(s.swapped.host_bytes for s in self.waiting if s.swapped)
        for slot, victim in reversed(self.decoding.items()):
            if victim.request.tenant == greedy and slot.resident_bytes <= room:
                if greedy == tenant or held[greedy] - slot.resident_bytes < held.get(tenant, 0) + needed:
                    return False
                victim.swapped, victim.slot = self.pool.swap_out(slot), None
                del self.decoding[slot]
                victim.queued = now
                self.waiting.push(victim, greedy, 0, behind_next=True)  # its work was counted when it came
                self.preempted += 1
                return True
        return False

    def _slot_bytes(self, sequence: Sequence) -> int:
        if sequence.swapped:
            return sequence.swapped.slot_bytes
        slot_request = sequence.slot_request
        return (
            slot_bytes(slot_request.spec, self.shape, slot_request.prompt_tokens, slot_request.new_tokens)
            if slot_request
            else 0
        )

    def everyone(self) -> list[Sequence]:
        return [*self.waiting, *([self.prefilling] if self.prefilling else []), *self.decoding.values()]

    def find(self, request_id: str) -> Sequence | None:
        return next((sequence for sequence in self.everyone() if sequence.request.id == request_id), None)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its slot."""
        if sequence is self.prefilling:
            self.prefilling = None
        self.waiting.remove(sequence)
        sequence.swapped = None
        if sequence.slot is not None:
            self.decoding.pop(sequence.slot, None)
            self.pool.release(sequence.slot)
            sequence.slot = None
