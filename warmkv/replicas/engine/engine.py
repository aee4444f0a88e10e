"""One model on one device, computing many requests together.

A step is one pass of the model over a token of every sequence that decodes and chunks of prompts, within the tokens of
a step. At the end of a prompt its uncompressed blocks go to the block store, and the request's policy selects what its
decode slot keeps.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from llguidance import LLMatcher

from warmkv.config import EngineConfig, PrefixCacheConfig
from warmkv.policies.compression.prefill_state import TokenClasses
from warmkv.policies.contents import Contents
from warmkv.policies.memory_plan import MemoryPlan
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.block_store import BlockStore, Identity
from warmkv.replicas.block_store.presence import Publish
from warmkv.replicas.block_store.spill import spill
from warmkv.replicas.current_device import make_current
from warmkv.replicas.device_memory import plan_replica
from warmkv.replicas.engine.batch_invariant import QUERIES
from warmkv.replicas.engine.endings import Endings
from warmkv.replicas.engine.faults import FailureCounts, is_sticky
from warmkv.replicas.engine.inbox import ClosedError, Inbox
from warmkv.replicas.engine.logits_processors import LogitsProcessor
from warmkv.replicas.engine.model_executor import ModelExecutor
from warmkv.replicas.engine.overlap import Overlap
from warmkv.replicas.engine.passes import run
from warmkv.replicas.engine.probe import works
from warmkv.replicas.engine.prompts import Prompts
from warmkv.replicas.engine.sampling import positions_at_once
from warmkv.replicas.engine.scheduler import Emit, Scheduler, Sequence
from warmkv.replicas.engine.stats import EngineStats, snapshot
from warmkv.replicas.engine.warm_up import compile_kernels, first_requests, recorded_batches, recorded_requests
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.protocol import (
    STOPPING,
    Failed,
    Finished,
    GenerateRequest,
    PromptLogprobs,
    UnservableRequestError,
)
from warmkv.replicas.slots.slots import SlotPool

log = logging.getLogger(__name__)
T = TypeVar("T")

STOP_SECONDS = 30.0  # that the engine's thread has for the step it is in when it is to end
IDLE_SECONDS = 0.5  # how long an idle engine sleeps before it looks at TTLs again


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
        classes: TokenClasses | None = None,
        memory: MemoryPlan | None = None,
        publish: Publish = lambda stored, evicted, tier: None,
    ) -> None:
        make_current(model.device)  # of the thread that warms it up
        if engine.batch_invariant:
            model = replace(model, query_tile=QUERIES)
        self.model, self.config, self.name, self._clock = model, engine, name, clock
        if engine.max_context is not None and engine.max_context > model.max_context:
            raise ValueError(f"engine.max_context {engine.max_context} exceeds the model's {model.max_context} tokens")
        self.max_context = engine.max_context or model.max_context
        self.memory = memory or plan_replica(model, engine, prefix_cache)
        identity = Identity.of(model, prefix_cache.block_size)
        self.store = BlockStore(
            self.memory.sized(prefix_cache), identity, model.device, clock, publish, wake=lambda: self._inbox.wake()
        )
        self.pool = SlotPool(model.kv_shape, model.dtype, model.device, prefix_cache.block_size)
        self.scheduler = Scheduler(
            engine,
            model.kv_shape,
            self.max_context,
            model.vocabulary,
            self.pool,
            self.store,
            self.memory.kv,
            engine.tokens_per_step(on_gpu=model.device.type == "cuda"),
            model.keys_per_token,
        )
        self.executor = ModelExecutor(model, engine, self.pool.buffer, self.scheduler.step_tokens)
        self.pool.is_static, self.pool.batch_invariant = self.executor.steps.graphs is not None, engine.batch_invariant
        self._prompts = Prompts(model, self.store, self.pool, classes)
        self._scored_at_once = positions_at_once(model.vocabulary, model.dtype.itemsize)
        self.faults = FailureCounts()
        self._endings = Endings(self.scheduler, self._prompts, self.faults, model.device, clock, self._works)
        self._weight_bytes = model.weight_bytes()
        self._overlap: Overlap | None = None
        if model.device.type == "cuda":  # elsewhere the host computes
            self.overlap()
        self._inbox: Inbox[Sequence] = Inbox(lambda sequence: self.scheduler.enqueue(sequence, clock()))
        self._stopped, self._spill_until = threading.Event(), -math.inf
        self._thread: threading.Thread | None = None
        self.flush: Callable[[], None] = lambda: None  # called behind every part of a step that may have emitted
        self._turned = clock()
        self.turns = 0  # of the engine's thread: steps, and waits for something to do
        self._publish_stats()

    def overlap(self) -> None:
        """Schedule asynchronously from now on: launch a decode step before the tokens of the last one are read."""
        self.executor.keep_drawn()
        launch = self.executor.launch
        self._overlap = Overlap(self.scheduler, self._endings, self.max_context, self.model.inv_freq, launch)

    # --- from any thread

    def submit(self, request: GenerateRequest, emit: Emit, matcher: LLMatcher | None = None) -> None:
        """Queue a request; `emit` is called in the engine's thread with Started, drawn tokens, and an end.

        `matcher` is that of its constraint, at the start of the answer. Tokens come with log-probabilities if wanted.
        Raises UnservableRequestError or QueueFullError at once where the request cannot be taken, and ClosedError
        where the engine has ended.
        """
        method = self._prompts.method_of(request)
        if request.sampling.constraint is not None and matcher is None:
            raise UnservableRequestError("this replica does not constrain answers")
        random = np.random.Generator(np.random.Philox(request.sampling.seed))
        processor = LogitsProcessor.of(request, self.model.eos_ids, matcher)
        sequence = Sequence(request, method, emit, self._clock(), random, processor)
        self.scheduler.validate(sequence)
        self.scheduler.size(sequence)
        self._inbox.submit(sequence, partial(self.scheduler.check_queue, sequence))

    def cancel(self, request_id: str) -> None:
        """Abort a request and free what it holds; does nothing if it has ended already."""

        def stop() -> None:
            if sequence := self.scheduler.find(request_id):
                self._prompts.keep_computed(sequence)
                self._endings.finish(sequence, "cancelled")

        self.call(stop)

    def call(self, action: Callable[[], None]) -> None:
        """Run an action in the engine's thread, between two steps; drop it if the engine has ended."""
        with contextlib.suppress(ClosedError):
            self._inbox.put(action)

    def between_steps(self, action: Callable[[], T]) -> Future[T]:
        """Run an action between steps and return its future; a cancelled future is not run."""
        return self._inbox.result_of(action)

    def drop_prefixes(self, tenant: str) -> Future[int]:
        """Forget a tenant's stored prefixes, between two steps; the result is the bytes freed."""
        return self.between_steps(lambda: self.store.drop(tenant))

    def contents(self, most: int) -> Future[Contents]:
        """Look up at most `most` of the stored blocks, with their lives, between two steps."""
        return self.between_steps(lambda: self.store.contents(most))

    def stop(self, spill_seconds: float = 0.0) -> None:
        """End `run` after the step it is in, and wait for its thread.

        It writes what only memory holds to the disk tier, if there is one, for so many seconds at most.
        """
        self._spill_until = self.store.clock() + spill_seconds
        self._stopped.set()
        self._inbox.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(spill_seconds + STOP_SECONDS)

    def check_turning(self, limit: float) -> None:
        """Raise RuntimeError where the thread has ended or has been in one step for more than `limit` seconds."""
        if self._thread is not None and not self._thread.is_alive():
            raise RuntimeError("the engine's thread has ended: its device is lost, see the replica's log")
        if (still := self._clock() - self._turned) > limit:
            raise RuntimeError(f"the engine has been in one step for {still:.0f} s")

    def stats(self) -> EngineStats:
        """Return the numbers as of the last step."""
        device = self.model.device
        allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
        return replace(self._stats, allocator_bytes=allocated)

    # --- in the engine's thread

    def warm_up(self, say: Callable[[str], None] = lambda what: None, policy: PolicySpec = PolicySpec()) -> None:
        """Compile the model and kernels and serve short requests before `run`, so that no request pays for set-up.

        Kernels are compiled for all policies, first for `policy`. `say` is told each stage. Raises RuntimeError if a
        request fails.
        """
        self.executor.compile(say)
        room, seconds = self.scheduler.room, self.config.compile_seconds
        began = self._clock()
        attends = compile_kernels(self.model, self.pool, self.executor.forward, room, seconds, policy.storage, say)
        if (graphs := self.executor.steps.graphs) is not None:
            with graphs.recording_soon():
                for batch in recorded_batches(self.config.max_slots, lambda: self._clock() - began < seconds):
                    say(f"recording steps of {batch} sequences")
                    for requests in recorded_requests(batch, self.max_context):
                        self.finish(*requests)
        say("computing a first prompt")
        for request in first_requests(self.model.vocabulary, self.max_context, self.pool.page_size, attends):
            self.finish(request)

    def finish(self, request: GenerateRequest, *beside: GenerateRequest) -> None:
        """Compute a request and others to their end before `run`, in the caller's thread.

        Raises RuntimeError if the first fails.
        """
        told: list[object] = []
        self.submit(request, told.append)
        for other in beside:
            self.submit(other, lambda event: None)
        while self.step():
            pass
        if not told or not isinstance(told[-1], Finished):
            why = told[-1].message if told and isinstance(told[-1], Failed) else "it did not end"
            raise RuntimeError(f"the replica cannot serve: its {request.id} request failed ({why}); the cause is above")

    def start(self) -> None:
        """Begin to `run`, in a thread of its own; prompts and failures of the warm-up are not counted from now on."""
        self._prompts.compressed.clear()
        self.faults.counts.update(dict.fromkeys(self.faults.counts, 0))
        self._publish_stats()
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Step until `stop`, or until the device is lost.

        It is after an error that leaves it unusable, or several failures in a row. Then all requests fail and the
        thread ends, so that the replica's health check has it replaced.
        """
        try:
            make_current(self.model.device)
            while not self._stopped.is_set() and not self.faults.lost:
                self._turn()
                try:
                    if not self.step():
                        self._inbox.wait(IDLE_SECONDS)
                except Exception as error:
                    log.exception("engine step failed")
                    self.faults.device_failed()
                    if is_sticky(error):
                        break
        finally:
            self._inbox.close()
            for sequence in self.scheduler.everyone():
                self._endings.end(sequence, STOPPING)
            self.flush()
            self._publish_stats()
            self.executor.close()
            try:
                if not self.faults.lost and (count := spill(self.store, self._spill_until)):
                    log.info("the disk tier holds %d more blocks, which only memory held", count)
            except Exception:
                log.exception("what only memory holds could not be written to disk")
            finally:
                self.store.close()

    def _turn(self) -> None:
        self.turns, self._turned = self.turns + 1, self._clock()

    def _publish_stats(self) -> None:
        self._stats = snapshot(
            self.scheduler,
            self.pool,
            self.store,
            self.faults.counts,
            self._weight_bytes,
            self._prompts.compressed,
            self.executor.steps.held_bytes,
        )

    @torch.inference_mode()
    def step(self) -> bool:
        """Run one iteration; return False if there was nothing to compute."""
        failures = sum(self.faults.counts.values())
        try:
            self._inbox.drain()
            self.store.settle()
            self.store.expire()
            self.pool.give_back()
            if self.scheduler.waiting and self.config.preempt_seconds is not None:
                self.collect()  # whoever is set aside has all its tokens
            self._admit()
            if self.scheduler.prefilling:
                self.collect()
            prompts = self._begin_chunks()
            if prompts or self.scheduler.decoding or (self._overlap is not None and self._overlap.in_flight):
                self._compute(prompts)
            elif self.scheduler.prefilling:  # files are being read
                self._inbox.wait(IDLE_SECONDS)
            else:
                return sum(self.faults.counts.values()) > failures
            return True
        finally:
            self.flush()
            self._publish_stats()

    def _admit(self) -> None:
        """Admit the requests that get tokens of this step, and look up their warm prefixes."""
        admitted: Sequence | None = None
        while True:
            try:
                admitted = None
                admitted = self.scheduler.admit(self._clock())
                if admitted is None:
                    return
                self._prompts.look_up(admitted, self._clock())
            except Exception as error:
                self._endings.fail_prompt(admitted or self.scheduler.admitting, error)

    def _begin_chunks(self) -> list[Sequence]:
        """Begin the prefill chunks of this step; return the prompts that have one.

        While others decode, a prompt whose warm blocks are still being copied has none.
        """
        begun = []
        scored = self._scored_at_once
        for sequence, tokens in self.scheduler.chunks():
            if sequence.is_scored:  # those that come first, until memory for their logits is used up
                tokens = min(tokens, scored)
                if not tokens:
                    continue
                scored -= tokens
            try:
                if self._prompts.attach(sequence, others_decode=bool(self.scheduler.decoding)):
                    self._prompts.begin_chunk(sequence, tokens)
                    begun.append(sequence)
            except Exception as error:
                self._endings.fail_prompt(sequence, error)
        return begun

    def collect(self) -> None:
        """Deliver the tokens of the step in flight, if there is one."""
        if self._overlap is not None:
            self._overlap.collect()

    def _compute(self, prompts: list[Sequence]) -> None:
        """Compute this step's chunks and a token of every running sequence; a request that makes it fail ends alone."""
        begun = None
        if self._overlap is not None:
            if not prompts and self.executor.watch_logits is None and self._overlap.advance():
                return
            self._overlap.collect()
            begun = self._overlap.take_begun()
        outcome = run(
            prompts,
            self.scheduler.decoding,
            self.pool,
            self.executor.execute,
            max_context=self.max_context,
            inv_freq=self.model.inv_freq,
            shed=self._endings.shed,
            retrying=self._turn,
            begun=begun,
        )
        computed = [(sequence, token) for sequence, token in outcome.tokens if sequence.prefill is not None]
        works = len(outcome.tokens) > len(computed)  # a decode step: that prompts are computed tells less than a probe
        if works:
            self.faults.succeeded()
        for sequence, token in outcome.tokens:
            if sequence.prefill is None:
                self._endings.deliver(sequence, token)
        if any(sequence.workspace.is_computed for sequence, _ in computed):
            self.flush()  # tokens wait for no hand-off of others
        for sequence, token in computed:
            try:
                self._prompts.keep_sums(sequence)
                if sequence.prompt_logprobs:
                    self._endings.tell(sequence, PromptLogprobs(sequence.prompt_logprobs))
                    sequence.prompt_logprobs = ()
                if sequence.workspace.is_computed:
                    self._hand_off(sequence, token)
            except Exception as error:
                self._endings.fail_prompt(sequence, error)
        if outcome.failed or outcome.shed:
            self._endings.fail(outcome.failed, works=works)

    def _hand_off(self, sequence: Sequence, token: int) -> None:
        """Store the prompt, fill the slot, report the first token."""
        done = self._prompts.hand_off(sequence, self.scheduler.room)
        self.scheduler.begin_decoding(sequence)
        self._endings.tell(sequence, done.started(sequence, self.name, self._clock()))
        if sequence.request.sampling.max_tokens == 0:
            self._endings.finish(sequence, "length")
        else:
            self._endings.deliver(sequence, token)

    def _works(self) -> bool:
        return works(self.model, self.pool, self.executor.forward, self.scheduler.room)
