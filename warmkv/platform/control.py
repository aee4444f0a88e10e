"""Live configuration: an actor keeps its versions, and every gateway follows it by long polls.

A request takes from its gateway, when it arrives, all that it is served under: compression policy, lifetimes of its
prefixes, routing parameters and prices. They go with it to the router and to the replica, which therefore hold none of
their own, and whatever was in flight before a change ends as it began.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from warmkv.config import Config, ControlConfig
from warmkv.platform import named_actors
from warmkv.platform.live_config import History, Version, change, roll_back
from warmkv.platform.live_config_store import Store, StoreError, restored, store_of

log = logging.getLogger("ray.serve")

HISTORY = 100  # versions that are kept
FOLLOW_SECONDS = 10.0  # that a gateway waits for a change before it asks again
SILENCE_SECONDS = 15.0  # after which a gateway that has not asked is forgotten
APPLY_SECONDS = 5.0  # that the answer to a change waits until all gateways have heard of it
START_SECONDS = 60.0  # that a gateway which starts waits for the version in force; then it fails
RETRY_SECONDS = 0.5  # between two calls of a gateway to an actor that does not answer


@dataclass(frozen=True, slots=True)
class Report:
    """What a gateway says of itself: the last version that it heard of, the one in force, and why they differ."""

    heard: int = -1
    in_force: int = -1
    fault: str = ""


class LiveConfigControl(Protocol):
    """What the gateways ask of the actor, which `Control` is and `RemoteControl` calls.

    `start` is what the gateway was started with, in which a version must fit.
    """

    async def follow(self, part: str, report: Report, seconds: float) -> Version: ...
    async def change(
        self, start: Config, changes: dict[str, Any], who: str, why: str, based_on: int | None
    ) -> dict[str, Any]: ...
    async def roll_back(
        self, start: Config, to: int | None, who: str, why: str, based_on: int | None
    ) -> dict[str, Any]: ...
    async def status(self) -> dict[str, Any]: ...
    async def history(self) -> list[Version]: ...


class Control:
    """The state of the actor; without Ray, so that it can be tested alone.

    What is kept but cannot be read is set aside under another name, and version 0 is in force.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        apply_seconds: float = APPLY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._apply_seconds, self._store, self._name = apply_seconds, store, f"{name}-policy.json"
        self._clock, self._wall_clock = clock, wall_clock
        self._parts: dict[str, tuple[Report, float]] = {}  # with when it came
        self._changing, self._news = asyncio.Lock(), asyncio.Condition()
        history, self._fault = restored(store, self._name, History, wall_clock())
        self._history = history or History()

    async def follow(self, part: str, report: Report, seconds: float) -> Version:
        """Wait for a version that the part has not heard of, at most `seconds`, and return the one in force."""
        async with self._news:
            self._parts[part] = (report, self._clock())
            self._news.notify_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._news.wait_for(lambda: self._history.current.number != report.heard)
        return self._history.current

    async def change(
        self, start: Config, changes: dict[str, Any], who: str, why: str, based_on: int | None = None
    ) -> dict[str, Any]:
        """Bring changed settings into force; the status as soon as all gateways have heard of it.

        Raises StaleVersionError, ConfigError or StoreError; then nothing has changed.
        """
        return await self._append(
            lambda when: change(start, self._history, changes, based_on, who=who, when=when, why=why)
        )

    async def roll_back(
        self, start: Config, to: int | None, who: str, why: str, based_on: int | None = None
    ) -> dict[str, Any]:
        """Bring an earlier version into force anew, the one before if `to` is None; the status as by `change`.

        Raises what that does, and UnknownVersionError.
        """
        return await self._append(
            lambda when: roll_back(start, self._history, to, based_on, who=who, when=when, why=why)
        )

    async def status(self) -> dict[str, Any]:
        """Return the version in force and the versions that the gateways report."""
        parts = {part: {"version": said.in_force, "fault": said.fault or None} for part, said in self._heard().items()}
        return {"current": self._history.current, "parts": parts, "fault": self._fault or None}

    async def history(self) -> list[Version]:
        """Return the versions that are kept, the last one first."""
        return list(reversed(self._history.versions))

    async def _append(self, make: Callable[[datetime], Version]) -> dict[str, Any]:
        async with self._changing:  # one after the other: each is based on the one before
            version = make(datetime.fromtimestamp(self._wall_clock(), UTC))
            history = self._history.with_next(version, HISTORY)
            try:
                data = history.model_dump_json(indent=1).encode()
                await asyncio.to_thread(self._store.write, self._name, data)
            except OSError as error:
                raise StoreError(f"the change could not be kept, and is not in force: {error}") from None
            self._history, self._fault = history, ""
        async with self._news:
            self._news.notify_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._apply_seconds):
                    await self._news.wait_for(
                        lambda: all(report.heard >= version.number for report in self._heard().values())
                    )
        return await self.status()

    def _heard(self) -> dict[str, Report]:
        """Return the last report of every gateway that is alive."""
        since = self._clock() - SILENCE_SECONDS
        self._parts = {part: (report, when) for part, (report, when) in self._parts.items() if when > since}
        return {part: report for part, (report, _) in self._parts.items()}


class LiveConfigFollower:
    """Bring every version into force in a gateway, by `take`, which raises ConfigError where one does not fit.

    `refused` is told after each version whether it did not fit.
    """

    def __init__(
        self,
        control: LiveConfigControl,
        part: str,
        take: Callable[[Version], None],
        refused: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._control, self._part, self._take, self._refused = control, part, take, refused
        self._report = Report()

    async def start(self) -> None:
        """Bring the version in force now into force here. Raises TimeoutError where the actor does not answer."""
        async with asyncio.timeout(START_SECONDS):
            while self._report.heard < 0:
                await self._ask()

    async def run(self) -> None:
        """Do so with every later version, until cancelled."""
        while True:
            await self._ask()

    async def _ask(self) -> None:
        try:
            version = await self._control.follow(self._part, self._report, FOLLOW_SECONDS)
        except Exception as error:  # it is restarting: what is in force stays
            log.warning("the policy control cannot be reached: %s", error)
            await asyncio.sleep(RETRY_SECONDS)
            return
        if version.number == self._report.heard:
            return
        try:
            self._take(version)
            self._report = Report(version.number, version.number)
        except Exception as error:  # ConfigError or not: whoever stopped following would keep what it has for ever
            log.error("version %d of the policy cannot be brought into force: %s", version.number, error)
            self._report = Report(version.number, max(self._report.in_force, 0), str(error))
        self._refused(self._report.in_force != self._report.heard)


class RemoteControl:
    """The actor of an application, found by its name for every call: it may have been started anew."""

    def __init__(self, application: str) -> None:
        self._name = control_name(application)

    async def follow(self, part: str, report: Report, seconds: float) -> Version:
        version: Version = await named_actors.call(self._name, "follow", part, report, seconds)
        return version

    async def change(
        self, start: Config, changes: dict[str, Any], who: str, why: str, based_on: int | None
    ) -> dict[str, Any]:
        status: dict[str, Any] = await named_actors.call(self._name, "change", start, changes, who, why, based_on)
        return status

    async def roll_back(
        self, start: Config, to: int | None, who: str, why: str, based_on: int | None
    ) -> dict[str, Any]:
        status: dict[str, Any] = await named_actors.call(self._name, "roll_back", start, to, who, why, based_on)
        return status

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = await named_actors.call(self._name, "status")
        return status

    async def history(self) -> list[Version]:
        versions: list[Version] = await named_actors.call(self._name, "history")
        return versions


def control_name(application: str) -> str:
    return f"{application}-policy-control"


def start_control(application: str, config: ControlConfig) -> Any:
    """Start the application's control actor anew with these settings: named, detached, restarted when it dies.

    What it knows is in its store, so nothing is lost with the one before.
    """
    return named_actors.start(control_name(application), Control, store_of(config), application)
