"""Deliver tokens and end requests: finished, failed by themselves, out of memory, or with the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from warmkv.logs import about
from warmkv.replicas.engine.faults import (
    FailureCounts,
    FailureKind,
    describe,
    is_out_of_memory,
    is_sticky,
    let_go,
)
from warmkv.replicas.engine.passes import empty_cache
from warmkv.replicas.engine.prompts import Prompts
from warmkv.replicas.engine.scheduler import EngineEvent, Scheduler, Sequence
from warmkv.replicas.protocol import Failed, Finished, FinishReason, TokenLogprobs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endings:
    """End requests: free what they hold, count failures, tell their listeners.

    `probe` runs a request known to be sound.
    """

    scheduler: Scheduler
    prompts: Prompts
    faults: FailureCounts
    device: torch.device
    clock: Callable[[], float]
    probe: Callable[[], bool]

    def deliver(self, sequence: Sequence, token: int) -> None:
        """Report a drawn token, and end the sequence where it ends.

        A resumed request takes the tokens that another replica drew, one each step: its slot, what a policy evicts from
        it and its random numbers come out as they were there.
        """
        sequence.number = None
        if (given := sequence.given) is not None:
            token = given
        sequence.last_token = token
        sequence.num_output_tokens += 1
        sampling, processor = sequence.request.sampling, sequence.processor
        if processor is not None and (fault := processor.take(token)):
            self.end(sequence, Failed(f"its constraint cannot be followed: {fault}", "request"))
            return
        if token in self.prompts.model.eos_ids and not sampling.ignore_eos:
            told = sequence.logprobs if sequence.is_scored else None
            self.finish(sequence, "end", () if told is None else (told,))
            return
        if token in sampling.stop_token_ids:
            self.finish(sequence, "stop")
            return
        self.tell(sequence, token if sequence.logprobs is None else sequence.logprobs)
        if processor is not None and processor.is_complete:
            self.finish(sequence, "end")
        elif sequence.num_output_tokens == sampling.max_tokens:
            self.finish(sequence, "length")

    def finish(self, sequence: Sequence, reason: FinishReason, logprobs: tuple[TokenLogprobs, ...] = ()) -> None:
        """End an answer that is complete or aborted; `logprobs` are those of the token that ended it."""
        if reason != "cancelled":
            self.faults.succeeded()
        self.end(sequence, Finished(reason, sequence.num_output_tokens, logprobs=logprobs))

    def shed(self, sequence: Sequence, error: Exception) -> None:
        """Fail a request for lack of memory or of a device, so that another replica takes it."""
        kind: FailureKind = "memory" if is_out_of_memory(error) else "device"
        self.faults.failed(kind, hash(sequence.request.token_ids))
        self.end(sequence, Failed(describe(error)))

    def fail_prompt(self, sequence: Sequence | None, error: Exception) -> None:
        """Fail a request outside of a pass. Raises an error that belongs to no request, or that loses the device."""
        if sequence is None or is_sticky(error):
            raise error
        with about(sequence.request.context):
            log.error("prefill failed", exc_info=error)
        self.fail([(sequence, let_go(error))], works=False)

    def fail(self, failed: Items[tuple[Sequence, Exception]], works: bool) -> None:
        """Fail requests that failed alone. `works` if the device computed others; else a probe tells."""
        try:
            for sequence, _ in failed:
                self._drop(sequence)
            if any(is_out_of_memory(error) for _, error in failed):
                empty_cache(self.device)
            works = works or self.probe()
        except Exception:
            for sequence, error in failed:
                self.shed(sequence, error)
            raise
        if not works:
            self.faults.device_failed()
        for sequence, error in failed:
            if works and not is_out_of_memory(error):
                self.faults.failed("request", hash(sequence.request.token_ids))
                self.end(sequence, Failed(describe(error), "request"))
            else:
                self.shed(sequence, error)

    def end(self, sequence: Sequence, event: Finished | Failed) -> None:
        """Free what a sequence holds and tell its listener, even if the device cannot free anything any more."""
        try:
            self._drop(sequence)
        except Exception:
            log.exception("request %s cannot be freed", sequence.request.id)
        self.scheduler.completions.ended(self.clock())
        self.tell(sequence, event)

    def tell(self, sequence: Sequence, event: EngineEvent) -> None:
        """Tell the listener of a request, and end the request if that fails."""
        try:
            sequence.emit(event)
        except Exception:  # the others must hear
            log.exception("request %s cannot be told", sequence.request.id)
            self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Free everything that a sequence holds."""
        self.prompts.release(sequence)
        sequence.prefill = sequence.attaching = None
        self.scheduler.remove(sequence)
