"""The operators' endpoints for pages of other origins: preflights, If-Match, and the audit log of what was asked."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.unit.platform.asgi import Gateway, Reply
from tests.unit.platform.gateway.access.test_access import OF_OPERATORS, OPERATORS, TENANTS
from warmkv.config import ConfigError, load
from warmkv.platform.control import Control
from warmkv.platform.gateway.access import audit
from warmkv.platform.gateway.paths import of_operators

GRAFANA = "http://grafana.example.org:3000"
POLICY = "/v1/warmkv/policy"
CHANGE = {"changes": {"routing.overload": 3}, "why": "what-if: better"}
ACTION = "content-type,x-api-key,x-grafana-action,x-grafana-device-id"  # headers of an action of a dashboard


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    return Gateway(tmp_path, TENANTS, OPERATORS, f"control.allowed_origins=[{GRAFANA}]")


def preflight(gateway: Gateway, path: str, method: str, origin: str = GRAFANA, headers: str = ACTION) -> Reply:
    asked = {"access_control_request_method": method, "access_control_request_headers": headers}
    return gateway.call("OPTIONS", path, origin=origin, **asked)


def test_a_preflight_needs_no_key_and_lets_the_origin_s_actions_through(gateway: Gateway) -> None:
    for method, path in OF_OPERATORS:
        asked = preflight(gateway, path, method)
        assert (asked.status, asked.headers["access-control-allow-origin"]) == (200, GRAFANA), path
        assert "x-grafana-action" in asked.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in asked.headers  # no cookie is of use here


def test_an_action_sent_as_a_browser_does_changes_the_policy_and_its_answer_can_be_read(gateway: Gateway) -> None:
    sent = gateway.call("PUT", POLICY, "ops'", CHANGE, origin=GRAFANA, x_grafana_action="1")
    assert (sent.status, sent.body["version"], sent.body["who"]) == (200, 1, "ops")
    assert sent.headers["access-control-allow-origin"] == GRAFANA
    assert "etag" in sent.headers["access-control-expose-headers"]
    assert "Origin" in sent.headers["vary"]
    refused = gateway.call("PUT", POLICY, "plain's", CHANGE, origin=GRAFANA, x_grafana_action="1")
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (403, GRAFANA)  # the page sees why
    assert gateway.call("GET", POLICY, "ops'").body["version"] == 1


def test_other_origins_and_other_paths_are_for_no_page(gateway: Gateway, tmp_path: Path) -> None:
    for origin in ("http://grafana.example.org", "https://grafana.example.org:3000", "null", "http://evil.example"):
        assert preflight(gateway, POLICY, "PUT", origin).status == 400
        answer = gateway.call("GET", POLICY, "ops'", origin=origin)
        assert (answer.status, answer.headers.get("access-control-allow-origin")) == (200, None)
    assert preflight(gateway, POLICY, "PUT", headers="x-other").status == 400
    for path in ("/v1/messages", "/v1/warmkv/prefixes", "/healthz/", "/v1/chat/completions"):
        assert preflight(gateway, path, "POST").status == 401
    without = Gateway(tmp_path / "without", TENANTS, OPERATORS)
    assert preflight(without, POLICY, "PUT").status == 401
    answer = without.call("GET", POLICY, "ops'", origin=GRAFANA)
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_every_endpoint_of_operators_is_shared_and_no_other(gateway: Gateway) -> None:
    for route in gateway.app.routes:
        path = getattr(route, "path", "")
        if path.startswith("/v1/warmkv/"):
            method = min(route.methods)
            status = gateway.call(method, path, "plain's").status  # a tenant's key
            assert of_operators(path) == (status == 403), path


@pytest.mark.parametrize(
    "origin", ["*", "grafana.example.org", "http://a.b/", "http://a.b/x", "http://u@a.b", "ftp://a"]
)
def test_an_origin_is_scheme_host_and_port(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"control\.allowed_origins.*is no origin"):
        load(flags=[f"control.allowed_origins={json.dumps([origin])}"], environ={})


def test_origins_are_as_browsers_name_them() -> None:
    given = ["HTTPS://Grafana.Example.ORG:443", "http://[::1]:80", "http://a:3000"]
    config = load(flags=[f"control.allowed_origins={json.dumps(given)}"], environ={})
    assert config.control.allowed_origins == ("https://grafana.example.org", "http://[::1]", "http://a:3000")


# --- the version that a change is based on


def test_the_etag_is_the_version_and_if_match_holds_to_it(gateway: Gateway) -> None:
    assert gateway.call("GET", POLICY, "ops'").headers["etag"] == '"0"'
    changed = gateway.call("PUT", POLICY, "ops'", CHANGE, if_match='"0"')
    assert (changed.status, changed.headers["etag"]) == (200, '"1"')
    back = f"{POLICY}/rollback"
    for method, path, body in (("PUT", POLICY, CHANGE), ("POST", back, {"why": "x"})):
        for stale in ('"0"', 'W/"1"'):
            refused = gateway.call(method, path, "ops'", body, if_match=stale)
            assert (refused.status, refused.body["error"]["type"]) == (412, "conflict_error")
        for wrong in ("1", '"a"', '"0", "1"', ""):
            assert gateway.call(method, path, "ops'", body, if_match=wrong).status == 400
        assert gateway.call(method, path, "ops'", {**body, "version": 2}, if_match='"1"').status == 400
        assert gateway.call(method, path, "ops'", {**body, "version": 0}).status == 409
    assert gateway.call("GET", POLICY, "ops'").body["version"] == 1
    assert gateway.call("POST", back, "ops'", {"why": "x", "version": 1}, if_match='"1"').body["version"] == 2
    assert gateway.call("PUT", POLICY, "ops'", CHANGE, if_match="*").body["version"] == 3


# --- the audit log


def test_what_operators_do_is_written_down_and_what_is_refused(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=audit.log.name):
        gateway.call("PUT", POLICY, "ops'", CHANGE, origin=GRAFANA)
        gateway.call("PUT", POLICY, "ops'", {"changes": {"routing.overlod": 3}, "why": "typing"})
        gateway.call("POST", f"{POLICY}/rollback", "ops'", {"why": "worse"})
        gateway.call("POST", f"{POLICY}/rollback", "plain's", {"why": "mine"})
        gateway.call("PUT", POLICY, "nobody's", CHANGE)
        gateway.call("GET", POLICY, "ops'")
        gateway.call("DELETE", "/v1/warmkv/prefixes", "plain's")  # its own
    done = [(one.who, one.action, one.why, one.status) for one in gateway.actions]
    assert done == [
        ("ops", f"PUT {POLICY}", "what-if: better", 200),
        ("ops", f"PUT {POLICY}", "typing", 400),
        ("ops", f"POST {POLICY}/rollback", "worse", 200),
        ("plain", f"POST {POLICY}/rollback", "", 403),
        ("", f"PUT {POLICY}", "", 401),
    ]
    first, typo, back, *_ = gateway.actions
    assert (json.loads(first.what), first.outcome, first.origin) == (CHANGE["changes"], "version 1", GRAFANA)
    assert (first.time, "did you mean 'overload'" in typo.outcome, back.outcome) == (
        "2027-01-15T08:00:00+00:00",
        True,
        "version 2",
    )
    lines = [line for line in caplog.messages if line.startswith("audit: ")]
    assert len(lines) == len(done)
    assert '"who": "ops"' in lines[0]
    assert json.loads(first.to_json())["request"].startswith("req_")


def test_a_change_whose_client_leaves_is_written_down(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave while the answer waits until all gateways have heard of the version, which is in force by then."""
    change, made = Control.change, asyncio.Event()

    async def slow(self: Control, *args: Any) -> None:
        await change(self, *args)
        made.set()
        await asyncio.Event().wait()

    async def leave() -> None:
        asked = asyncio.ensure_future(gateway.request("PUT", POLICY, "ops'", CHANGE))
        await made.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    monkeypatch.setattr(Control, "change", slow)
    asyncio.run(leave())
    (action,) = gateway.actions
    assert (action.who, action.status, json.loads(action.what)) == ("ops", audit.CUT_OFF, CHANGE["changes"])
    assert "the change may have been made" in action.outcome
    assert gateway.call("GET", POLICY, "ops'").body["version"] == 1


def test_a_change_that_fails_is_written_down(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(Control, "change", broken)
    assert gateway.call("PUT", POLICY, "ops'", CHANGE).status == 500
    (action,) = gateway.actions
    assert (action.who, action.status, action.outcome) == ("ops", 500, "Internal error: RuntimeError")


def test_the_audit_log_is_bounded(gateway: Gateway) -> None:
    long = {"changes": {"routing.overload": 3}, "why": "x" * 1000}
    gateway.call("PUT", POLICY, "ops'", {**long, "changes": {"routing." + "y" * 10_000: 1}})
    assert len(gateway.actions[-1].to_json()) < 6000
    for _ in range(audit.LINES_PER_MINUTE + 10):
        gateway.call("PUT", POLICY, "nobody's", CHANGE)
    gateway.call("PUT", POLICY, "ops'", CHANGE)
    strangers = [one for one in gateway.actions if not one.who]
    assert (len(strangers), gateway.actions[-1].who) == (audit.LINES_PER_MINUTE, "ops")


def test_actions_are_in_a_folder_beside_the_access_log(tmp_path: Path) -> None:
    assert audit.opened(None, print) is None
    (tmp_path / "pipe").mkdir()
    assert audit.opened(tmp_path / "pipe", print) is None  # no file: as a terminal
    written = audit.opened(tmp_path / "access.jsonl", print)
    assert written is not None
    action = audit.OperatorAction("now", "req_1", "ann", "PUT x", "{}", "why\n", 200, "version 1")
    written.write(action)
    written.close()
    text = (tmp_path / "audit" / "audit.jsonl").read_text()
    assert text == action.to_json() + "\n"
    assert not [path for path in tmp_path.iterdir() if path.is_file()]  # `warmkv replay FOLDER` reads every file there
