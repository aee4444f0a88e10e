"""Changes of a service as annotations of Grafana: each once, with who made it, what it set and why."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from tests.polling import PATIENCE
from tests.unit.dashboards.test_publish import TOKEN, Answer, Grafana, Handler, grafana
from warmkv.cli import app
from warmkv.dashboards.annotate import annotate
from warmkv.dashboards.publish import PublishError, Target

__all__ = ["grafana"]
HISTORY = "/gateway/v1/warmkv/policy/history"


class Annotations(Handler):
    """Grafana's annotations, and beside it a gateway that tells its versions."""

    kept: list[dict[str, Any]]
    history: list[dict[str, Any]]

    def answer(self, body: Any) -> Answer:
        path = urlsplit(self.path.removeprefix("/grafana/api"))
        if path.path == HISTORY:
            if self.headers["x-api-key"] != "operator":
                return 403, {"error": {"message": "the key is not an operator's"}}
            return 200, {"versions": self.history}
        if path.path != "/annotations" or self.headers["Authorization"] != f"Bearer {TOKEN}":
            return super().answer(body)
        if self.command == "POST":
            self.kept.append({**body, "id": len(self.kept) + 1})
            return 200, {"message": "Annotation added", "id": len(self.kept)}
        asked = parse_qs(path.query)
        return 200, [one for one in self.kept if set(asked["tags"]) <= set(one["tags"])][: int(asked["limit"][0])]


@pytest.fixture
def annotations(grafana: Grafana) -> type[Annotations]:
    Annotations.kept, Annotations.history = [], []
    grafana.RequestHandlerClass = Annotations
    return Annotations


def version(number: int, who: str, **more: Any) -> dict[str, Any]:
    """A version as the control API tells it."""
    when = f"2026-01-0{number}T00:00:00Z"
    told = {"version": number, "who": who, "when": when, "changes": {}, "rolled_back_to": None, "settings": {}}
    return {**told, "why": "it pays", **more}


def test_changes_become_annotations_once_with_who_what_and_why(
    grafana: Grafana, annotations: type[Annotations], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = f"{grafana.url}/api/gateway"
    target = Target(grafana.url, TOKEN, gateway=gateway, key="operator", timeout=PATIENCE)
    first = version(1, "autopilot", changes={"prefix_cache.default_ttl": "1h"})
    annotations.history = [version(2, "ann", rolled_back_to=0), first]
    assert [one.number for one in annotate(target)] == [2, 1]
    assert [one["text"] for one in annotations.kept] == [
        'version 1 by autopilot: prefix_cache.default_ttl = "1h" (it pays)',
        "version 2 by ann: back to version 0 (it pays)",
    ]
    assert annotations.kept[0]["time"] == 1767225600000
    assert annotations.kept[0]["tags"] == ["warmkv", "configuration", "version 1"]
    assert annotate(target) == []
    annotations.history.insert(0, version(3, "ann"))
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    monkeypatch.setenv("WARMKV_API_KEY", "operator")
    done = CliRunner().invoke(app, ["dashboards", "annotate", "--url", grafana.url, "--gateway", gateway])
    assert (done.exit_code, done.output) == (0, "annotated version 3 by ann: it pays\n")
    assert len(annotations.kept) == 3


def test_a_gateway_that_does_not_tell_its_changes_is_an_error(grafana: Grafana, annotations: type[Annotations]) -> None:
    for more, says in (
        ({"gateway": f"{grafana.url}/api/gateway", "key": "nobody's"}, "403: the key is not an operator's"),
        ({"gateway": f"{grafana.url}/api/health?", "key": "operator"}, "not as a gateway does"),
        ({"gateway": "http://127.0.0.1:9", "key": "operator"}, "cannot reach the gateway"),
        ({}, "no gateway"),
    ):
        with pytest.raises(PublishError, match=says):
            annotate(Target(grafana.url, TOKEN, timeout=PATIENCE, **more))
    assert annotations.kept == []
