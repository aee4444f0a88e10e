"""The autopilot: measures what the service does, decides by `decision.decide`, and changes the live configuration."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from warmkv import recorders, telemetry
from warmkv.config import AutopilotConfig, Config, ConfigError
from warmkv.config.tenants import AUTOPILOT
from warmkv.platform.control import LiveConfigControl
from warmkv.platform.live_config import StaleVersionError, Version, in_force
from warmkv.platform.live_config_store import StoreError
from warmkv.platform.whatif.decision import (
    Apply,
    Close,
    Decision,
    RollBack,
    Seen,
    Wait,
    decide,
    since_of,
)
from warmkv.platform.whatif.kept import Memory
from warmkv.platform.whatif.sizes import Held
from warmkv.platform.whatif.window import RequestWindow
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.studies.replays.whatif import Values, measure

log = logging.getLogger("ray.serve")

LOOK_SECONDS = 5.0  # between two decisions
SAMPLES = 10_000  # of stored bytes, that are kept
STATES = {Wait: "waiting", Apply: "applied a step", RollBack: "rolled a step back", Close: "kept what is in force"}


class Autopilot:
    """State and loop.

    `table` is that of the what-if service, `records` returns its window, `held` tells what the replicas hold now.
    Every step is a version by "autopilot", with its reason.
    """

    def __init__(
        self,
        start: Config,
        settings: AutopilotConfig,
        memory: Memory,
        control: LiveConfigControl,
        table: Callable[[], Awaitable[dict[str, Any]]],
        records: Callable[[], RequestWindow],
        held: Callable[[], Awaitable[Held]],
        recorder: recorders.Recorder,
        wall_clock: Callable[[], float],
    ) -> None:
        self._start, self._settings, self._memory, self._control = start, settings, memory, control
        self._table, self._records, self._held, self._wall_clock = table, records, held, wall_clock
        self._recorder = recorder
        self._stored: deque[tuple[float, int]] = deque(maxlen=SAMPLES)  # when, and bytes of all replicas and tiers
        self._asked_since: float | None = None  # Unix time of the first request that it knows of
        self._begun = wall_clock()  # a window that was lost with its actor is filled again in part only
        self._state, self._why = STATES[Wait], "it has not looked yet"

    def status(self) -> dict[str, Any]:
        """Return what it does and why, and the step whose effect is not known yet."""
        step = self._memory.kept.step
        return {"state": self._state, "why": self._why, "step": step.model_dump() if step else None}

    async def run(self) -> None:
        """Decide again and again, until cancelled."""
        failed = 0  # in a row
        while True:
            try:
                await self.turn()
                failed = 0
            except Exception as error:  # the control actor is restarting, or somebody was faster
                self._state, self._why = "failed", f"{type(error).__name__}: {error}"
                failed += 1
                log.warning("autopilot: %s", self._why)
            self._recorder.set(telemetry.WHATIF_FAILED, failed, loop="autopilot")
            await asyncio.sleep(LOOK_SECONDS)

    async def turn(self) -> None:
        """Decide once, and do it."""
        now = self._wall_clock()
        if (stored := (await self._held()).stored_bytes) is not None:
            self._stored.append((now, stored))
        versions = await self._control.history()
        step = self._memory.kept.step
        window = self._records()
        whole_since = max(window.whole_since, self._begun)
        since = max(since_of(self._settings, step, now), whole_since)
        records = [record for record in window if record.arrival >= since]
        measured = self._measured(records, versions, since, now)
        if self._asked_since is None:
            self._asked_since = min((record.arrival for record in window), default=None)
        asked_since = now if self._asked_since is None else self._asked_since
        ended, failed = _outcomes(window, since if step is None else max(step.at, whole_since))
        table = await self._table()
        seen = Seen(now, versions, table, measured, len(records), asked_since, ended, failed, self._begun)
        decision = decide(self._start, self._settings, step, seen)
        await self._do(decision)
        self._state, self._why = STATES[type(decision)], decision.why

    async def _do(self, decision: Decision) -> None:
        if isinstance(decision, Wait):
            return
        log.info("autopilot: %s: %s", STATES[type(decision)], decision.why)
        if isinstance(decision, Apply):
            step = decision.step
            self._memory.keep(step=step)  # before: a step that nobody knows of would never be judged
            try:
                await self._control.change(self._start, dict(decision.changes), AUTOPILOT, decision.why, step.base)
            except (StaleVersionError, ConfigError, StoreError):  # after any other it may be in force
                self._memory.keep(step=None)
                raise
            return
        if isinstance(decision, RollBack):
            step = decision.step
            await self._control.roll_back(self._start, step.base, AUTOPILOT, decision.why, step.version)
        self._memory.keep(step=None)

    def _measured(
        self, records: Sequence[RequestRecord], versions: Sequence[Version], since: float, now: float
    ) -> Values:
        """Return the figures of requests since a time; `bytes` are means over it, of prefixes and decode slots."""
        config = self._start
        with contextlib.suppress(ConfigError):  # the gateways serve as before, too
            config = in_force(self._start, versions[0] if versions else Version())
        stored = [held for at, held in self._stored if at >= since]
        slots = sum(record.resident_bytes * (record.e2e - record.ttft) for record in records) / max(now - since, 1e-9)
        level = sum(stored) / len(stored) + slots if stored else None
        return {**measure(records, config), "bytes": level}


def _outcomes(window: RequestWindow, since: float) -> tuple[int, float]:
    """Return how many requests came since a time, answered or failed, and the share of those that failed."""
    failed = sum(at >= since for at in window.failed)
    ended = failed + sum(record.arrival >= since for record in window)
    return ended, failed / ended if ended else 0.0
