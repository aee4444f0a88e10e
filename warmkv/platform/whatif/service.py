"""The what-if service: it owns the window, has rounds replayed while nothing waits, and keeps their results.

Without Ray: the actor gives it what it calls (`actor.py`), tests what they like.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from warmkv import recorders, telemetry
from warmkv.config import Config, WhatIfConfig
from warmkv.platform.live_config import Version
from warmkv.platform.live_config_store import StoreError
from warmkv.platform.whatif.candidates import BEST, NOW, OperatorCandidates, WhatIfCandidate, check
from warmkv.platform.whatif.in_force import InForce, Latest, settings_of, sized
from warmkv.platform.whatif.kept import Memory
from warmkv.platform.whatif.replays import SEARCHED, Basis, Replayed, Round
from warmkv.platform.whatif.sizes import Held
from warmkv.platform.whatif.warm_start import BLOCKS, Snapshots
from warmkv.platform.whatif.window import RequestWindow
from warmkv.policies.contents import Contents
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.studies.replays.log_fit import ENOUGH
from warmkv.simulator.studies.replays.whatif import differences, pareto, ranked

log = logging.getLogger("ray.serve")

PAUSE_SECONDS = 5.0  # between two looks for something to do
FRESH_SHARE = 20  # a round is due when one in so many requests of the window is new
SILENCE_SECONDS = 10.0  # after which what a gateway said of its load counts no more, and no bytes go with its records
REST_SECONDS = 30.0  # without load before a replay that was stopped begins anew: its start costs seconds of CPU
STEP_SECONDS, SLOWER = 600.0, 10
"""The replay of a candidate may take so many seconds, or so many times as long as that of the settings in force."""

WAITING_PER_REPLICA = 4  # requests for each replica whose first token is to come: short prompts are computed together

Replay = Callable[[Round], AsyncGenerator[Basis | Replayed]]
"""Replays a round elsewhere; closing the generator ends the replay at once."""


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """What was replayed last of a candidate."""

    replayed: Replayed
    at: float  # Unix time
    version: int  # in force in that round


class WhatIf:
    """State and loop of the service.

    `versions` tells the versions of the live configuration, the last one first, `held` how much the replicas hold now,
    and `contents` which blocks, so many of each replica at most.
    """

    def __init__(
        self,
        start: Config,
        settings: WhatIfConfig,
        replay: Replay,
        versions: Callable[[], Awaitable[Sequence[Version]]],
        held: Callable[[], Awaitable[Held]],
        contents: Callable[[int], Awaitable[Sequence[Contents]]],
        recorder: recorders.Recorder,
        memory: Memory,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._start, self._settings, self._replay = start, settings, replay
        self._versions, self._held, self._recorder, self._memory = versions, held, recorder, memory
        self._contents, self._clock, self._wall_clock = contents, clock, wall_clock
        self.window, self._own = RequestWindow(), OperatorCandidates(memory.kept.candidates)
        self._snapshots, self._started = Snapshots(), wall_clock()
        self._settings_of, self._sized = Latest(settings_of), Latest(sized)  # validating them takes CPU
        self._loads: dict[str, tuple[int, float]] = {}  # requests that wait, by gateway, and when it said so
        self._replicas = start.first_replicas
        self._heard = -SILENCE_SECONDS  # when the last records came
        self._loaded = asyncio.Event()
        self._rests_until = 0.0
        self._basis: Basis | None = None
        self._results: dict[str, CandidateResult] = {}
        self._done: tuple[Any, ...] = ()  # what the last whole round was of
        self._too_slow: dict[str, WhatIfCandidate] = {}  # by name, under the settings in force
        self._replayed_at = 0  # requests seen by then
        self._version, self._rounds, self._state, self._fault = 0, 0, "waiting for requests", ""

    # --- what gateways and operators call

    async def take(self, gateway: str, records: Sequence[RequestRecord], waiting: int) -> float:
        """Add a gateway's records to the window; nothing is replayed while too many requests wait.

        Returns when the service was started: by another time a gateway learns that its window was lost.
        """
        self.window.add(records)
        self._loads[gateway] = waiting, self._clock()
        if records:
            self._heard = self._clock()
        self._recorder.set(telemetry.WHATIF_WINDOW, len(self.window))
        if self.loaded:
            self._loaded.set()
        return self._started

    @property
    def loaded(self) -> bool:
        """Return True while more requests wait for their first token than replicas compute at once."""
        since = self._clock() - SILENCE_SECONDS
        self._loads = {name: said for name, said in self._loads.items() if said[1] >= since}
        return sum(waiting for waiting, _ in self._loads.values()) > WAITING_PER_REPLICA * self._replicas

    async def add(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Add a candidate and return it. Raises ConfigError, TooManyCandidatesError or StoreError."""
        check((await self._in_force()).now, changes)
        before = self._own.kept()
        added = self._own.add(changes)
        self._keep_own(before)
        return self._shown(added)

    async def remove(self, name: str) -> None:
        """Take an operator's candidate away. Raises UnknownCandidateError or StoreError."""
        before = self._own.kept()
        self._own.remove(name)
        self._keep_own(before)
        self._too_slow.pop(name, None)
        self._forget(name)

    def _keep_own(self, before: Mapping[str, Mapping[str, Any]]) -> None:
        try:
            self._memory.keep(candidates=self._own.kept())
        except StoreError:
            self._own = OperatorCandidates(before)
            raise

    async def table(self) -> dict[str, Any]:
        """Return the candidates, the best first, and what they rest on."""
        present = self._results.get(NOW)
        predictions = {
            name: result.replayed.prediction
            for name, result in self._results.items()
            if result.replayed.prediction is not None
        }
        order = ranked(predictions, NOW) if present else []
        front = pareto(predictions, NOW) if present else {}
        known = {candidate.name: candidate for candidate in self._own.all()}
        known |= {name: result.replayed.candidate for name, result in self._results.items()}
        rows = []
        for name in [*order, *(name for name in known if name not in order)]:
            result = self._results.get(name)
            rank = order.index(name) + 1 if name in order else None
            rows.append(self._row(known[name], result, rank, front.get(name, False)))
        return {
            "state": self._state,
            "fault": self._fault or self._memory.fault or None,
            "rounds": self._rounds,
            "version": self._version,
            "window": {
                "requests": len(self.window),
                "bytes": self.window.bytes,
                "seen": self.window.seen,
                **({"replayed": asdict(self._basis)} if self._basis else {}),
            },
            "model_error": _error(present.replayed) if present else None,
            "candidates": rows,
        }

    # --- the loop

    async def run(self) -> None:
        """Replay round after round, until cancelled."""
        failed = 0  # in a row
        while True:
            try:
                await self.turn()
                self._fault = ""
                if self._clock() >= self._rests_until:  # a round that load stopped might have failed
                    failed = 0
            except Exception as error:  # whatever it is, the next round may do better
                self._state, self._fault = "failed", f"{type(error).__name__}: {error}"
                self._recorder.add(telemetry.WHATIF_ROUNDS, 1, result="failed")
                failed += 1
                log.error("what-if: a round failed: %s", self._fault)
            self._recorder.set(telemetry.WHATIF_FAILED, failed, loop="replays")
            await asyncio.sleep(PAUSE_SECONDS)

    async def turn(self) -> None:
        """Replay a round if there is something new and nothing waits; stop it as soon as requests wait."""
        await self._take_snapshot()
        if len(self.window) < ENOUGH:
            self._state = f"waiting for {ENOUGH} requests"
            return
        if self.loaded:
            self._rest()
        if self._clock() < self._rests_until:
            return
        if (work := await self._round()) is None:
            self._state = "up to date"
            return
        seen, self._state = self.window.seen, "replaying"
        self._loaded.clear()
        for name in self._results.keys() - {NOW, BEST, *self._too_slow} - {one.name for one in work.candidates}:
            self._forget(name)
        if await self._followed(work):
            self._done, self._replayed_at = self._due(work.candidates), seen
            self._rounds, self._state = self._rounds + 1, "up to date"
            self._recorder.add(telemetry.WHATIF_ROUNDS, 1, result="done")
            self._rank()
            return
        if self.loaded:
            self._rest()
        else:
            self._state = "stopped: a new round begins"
        self._recorder.add(telemetry.WHATIF_ROUNDS, 1, result="stopped")

    def _rest(self) -> None:
        self._rests_until, self._state = self._clock() + REST_SECONDS, "stopped: requests wait for a replica"

    async def _take_snapshot(self) -> None:
        """Note what the replicas hold, if that is due: the windows of later rounds begin here."""
        if not self._snapshots.due(self.window) or not (count := (await self._held()).replicas):
            return
        try:
            self._snapshots.add(await self._contents(BLOCKS // count), self.window)
        except Exception as error:  # a replica is starting or gone: the next turn asks again
            log.info("what-if: the replicas do not tell what they hold: %s: %s", type(error).__name__, error)

    async def _followed(self, work: Round) -> bool:
        """Keep the results of a round as they come; return False if it was stopped.

        It is when requests wait for a replica, when an operator removes one of its candidates or the live settings
        change, and when a candidate takes too long.
        """
        following = asyncio.ensure_future(self._follow(work))
        ends = following, asyncio.ensure_future(self._loaded.wait()), asyncio.ensure_future(self._outdated(work))
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                if end.done():
                    end.result()
            return following.done() and following.result()
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def _follow(self, work: Round) -> bool:
        """Keep results to the end of a round; False if one of its candidates took too long."""
        found: list[str] = []
        steps, patience, began = self._replay(work), math.inf, self._clock()
        try:
            while True:
                async with asyncio.timeout(patience if patience < math.inf else None) as limit:
                    step = await anext(steps)
                if isinstance(step, Basis):
                    self._basis, began = step, self._clock()
                    continue
                self._keep(step)
                if not found:
                    patience = max(STEP_SECONDS, SLOWER * (self._clock() - began))
                found.append(step.candidate.name)
                if len(found) > len(work.candidates):
                    patience *= SEARCHED  # the search tells of nothing before its end
        except StopAsyncIteration:
            pass
        except TimeoutError:
            if not limit.expired():
                raise
            if len(found) <= len(work.candidates):
                self._give_up(work.candidates[len(found) - 1], patience)
                return False
        finally:
            await steps.aclose()
        if BEST not in found:
            self._forget(BEST)
        return True

    def _give_up(self, candidate: WhatIfCandidate, patience: float) -> None:
        """Leave a candidate that takes too long out until the settings change."""
        if candidate.proposed or candidate in self._own.all():
            self._too_slow[candidate.name] = candidate
            self._keep(Replayed(candidate, fault=f"its replay was stopped after {patience:.0f} s"))

    async def _outdated(self, work: Round) -> None:
        """Return once an operator has removed a candidate of a round, or the live settings have changed."""
        asked = {one.name: one.changes for one in work.candidates if not one.proposed}
        while asked.items() <= self._own.kept().items():
            await asyncio.sleep(PAUSE_SECONDS)
            try:
                number = (await self._in_force()).version
            except Exception as error:  # the next look may succeed
                log.info("what-if: the live settings cannot be read: %s: %s", type(error).__name__, error)
                continue
            if number != self._version:
                return

    async def _round(self) -> Round | None:
        """Return the round that is due; None if nothing is new."""
        of = await self._in_force()
        if of.version != self._version:
            self._version = of.version
            self._too_slow.clear()
        held = await self._held()
        self._replicas = held.replicas or self._start.first_replicas
        config, proposed = self._sized(of.now, replace(held, stored_bytes=None, slot_bytes=0))  # these always change
        candidates = sorted(
            (one for one in [*self._own.all(), *proposed] if one != self._too_slow.get(one.name)),
            key=lambda one: self._results[one.name].at if one.name in self._results else 0.0,
        )
        fresh = (self.window.seen - self._replayed_at) * FRESH_SHARE >= len(self.window)
        if self._done == self._due(candidates) and not fresh:
            return None
        quiet = self._clock() - self._heard > SILENCE_SECONDS  # what they hold has expired since
        return Round(
            self._snapshots.start(self.window),
            config,
            of.defaults,
            of.changed,
            candidates,
            None if quiet else held.stored_bytes,
            self._settings.quality,
        )

    def _due(self, candidates: Sequence[WhatIfCandidate]) -> tuple[Any, ...]:
        return self._version, sorted((one.name, repr(one.changes)) for one in candidates)

    async def _in_force(self) -> InForce:
        return self._settings_of(self._start, list(await self._versions()))

    # --- results

    def _keep(self, replayed: Replayed) -> None:
        name, record = replayed.candidate.name, self._recorder
        self._forget(name)
        self._results[name] = CandidateResult(replayed, self._wall_clock(), self._version)
        if replayed.prediction is not None:
            for figure, metric in telemetry.WHATIF_FIGURES.items():
                value = replayed.prediction.figures.get(figure)
                if value is not None:
                    record.set(metric, value, candidate=name)
        for figure, value in (replayed.error or {}).items():
            if value is not None:
                record.set(telemetry.WHATIF_ERROR, value, figure=figure)

    def _rank(self) -> None:
        """Record the order of what has been replayed."""
        found = {name: result.replayed.prediction for name, result in self._results.items()}
        predictions = {name: prediction for name, prediction in found.items() if prediction is not None}
        if NOW in predictions:
            for at, name in enumerate(ranked(predictions, NOW)):
                self._recorder.set(telemetry.WHATIF_RANK, at + 1, candidate=name)

    def _forget(self, name: str) -> None:
        self._results.pop(name, None)
        for metric in (*telemetry.WHATIF_FIGURES.values(), telemetry.WHATIF_RANK):
            self._recorder.forget(metric, candidate=name)
        if name == NOW:
            self._recorder.forget(telemetry.WHATIF_ERROR)

    def _shown(self, candidate: WhatIfCandidate) -> dict[str, Any]:
        return {
            "candidate": candidate.name,
            "proposed": candidate.proposed,
            "changes": dict(candidate.changes),
            "restart": list(candidate.restart),
        }

    def _row(
        self, candidate: WhatIfCandidate, result: CandidateResult | None, rank: int | None, front: bool
    ) -> dict[str, Any]:
        row = {**self._shown(candidate), "rank": rank, "pareto": front, "fault": None, "at": None, "version": None}
        if result is None:
            return {**row, "requests": 0, "figures": None, "difference": None}
        replayed = result.replayed
        found, base = replayed.prediction, replayed.now
        return {
            **row,
            "fault": replayed.fault or None,
            "at": datetime.fromtimestamp(result.at, UTC).isoformat(),
            "version": result.version,
            "requests": found.requests if found else 0,
            "figures": found.figures if found else None,
            "difference": differences(found.figures, base.figures) if found and base else None,
        }


def _error(present: Replayed) -> dict[str, Any]:
    """Return the model's own error: what it predicts for the settings in force, against what was measured."""
    return {"requests": present.judged, "measured": present.measured, "error": present.error}
