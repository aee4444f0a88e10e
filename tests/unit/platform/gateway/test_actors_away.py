"""Tell operators that an actor does not answer, and that a change may have been made."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.unit.platform.asgi import Gateway
from tests.unit.platform.gateway.access.test_access import OPERATORS
from warmkv.platform.control import Control, RemoteControl
from warmkv.platform.prefix_directory import status_of
from warmkv.platform.whatif.actor import RemoteWhatIf

CHANGE = {"changes": {"routing.overload": 3}, "why": "test"}


class Dead:
    """Stand for an actor whose process has ended."""

    def __getattr__(self, name: str) -> Any:
        return self

    async def remote(self, *_: Any) -> None:
        raise ray.exceptions.ActorUnavailableError("the process has ended", None)


def nobody(*_: Any, **__: Any) -> Any:
    raise ValueError("no actor has the name")


@pytest.mark.parametrize("found", [lambda *_, **__: Dead(), nobody])
def test_an_actor_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    away: Any = {"whatif": RemoteWhatIf("warmkv", "only"), "status": partial(status_of, [Dead()])}
    gateway = Gateway(tmp_path, OPERATORS, "control.whatif={}", **away)
    for method in ("status", "history", "change", "roll_back"):
        monkeypatch.setattr(Control, method, getattr(RemoteControl("warmkv"), method))
    monkeypatch.setattr(ray, "get_actor", found)
    for method, path, body in (
        ("GET", "policy", None),
        ("GET", "policy/history", None),
        ("PUT", "policy", CHANGE),
        ("POST", "policy/rollback", {"why": "test"}),
        ("GET", "whatif", None),
        ("POST", "whatif", {"changes": CHANGE["changes"]}),
        ("DELETE", "whatif/1", None),
        ("GET", "replicas", None),
        ("GET", "memory", None),
        ("GET", "live", None),
    ):
        answer = gateway.call(method, f"/v1/warmkv/{path}", "ops'", body)
        message = answer.body["error"]["message"]
        assert (answer.status, "does not answer: it is being started anew" in message) == (529, True), (path, answer)
        assert ("the change may have been made" in message) == (path.startswith("policy") and method != "GET")
    counted = {name for name, *_ in gateway.metrics.seen}
    assert "warmkv_errors" in counted
    assert "warmkv_rejected" not in counted  # which an alert divides by the requests for answers
