"""The policy control without Ray: what it keeps, what it tells its followers, and what a damaged file does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RpcError
from ray.experimental import internal_kv

from tests.polling import PATIENCE
from warmkv.config import Config, ConfigError, load
from warmkv.platform import control as control_module
from warmkv.platform.control import Control, LiveConfigFollower, Report
from warmkv.platform.live_config import StaleVersionError, Version, in_force
from warmkv.platform.live_config_store import ClusterStore, FolderStore, StoreError

START = Config()
CHANGES = {"pricing.input": 5}
PATIENT = PATIENCE  # whoever has not heard of a change would be waited for
HASTY = 0.0


def run(scenario: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(scenario, PATIENCE)

    return asyncio.run(limited())


def control(folder: Path, apply_seconds: float = HASTY, **clocks: Callable[[], float]) -> Control:
    return Control(
        FolderStore(folder), "warmkv", apply_seconds, **{"clock": lambda: 0.0, "wall_clock": lambda: 1e9, **clocks}
    )


class Part:
    """What a gateway has taken, and a version that it cannot take."""

    def __init__(self, cannot: int = -1) -> None:
        self.taken: list[int] = []
        self._cannot = cannot

    def take(self, version: Version) -> None:
        if version.number == self._cannot:
            raise ConfigError("it does not fit")
        self.taken.append(version.number)


def test_a_change_is_told_to_all_parts_before_it_is_answered(tmp_path):
    async def scenario() -> None:
        actor, parts = control(tmp_path, PATIENT), {name: Part() for name in ("a", "b")}
        followers = [LiveConfigFollower(actor, name, part.take) for name, part in parts.items()]
        for follower in followers:
            await follower.start()
        tasks = [asyncio.create_task(follower.run()) for follower in followers]
        status = await actor.change(START, CHANGES, "ann", "dearer")
        assert status["parts"] == {name: {"version": 1, "fault": None} for name in parts}
        assert [part.taken for part in parts.values()] == [[0, 1], [0, 1]]
        status = await actor.roll_back(START, None, "bob", "cheaper")
        assert [part.taken for part in parts.values()] == [[0, 1, 2], [0, 1, 2]]
        assert status["current"].rolled_back_to == 0
        for task in tasks:
            task.cancel()

    run(scenario())


def test_a_part_that_cannot_take_a_version_says_so_and_takes_the_next(tmp_path):
    async def scenario() -> None:
        actor, part = control(tmp_path, PATIENT), Part(cannot=1)
        refused: list[bool] = []
        follower = LiveConfigFollower(actor, "a", part.take, refused.append)
        await follower.start()
        task = asyncio.create_task(follower.run())
        status = await actor.change(START, CHANGES, "ann", "")
        assert status["parts"] == {"a": {"version": 0, "fault": "it does not fit"}}
        status = await actor.change(START, CHANGES, "ann", "")
        assert status["parts"] == {"a": {"version": 2, "fault": None}}
        assert (part.taken, refused) == ([0, 2], [False, True, False])
        task.cancel()

    run(scenario())


def test_a_follower_outlives_an_actor_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr("warmkv.platform.control.RETRY_SECONDS", 0)

    class Restarting(Control):
        down = True

        async def follow(self, part: str, report: Report, seconds: float) -> Version:
            if self.down:
                self.down = False
                raise ConnectionError("restarting")
            return await super().follow(part, report, seconds)

    async def scenario() -> None:
        actor, part = Restarting(FolderStore(tmp_path), "warmkv", PATIENT, clock=lambda: 0.0), Part()
        follower = LiveConfigFollower(actor, "a", part.take)
        await follower.start()
        assert part.taken == [0]
        task = asyncio.create_task(follower.run())
        await actor.change(START, CHANGES, "ann", "")
        actor.down = True
        await actor.change(START, CHANGES, "ann", "")
        assert part.taken == [0, 1, 2]
        task.cancel()

    run(scenario())


def test_start_gives_up_on_an_actor_that_never_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(control_module, "START_SECONDS", 0.01)

    class Silent(Control):
        async def follow(self, part: str, report: Report, seconds: float) -> Version:
            await asyncio.Event().wait()
            raise AssertionError

    silent = Silent(FolderStore(tmp_path), "warmkv", HASTY)
    follower = LiveConfigFollower(silent, "a", lambda version: None)
    with pytest.raises(TimeoutError):
        run(follower.start())


def test_a_silent_part_is_forgotten_and_not_waited_for(tmp_path):
    async def scenario() -> None:
        now = [0.0]
        actor = control(tmp_path, PATIENT, clock=lambda: now[0])
        await actor.follow("gone", Report(), 0)
        now[0] = 10.0
        assert set((await actor.status())["parts"]) == {"gone"}
        now[0] = 16.0
        status = await actor.change(START, CHANGES, "ann", "")
        assert status["parts"] == {}

    run(scenario())


def test_what_was_changed_is_there_after_a_restart(tmp_path):
    async def scenario() -> None:
        before = control(tmp_path)
        await before.change(START, CHANGES, "ann", "first")
        await before.change(START, {"compression.policy": "snapkv@0.2"}, "bob", "second", based_on=1)
        after = control(tmp_path)
        assert await after.status() == await before.status()
        assert [version.why for version in await after.history()] == ["second", "first"]
        current = (await after.status())["current"]
        assert in_force(START, current) == load(flags=["pricing.input=5", "compression.policy=snapkv@0.2"], environ={})
        with pytest.raises(StaleVersionError):
            await after.change(START, CHANGES, "ann", "", based_on=1)
        assert [path.name for path in tmp_path.iterdir()] == ["warmkv-policy.json"]

    run(scenario())


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"versions": [{"number": 0}]}', b'{"version": []}'])
def test_a_damaged_file_is_set_aside_and_said(tmp_path, content):
    async def scenario() -> None:
        file = tmp_path / "warmkv-policy.json"
        file.write_bytes(content)
        actor = control(tmp_path)
        status = await actor.status()
        assert status["current"] == Version()
        assert "warmkv-policy.json cannot be read and was copied to" in status["fault"]
        assert (tmp_path / "warmkv-policy.json.damaged-1000000000").read_bytes() == content
        assert file.read_bytes() == content  # nothing is overwritten before somebody changes something
        assert (await actor.change(START, CHANGES, "ann", ""))["fault"] is None
        assert (await control(tmp_path).status())["current"].number == 1

    run(scenario())


def test_a_change_that_cannot_be_kept_is_not_in_force(tmp_path):
    folder = tmp_path / "folder"

    async def scenario() -> None:
        actor = control(folder)
        await actor.change(START, CHANGES, "ann", "")
        before = await actor.status()
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        with pytest.raises(StoreError, match="could not be kept"):
            await actor.change(START, {"pricing.input": 6}, "ann", "")
        assert await actor.status() == before

    run(scenario())


def test_a_head_that_does_not_answer_is_a_store_that_cannot_keep(monkeypatch):
    def fails(*_: Any, **__: Any) -> bytes:
        raise RpcError("the head does not answer")

    async def scenario() -> None:
        monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda *_, **__: None)
        actor = Control(ClusterStore(), "warmkv", HASTY)
        monkeypatch.setattr(internal_kv, "_internal_kv_put", fails)
        with pytest.raises(StoreError, match=r"could not be kept, and is not in force: the head does not answer"):
            await actor.change(START, CHANGES, "ann", "")
        assert (await actor.status())["current"] == Version()
        monkeypatch.setattr(internal_kv, "_internal_kv_get", fails)
        with pytest.raises(OSError, match="the head does not answer"):
            ClusterStore().read("warmkv-policy.json")

    run(scenario())


def test_changes_at_once_come_one_after_the_other(tmp_path):
    async def scenario() -> None:
        actor = control(tmp_path)
        every = [actor.change(START, CHANGES, "ann", str(number)) for number in range(10)]
        await asyncio.gather(*every)
        numbers = [version.number for version in await actor.history()]
        assert numbers == list(range(10, 0, -1))
        based = [actor.change(START, CHANGES, "ann", "", based_on=10) for _ in range(5)]
        results = await asyncio.gather(*based, return_exceptions=True)
        assert sorted(isinstance(result, StaleVersionError) for result in results) == [False, True, True, True, True]

    run(scenario())


def test_only_the_last_versions_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(control_module, "HISTORY", 2)

    async def scenario() -> None:
        actor = control(tmp_path)
        for _ in range(4):
            await actor.change(START, CHANGES, "ann", "")
        assert [version.number for version in await actor.history()] == [4, 3]
        assert [version.number for version in await control(tmp_path).history()] == [4, 3]

    run(scenario())
