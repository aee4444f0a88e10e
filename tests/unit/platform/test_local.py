"""Starting a service on this machine: what fails before anything runs."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from warmkv.config import Config, ModelConfig, parse
from warmkv.platform.local import SPARE_SECONDS, check_model, delete, ended_part, start_ray, told_start
from warmkv.replicas.block_store.packs import PackError
from warmkv.replicas.protocol import EngineError

START = """
from warmkv.config import Config
from warmkv.platform.local import StartError, start_ray
try:
    start_ray(Config())
except StartError as error:
    print(error)
"""


def test_a_ray_that_does_not_start_is_one_error_with_the_place_of_its_logs(tmp_path: Path) -> None:
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    environment = os.environ | {
        "RAY_TMPDIR": str(no_folder)
    }  # in a process of its own: Ray's settings are its environment
    told = subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.startswith("Ray did not start: ")
    assert told.stdout.strip().endswith(f"its logs are in {no_folder}/ray/session_latest/logs")


def traceback_of(error: Exception) -> str:
    """Return a failed start as Serve tells it."""
    try:
        raise error
    except type(error):
        return f"The deployment failed to start 3 times in a row.\n{traceback.format_exc()}"


def test_a_start_that_users_can_mend_is_told_without_tracebacks() -> None:
    pack = traceback_of(PackError("pack p: no room"))
    assert told_start("Deploying failed.", [pack, pack]) == "a replica cannot start: pack p: no room"


@pytest.mark.parametrize("error", [RuntimeError("no idea"), EngineError("no idea"), PackError("two\nlines")])
def test_a_start_that_fails_otherwise_is_told_whole(error: Exception) -> None:
    for reasons in ([traceback_of(error)], [traceback_of(PackError("pack p: no room")), traceback_of(error)]):
        assert told_start("Deploying failed.", reasons) == "\n".join(["Deploying failed.", *reasons])
    assert told_start("Deploying failed.", []) == "Deploying failed."


def test_sigterm_is_handled_as_before_once_ray_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray installs a handler of its own, which would end the process with a stack of C++ and leave its own behind."""
    before, stopped = signal.getsignal(signal.SIGTERM), list[bool]()

    def init(**_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))

    def interrupted(**_: Any) -> None:
        init()
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.cluster_resources", dict)
    monkeypatch.setattr("ray.shutdown", lambda: stopped.append(True))
    start_ray(Config())
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.setattr("ray.init", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_ray(Config())
    assert signal.getsignal(signal.SIGTERM) is before
    assert stopped == [True]


def test_a_part_of_ray_that_has_ended_is_named_unless_ray_goes_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dead: list[tuple[str, Any]] = [("log_monitor", None)]
    monkeypatch.setattr("ray._private.worker._global_node", SimpleNamespace(dead_processes=lambda: dead))
    assert ended_part() is None
    dead.append(("raylet", None))
    assert ended_part() == "raylet"
    monkeypatch.setattr("ray._private.worker._global_node", None)
    assert ended_part() is None


def test_a_name_that_the_hub_does_not_have_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, file: str, revision: str | None) -> str:
        raise OSError(f"404 for {name}/{file} of {revision}\nand a long story")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", missing)
    says = r"some/model \(model.path\) cannot be had from the hub: 404 for some/model/config.json of main$"
    with pytest.raises(FileNotFoundError, match=says):
        check_model(ModelConfig(path="some/model", revision="main"))


def test_a_name_that_is_in_the_cache_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: "/cache/config.json")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("it is there"))
    check_model(ModelConfig(path="some/model"))


class StoppingServe:
    """Play Serve, whose application is there for `seconds`, and the clock that goes on while somebody sleeps."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.deleted = seconds, 0.0, list[str]()

    def delete(self, name: str, _blocking: bool = True) -> None:
        assert not _blocking
        self.deleted.append(name)

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(applications={"warmkv": None} if self.now < self.seconds else {})

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("seconds", [70.0, 160.0, math.inf])
def test_a_stop_takes_as_long_as_the_settings_give_it(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Wait for 160 s and more, a third for handing blocks over included; Serve itself would wait for 60."""
    serve = StoppingServe(seconds)
    monkeypatch.setattr("ray.serve.delete", serve.delete)
    monkeypatch.setattr("ray.serve.status", serve.status)
    monkeypatch.setattr("warmkv.platform.local.time", serve)
    config = parse({"cluster": {"drain_seconds": 120}})
    delete(config)
    assert serve.deleted == ["warmkv"]
    assert serve.now == pytest.approx(min(seconds, config.cluster.stop_seconds + SPARE_SECONDS), abs=1)


def test_what_was_never_deployed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmkv.platform.local.time", StoppingServe(math.inf))
    monkeypatch.setattr("ray.serve.delete", lambda *_, **__: 1 / 0)
    delete(Config())
