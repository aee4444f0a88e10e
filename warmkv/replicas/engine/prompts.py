"""Take a prompt from the queue to its decode slot: attach warm blocks, compute chunks, store, compress.

Prefixes are stored uncompressed, for others to share; the request's policy selects what its own slot keeps.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import astuple, dataclass, field

from torch import Tensor

from warmkv.policies import budgets, compression
from warmkv.policies.compression.method import Method
from warmkv.policies.compression.prefill_state import PrefillState, TokenClasses
from warmkv.policies.prefix_cache import sum_positions
from warmkv.prefixes.record import Mark
from warmkv.replicas.block_store import BlockStore, WarmPrefix
from warmkv.replicas.engine.faults import is_sticky, let_go
from warmkv.replicas.engine.passes import empty_cache
from warmkv.replicas.engine.scheduler import Sequence
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.protocol import GenerateRequest, Started, UnservableRequestError
from warmkv.replicas.slots.slots import SlotPool

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HandOff:
    """Describe a hand-off to the client."""

    match: WarmPrefix
    written: int  # position of the highest mark that is stored
    kept_tokens: int  # of a layer and KV head, on average

    def started(self, sequence: Sequence, replica: str, now: float) -> Started:
        """Return the Started event of a sequence."""
        return Started(
            replica=replica,
            hit=self.match.hit,
            written=self.written,
            cached_tokens=sequence.reused,
            tiers=self.match.tiers,
            ttl=self.match.match.ttl,
            kept_tokens=self.kept_tokens,
            resident_bytes=sequence.slot.resident_bytes if sequence.slot else 0,
            queue_seconds=sequence.admitted - sequence.arrived,
            prefill_seconds=now - sequence.admitted,
        )


@dataclass(frozen=True, slots=True)
class Compressions:
    """Totals of the hand-offs under one policy so far."""

    prompts: int = 0
    tokens: int = 0  # of the prompts
    kept_tokens: int = 0  # of a layer and KV head, on average
    whole_bytes: int = 0  # that prompts and answers may take uncompressed
    slot_bytes: int = 0  # of their decode slots
    seconds: float = 0.0  # for selecting what is kept and filling the slots

    def plus(self, other: Compressions) -> Compressions:
        return Compressions(*map(operator.add, astuple(self), astuple(other)))


ATTACHED_ON_GPU, ATTACHED_ON_CPU = 1 << 28, 1 << 25
"""Bytes of warm blocks copied in a step while others decode: some 10 ms of PCIe, 5 ms of a CPU's memory."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The steps that a prompt takes, each for one sequence."""

    model: LoadedModel
    store: BlockStore
    pool: SlotPool
    classes: TokenClasses | None = None
    compressed: dict[str, Compressions] = field(default_factory=dict)  # by the name of the policy

    def method_of(self, request: GenerateRequest) -> Method:
        """Build the compression method of a request. Raises UnservableRequestError if the model does not support it."""
        method = compression.build(
            budgets.in_force(request.policy, len(request.token_ids), request.sampling.max_tokens)
        )
        if method.rotates and not self.model.fixed_rotation:
            raise UnservableRequestError(f"{request.policy.name} cannot rotate the keys of this model's embedding")
        multiple = method.spec.storage_format.head_dim_multiple
        if self.model.kv_shape.head_dim % multiple:
            raise UnservableRequestError(
                f"storage {method.spec.storage} needs a head_dim that is a multiple of {multiple}, "
                f"this model has {self.model.kv_shape.head_dim}"
            )
        return method

    def look_up(self, sequence: Sequence, now: float) -> None:
        """Look up an admitted prompt's warm prefix: what came before it in the queue is stored by now."""
        request, spec, tokens = sequence.request, sequence.method.spec, sequence.prompt_tokens
        sequence.admitted = now
        most = tokens - min(tokens, budgets.recomputed_tokens(spec, tokens))
        sums = budgets.needs_column_sums(spec, tokens)
        if sequence.is_scored:
            sequence.match = WarmPrefix()
        else:
            sequence.match = self.store.match(request.hashes, request.reads, most, sums=sums)

    def attach(self, sequence: Sequence, *, others_decode: bool) -> bool:
        """Copy a prompt's warm blocks to its workspace, a part if others decode; return True once all are there."""
        if sequence.prefill is not None:
            return True
        if sequence.attaching is None:
            specs = [sequence.method.spec]
            sequence.attaching = self.model.prefill_state(sequence.request.token_ids, specs, self.classes)
        prompt, match = sequence.attaching, sequence.match
        assert match is not None
        on_gpu = self.model.device.type == "cuda"
        most = (ATTACHED_ON_GPU if on_gpu else ATTACHED_ON_CPU) if others_decode else math.inf
        attached = self.store.attach(match, prompt.keys, prompt.values, most)
        if attached is None:
            return False
        sequence.reused, sums = attached
        prompt.reuse(sequence.reused, sums)
        sequence.prefill, sequence.attaching = prompt, None
        return True

    def begin_chunk(self, sequence: Sequence, tokens: int) -> None:
        """Begin the next chunk, of at most `tokens` tokens."""
        prompt = sequence.workspace
        start, end = prompt.computed, min(prompt.computed + tokens, prompt.tokens)
        end = min([end, *(position for position in self._summed_positions(sequence, prompt) if position > start)])
        prompt.begin_chunk(end - start)

    def keep_sums(self, sequence: Sequence) -> None:
        """Copy the column sums at the end of a chunk for the store, where a later prompt can resume."""
        prompt = sequence.workspace
        if prompt.column_sums is not None and prompt.computed in self._summed_positions(sequence, prompt):
            sequence.column_sums[prompt.computed] = prompt.column_sums[..., : prompt.computed].clone()

    def _summed_positions(self, sequence: Sequence, prompt: PrefillState) -> list[int]:
        """Return the positions at which a later prompt can resume with this one's column sums."""
        if prompt.column_sums is None or not self.store.enabled:
            return []
        return sum_positions(prompt.tokens, self.store.block_size, sequence.request.marks)

    def hand_off(self, sequence: Sequence, room: int) -> HandOff:
        """Store the prefix uncompressed, and compress this request's own copy into its slot.

        Slots may take `room` bytes.
        """
        prompt, match, request = sequence.workspace, sequence.match, sequence.request
        assert match is not None
        written = self._keep(
            sequence, prompt, request.hashes, request.marks, column_sums=sequence.column_sums, warm=match
        )
        sequence.column_sums = {}
        self.release(sequence)
        kept = budgets.kept_tokens(sequence.method.spec, prompt.tokens)
        if sequence.slot is not None:
            begun = self.store.clock()
            selections = sequence.method.select(prompt)
            sequence.slot.limit = room
            kept = self.pool.fill(sequence.slot, prompt, selections, self.store.on_device(request.hashes))
            self._count(sequence, kept, self.store.clock() - begun)
        sequence.prefill = None
        return HandOff(match, written, kept)

    def _count(self, sequence: Sequence, kept: int, seconds: float) -> None:
        """Count a prompt that was compressed."""
        assert sequence.slot is not None
        tokens, name = sequence.prompt_tokens, sequence.method.spec.name
        whole = (tokens + sequence.request.sampling.max_tokens) * self.model.kv_shape.token_bytes
        one = Compressions(1, tokens, kept, whole, sequence.slot.resident_bytes, seconds)
        self.compressed[name] = self.compressed.get(name, Compressions()).plus(one)

    def keep_computed(self, sequence: Sequence) -> None:
        """Store the full blocks of an abandoned prompt, for requests that wait for the same prefix."""
        if (prompt := sequence.prefill) is not None:
            self._keep(sequence, prompt, sequence.request.hashes[: prompt.computed // self.store.block_size])

    def _keep(
        self,
        sequence: Sequence,
        prompt: PrefillState,
        hashes: Items[bytes],
        marks: Items[Mark] = (),
        *,
        column_sums: Mapping[int, Tensor] | None = None,
        warm: WarmPrefix | None = None,
    ) -> int:
        """Store a prompt as `BlockStore.store`; return 0 where that fails, from which no request may suffer.

        Raises errors after which the device cannot be used any more.
        """
        request = sequence.request
        try:
            return self.store.store(
                hashes,
                marks,
                prompt.keys,
                prompt.values,
                column_sums,
                tenant=request.tenant,
                warm=warm,
                begun=sequence.arrived,
                lifetimes=request.lifetimes,
            )
        except Exception as error:  # memory, say
            if is_sticky(error):
                raise
            log.exception("the blocks of %s could not be kept", request.id)
            let_go(error)
        empty_cache(self.model.device)
        return 0

    def release(self, sequence: Sequence) -> None:
        """Unpin the warm prefix of a request."""
        match, sequence.match = sequence.match, None
        if match is not None:
            self.store.release(match)
