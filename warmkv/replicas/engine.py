"""One model on one device, decoding many requests together.

A step computes at most one chunk of one prompt and one token of every sequence that decodes. At the end of a prompt
its uncompressed blocks go to the block store, and the request's policy selects what its decode slot keeps.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from warmkv.config import EngineConfig, PolicySpec, PrefixCacheConfig
from warmkv.policies import budgets, compression
from warmkv.replicas.attention import PrefillState
from warmkv.replicas.block_store import BlockStore
from warmkv.replicas.loading import LoadedModel
from warmkv.replicas.protocol import (
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    RequestTooLargeError,
    SamplingParams,
    Started,
)
from warmkv.replicas.sampling import sample
from warmkv.replicas.scheduler import Emit, Scheduler, Sequence
from warmkv.replicas.slots import DecodeState, SlotPool

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What a replica is doing and holding now."""

    waiting: int
    decoding: int
    slot_bytes: int
    workspace_bytes: int
    store_bytes: int
    store_blocks: int


class Engine:
    """Continuous batching over slot caches. One thread runs it; `submit` and `cancel` may be called from any."""

    def __init__(
        self,
        model: LoadedModel,
        engine: EngineConfig,
        prefix_cache: PrefixCacheConfig,
        *,
        clock: Callable[[], float],
        name: str = "",
        publish: Callable[[Items[bytes], Items[bytes]], None] = lambda stored, evicted: None,
    ) -> None:
        self.model, self.config, self.name, self._clock = model, engine, name, clock
        self.max_context = min(engine.max_context or model.max_context, model.max_context)
        self.store = BlockStore(prefix_cache, model.kv_shape, clock, publish)
        self.pool = SlotPool(model.kv_shape, model.dtype, model.device)
        self.scheduler = Scheduler(engine, model.kv_shape, self.max_context, self.pool)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()

    # --- from any thread

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        """Queue a request; `emit` is called in the engine's thread with Started, drawn tokens, and an end.

        Raises RequestTooLargeError or QueueFullError at once where the request cannot be taken.
        """
        policy = compression.build(request.policy)
        if policy.sinks and not self.model.fixed_rotation:
            raise RequestTooLargeError(f"{request.policy.name} cannot rotate the keys of this model's rotary embedding")
        random = np.random.Generator(np.random.Philox(request.sampling.seed))
        sequence = Sequence(request, policy, emit, self._clock(), random)
        self.scheduler.check(sequence, self._inbox.qsize())
        self._inbox.put(lambda: self.scheduler.waiting.append(sequence))

    def cancel(self, request_id: str) -> None:
        """Stop a request and free what it holds; nothing happens if it has ended already."""

        def stop() -> None:
            if sequence := self.scheduler.find(request_id):
                self._finish(sequence, "cancelled")

        self._inbox.put(stop)

    def call(self, action: Callable[[], None]) -> None:
        """Run something in the engine's thread, between two steps."""
        self._inbox.put(action)

    def stop(self) -> None:
        """End `run` after the step it is in."""
        self._stopped.set()
        self._inbox.put(None)

    def stats(self) -> EngineStats:
        scheduler, prefilling = self.scheduler, self.scheduler.prefilling
        return EngineStats(
            waiting=len(scheduler.waiting),
            decoding=len(scheduler.decoding),
            slot_bytes=self.pool.allocated_bytes,
            workspace_bytes=scheduler.workspace_bytes(prefilling) if prefilling else 0,
            store_bytes=self.store.resident_bytes,
            store_blocks=len(self.store),
        )

    # --- in the engine's thread

    def warm_up(self) -> None:
        """Compute a short prompt and a few tokens before `run`, so that no request pays for first-time set-up."""
        tokens = tuple(range(min(16, self.max_context // 2)))
        sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        self.submit(GenerateRequest("warm-up", tokens, (), sampling, PolicySpec()), lambda event: None)
        while self.step():
            pass

    def run(self) -> None:
        """Step until `stop`. A step that fails ends the requests it was computing, not the engine."""
        while not self._stopped.is_set():
            try:
                if not self.step():
                    self._wait()
            except Exception as error:
                log.exception("engine step failed")
                self._fail_all(f"{type(error).__name__}: {error}")

    @torch.inference_mode()
    def step(self) -> bool:
        """One iteration; False if there was nothing to compute."""
        while not self._inbox.empty():
            if action := self._inbox.get():
                action()
        if sequence := self.scheduler.admit():
            self._begin(sequence)
        busy = False
        if self.scheduler.prefilling:
            self._prefill_chunk(self.scheduler.prefilling)
            busy = True
        if self.scheduler.decoding:
            self._decode()
            busy = True
        return busy

    def _wait(self) -> None:
        self.store.expire()
        try:
            if action := self._inbox.get(timeout=0.5):
                action()
        except queue.Empty:
            pass

    def _begin(self, sequence: Sequence) -> None:
        """Set up a prompt's workspace and attach what is warm of it."""
        shape, tokens = self.model.kv_shape, sequence.prompt_tokens
        size = (shape.layers, shape.kv_heads, tokens, shape.head_dim)
        keys = torch.empty(size, dtype=self.model.dtype, device=self.model.device)
        values = torch.empty_like(keys)
        request = sequence.request
        sequence.admitted = self._clock()
        sequence.match = self.store.match(request.hashes, request.reads)
        reused = min(sequence.match.tokens, tokens - budgets.recomputed_tokens(request.policy, tokens))
        self.store.attach(sequence.match, reused, keys, values)
        observed = sequence.policy.observed_queries(tokens)
        sequence.prefill = PrefillState(keys, values, observed, self.model.q_heads, reused)

    def _prefill_chunk(self, sequence: Sequence) -> None:
        prefill = sequence.prefill
        assert prefill is not None
        start = prefill.computed
        end = min(start + self.config.prefill_chunk, prefill.tokens)
        prefill.begin_chunk(end - start)
        ids = torch.tensor([sequence.request.token_ids[start:end]], device=self.model.device)
        logits = self._forward(ids, torch.arange(start, end, device=self.model.device)[None], prefill)
        prefill.end_chunk()
        if end == prefill.tokens:
            self._hand_off(sequence, logits)

    def _hand_off(self, sequence: Sequence, logits: Tensor) -> None:
        """From prefill to decode: keep the prefix for others whole, compress this request's own copy, draw a token."""
        prefill, match, request = sequence.prefill, sequence.match, sequence.request
        assert prefill is not None
        assert match is not None
        self.store.store(request.hashes, request.marks, prefill.keys, prefill.values)
        self.store.release(match)
        kept = sequence.policy.kept(prefill.tokens)
        if sequence.slot is not None:
            self._fill_slot(sequence, prefill, kept)
            self.scheduler.decoding[sequence.slot] = sequence
        self.scheduler.prefilling = sequence.prefill = sequence.match = None
        now = self._clock()
        sequence.emit(
            Started(
                replica=self.name,
                hit=match.hit,
                cached_tokens=self._reused(sequence, match.tokens),
                kept_tokens=kept,
                resident_bytes=sequence.slot.resident_bytes if sequence.slot else 0,
                queue_seconds=sequence.admitted - sequence.arrived,
                prefill_seconds=now - sequence.admitted,
            )
        )
        if request.sampling.max_tokens == 0:
            self._finish(sequence, "length")
        else:
            self._draw([sequence], logits)

    def _fill_slot(self, sequence: Sequence, prefill: PrefillState, kept: int) -> None:
        slot, scale = sequence.slot, prefill.scale
        assert slot is not None
        for layer in range(prefill.keys.shape[0]):
            keys, values = prefill.keys[layer], prefill.values[layer]
            if kept < prefill.tokens:
                queries = prefill.queries[layer] if prefill.queries is not None else None
                positions = sequence.policy.select(keys, queries, scale)[..., None].expand(-1, -1, keys.shape[-1])
                keys, values = keys.gather(1, positions), values.gather(1, positions)
            slot.slab.fill(slot.row, layer, keys, values)
        slot.slab.start(
            slot.row,
            limit=sequence.capacity,
            filled=kept,
            dropped=prefill.tokens - kept if sequence.policy.ring else 0,
            ring=sequence.policy.ring,
        )

    def _decode(self) -> None:
        """One token for every sequence that decodes."""
        order = self.pool.batch()
        state = DecodeState(self.pool.slabs, self.model.inv_freq)
        rows = [self.scheduler.decoding.get(slot) for slot in order]
        ids = [[row.last_token if row else 0] for row in rows]
        positions = [[row.prompt_tokens + row.drawn - 1 if row else 0] for row in rows]
        device = self.model.device
        logits = self._forward(torch.tensor(ids, device=device), torch.tensor(positions, device=device), state)
        active = [index for index, row in enumerate(rows) if row]
        self._draw([row for row in rows if row], logits if len(active) == len(rows) else logits[active])

    def _forward(self, ids: Tensor, positions: Tensor, state: PrefillState | DecodeState) -> Tensor:
        """Logits [batch, vocabulary] of the last position of ids [batch, n]."""
        output = self.model.module(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1, warmkv=state
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _draw(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Draw, report and check the next token of each sequence."""
        sampling = [sequence.request.sampling for sequence in sequences]
        if all(s.temperature == 0 for s in sampling):
            tokens = logits.argmax(dim=-1).tolist()
        else:
            parameters = [(s.temperature, s.top_p, q.random.random()) for s, q in zip(sampling, sequences, strict=True)]
            temperature, top_p, uniform = torch.tensor(parameters, device=logits.device, dtype=torch.float32).T
            top_k = torch.tensor([s.top_k for s in sampling], device=logits.device)
            tokens = sample(logits, temperature, top_p, top_k, uniform).tolist()
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.last_token = token
            sequence.drawn += 1
            if token in self.model.eos_ids and not sequence.request.sampling.ignore_eos:
                self._finish(sequence, "end")
                continue
            sequence.emit(token)
            if sequence.drawn == sequence.request.sampling.max_tokens:
                self._finish(sequence, "length")

    def _reused(self, sequence: Sequence, matched: int) -> int:
        tokens = sequence.prompt_tokens
        return min(matched, tokens - budgets.recomputed_tokens(sequence.request.policy, tokens))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._drop(sequence)
        sequence.emit(Finished(reason, sequence.drawn))

    def _drop(self, sequence: Sequence) -> None:
        if sequence.match is not None:
            self.store.release(sequence.match)
            sequence.match = None
        sequence.prefill = None
        self.scheduler.remove(sequence)

    def _fail_all(self, message: str) -> None:
        """End everything that holds memory; requests that wait have lost nothing."""
        prefilling = self.scheduler.prefilling
        for sequence in [*([prefilling] if prefilling else []), *self.scheduler.decoding.values()]:
            self._drop(sequence)
            sequence.emit(Failed(message))
