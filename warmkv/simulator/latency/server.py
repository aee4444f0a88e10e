"""A server by itself, without a cluster around it: requests of known arrivals through an engine with a mixed budget."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from warmkv.policies.fair_queue import NO_TAG, FairQueue, Tag
from warmkv.simulator.engine.formation import NEVER
from warmkv.simulator.engine.limits import BatchingError, Limits
from warmkv.simulator.engine.mixed import MixedBudget, Work
from warmkv.simulator.steps.costs import PhaseCosts, StepCost

NONE: Work = (0, 0, 0)


@dataclass(slots=True, eq=False)
class ServedRequest:
    """Track a request, and what became of it. Times are virtual seconds, `NEVER` until they are known."""

    arrival: float
    prompt: int  # tokens, at least 1
    output: int  # tokens, at least 1
    cached: int = 0  # leading prompt tokens whose KV need not be computed when it is first admitted

    scheduled: float = NEVER  # start of the first step that computes some of it
    first: float = NEVER  # end of the step that gives its first token
    finished: float = NEVER
    noted: float = NEVER  # end of the step during which it arrived, or its arrival

    # All that the server had done when it was noted, at its first token and at its end.
    work_before: Work = NONE
    work_first: Work = NONE
    work_finished: Work = NONE

    tenant: str = ""
    tag: Tag = NO_TAG
    computed: int = 0  # these as `mixed.MixedRequest` has them
    num_output_tokens: int = 0
    num_preemptions: int = 0


class Server:
    """Own one engine with a mixed token budget, and note the work that it had done at every request's times."""

    def __init__(self, cost: StepCost, limits: Limits, *, fast_forward: bool = True) -> None:
        self._limits, self._waiting = limits, FairQueue[ServedRequest]()
        self._wakes: list[float] = []  # when the engine goes on: the last of them, if there is one
        costs, wake = PhaseCosts(cost, cost), self._wakes.append
        self.engine = MixedBudget(self, self._waiting, wake, fast_forward, limits=limits, costs=costs)

    def serve(self, requests: Iterable[ServedRequest]) -> None:
        """Serve requests, in the order of arrival, to their end. Raises BatchingError if one could never fit."""
        for request in requests:
            self._run(request.arrival)
            if not 0 <= request.cached < request.prompt or request.output < 1:
                raise BatchingError("a request needs a prompt that is not all cached, and at least one token of output")
            if self._limits.kv_tokens is not None and not self.engine.ever_fits(request):
                tokens = f"{request.prompt} + {request.output} tokens"
                raise BatchingError(f"{tokens} do not fit into {self._limits.kv_tokens} tokens of KV")
            request.tag = self._waiting.push(request, request.tenant, request.prompt + request.output)
            self.engine.arrived(request, request.arrival)
            request.noted, request.work_before = self._wakes[-1], self.engine.work_ahead
        self._run(math.inf)

    def _run(self, until: float) -> None:
        """Let the engine go on before that time."""
        wakes, resume = self._wakes, self.engine.resume
        while wakes and (now := wakes[-1]) < until:
            wakes.clear()
            resume(now)

    # --- what the engine tells

    def begin(self, request: ServedRequest, now: float) -> float:
        if request.scheduled == NEVER:
            request.scheduled, request.computed = now, request.cached
        return 0.0

    def prompt_computed(self, request: ServedRequest, now: float) -> None:
        if request.first == NEVER:
            request.first, request.work_first = now, self.engine.work

    def preempted(self, request: ServedRequest, now: float) -> None:
        pass

    def end(self, request: ServedRequest, now: float) -> None:
        request.finished, request.work_finished = now, self.engine.work
