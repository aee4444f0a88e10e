"""Who is computed when: fair among tenants, admitted when slot and workspace fit, one prompt at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from warmkv.config import EngineConfig
from warmkv.policies.compression.base import Policy
from warmkv.policies.compression.prompt import Prompt
from warmkv.policies.fair_queue import FairQueue
from warmkv.policies.slot_sizes import KVShape, slot_bytes, workspace_bytes
from warmkv.replicas.block_store import WarmPrefix
from warmkv.replicas.protocol import (
    Failed,
    Finished,
    GenerateRequest,
    QueueFullError,
    Started,
    UnservableRequestError,
)
from warmkv.replicas.slots import Demand, Slot, SlotPool

EngineEvent = Started | int | Finished | Failed  # an int is a drawn token
Emit = Callable[[EngineEvent], None]


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way through the engine."""

    request: GenerateRequest
    policy: Policy
    emit: Emit
    arrived: float
    random: np.random.Generator
    slot: Slot | None = None
    match: WarmPrefix | None = None
    reused: int = 0  # prompt tokens whose KV was attached
    prefill: Prompt | None = None
    column_sums: dict[int, Tensor] = field(default_factory=dict)  # copies for the store, by prompt position
    admitted: float = 0.0
    drawn: int = 0  # tokens drawn so far
    last_token: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def demand(self) -> Demand | None:
        """What its slot must hold; None if it draws at most the token that follows from the prompt itself."""
        new = self.request.sampling.max_tokens
        return Demand(self.policy.spec, self.prompt_tokens, new) if new > 1 else None


@dataclass(slots=True)
class Scheduler:
    """The queue, the prompt being computed and the sequences that decode, within the byte limit of the engine."""

    config: EngineConfig
    shape: KVShape
    max_context: int
    vocabulary: int
    pool: SlotPool
    waiting: FairQueue[Sequence] = field(default_factory=FairQueue)
    prefilling: Sequence | None = None
    decoding: dict[Slot, Sequence] = field(default_factory=dict)

    def check(self, sequence: Sequence, arriving: int) -> None:
        """Raise UnservableRequestError if the request can never be admitted, QueueFullError if too many wait.

        `arriving` requests are on their way to the queue.
        """
        tokens, new = sequence.prompt_tokens, sequence.request.sampling.max_tokens
        if not tokens or not all(0 <= token < self.vocabulary for token in sequence.request.token_ids):
            raise UnservableRequestError(f"a prompt needs tokens, each below the vocabulary of {self.vocabulary}")
        demand = sequence.demand
        if demand is not None and demand.is_endless(self.max_context):
            new = 1
        if tokens + new > self.max_context:
            raise UnservableRequestError(
                f"{tokens} prompt tokens and max_tokens {new} exceed the context of {self.max_context} tokens"
            )
        needed = self.workspace_bytes(sequence)
        if demand is not None:
            needed += slot_bytes(demand.spec, self.shape, tokens, demand.new_tokens)
        if needed > self.config.kv_bytes:
            raise UnservableRequestError(
                f"the request needs {needed} bytes of KV memory, engine.kv_bytes is {self.config.kv_bytes}"
            )
        free = self.config.max_slots - len(self.decoding) - (self.prefilling is not None)
        if (waiting := len(self.waiting) + arriving - free) >= self.config.max_queue:
            raise QueueFullError(f"{waiting} requests are waiting already (engine.max_queue)")

    def enqueue(self, sequence: Sequence) -> None:
        """Let a request wait; its work is its prompt and what it may draw."""
        request = sequence.request
        self.waiting.push(sequence, request.tenant, sequence.prompt_tokens + request.sampling.max_tokens)

    def workspace_bytes(self, sequence: Sequence) -> int:
        return workspace_bytes(sequence.policy.spec, self.shape, sequence.prompt_tokens, len(sequence.request.marks))

    def admit(self) -> Sequence | None:
        """The next request to compute, its slot claimed; None if there is none or it does not fit yet."""
        if self.prefilling or not self.waiting or len(self.decoding) >= self.config.max_slots:
            return None
        # Already the prefilling one when memory is asked for: whatever goes wrong goes wrong with this request alone.
        sequence = self.prefilling = self.waiting.peek()
        room = self.config.kv_bytes - self.workspace_bytes(sequence)
        if demand := sequence.demand:
            sequence.slot = self.pool.claim(demand, room)
        if sequence.slot or (demand is None and self.pool.fit(room)):
            return self.waiting.pop()
        self.prefilling = None
        return None

    def everyone(self) -> list[Sequence]:
        return [*self.waiting, *([self.prefilling] if self.prefilling else []), *self.decoding.values()]

    def find(self, request_id: str) -> Sequence | None:
        return next((sequence for sequence in self.everyone() if sequence.request.id == request_id), None)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its slot."""
        if sequence is self.prefilling:
            self.prefilling = None
        self.waiting.remove(sequence)
        if sequence.slot is not None:
            self.decoding.pop(sequence.slot, None)
            self.pool.release(sequence.slot)
            sequence.slot = None
