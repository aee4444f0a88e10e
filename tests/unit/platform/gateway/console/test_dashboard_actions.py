"""Actions of the dashboards, filled in as Grafana does and sent as a browser would, change the live configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import grafana
from tests.unit.platform.asgi import Gateway, Reply
from tests.unit.platform.gateway.access.test_access import OPERATORS, TENANTS

GRAFANA = "http://grafana.example.org:3000"
GATEWAY = "http://gateway:8400"
POLICY = "/v1/warmkv/policy"
TTLS = {"5m": 600.0, "1h": 3600.0}


class WhatIf:
    """The table of a what-if service that replayed two candidates."""

    async def table(self) -> dict[str, Any]:
        figures = {"hit_rate": 0.5, "bytes": 1000, "ttft_p99": 0.2, "quality": None}
        of = {"restart": [], "figures": figures, "pareto": True, "rank": 1}
        changes = {"prefix_cache.ttls": TTLS, "compression.policy": "snapkv@0.5"}
        return {
            "version": 0,
            "candidates": [
                {"candidate": "ttl-double", "changes": changes, **of},
                {"candidate": "now", "changes": {}, **of},
                {"candidate": "1", "changes": {"engine.max_slots": 2}, **of, "figures": None},
            ],
        }


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    flags = (TENANTS, OPERATORS, f"control.allowed_origins=[{GRAFANA}]", "control.whatif={}")
    return Gateway(tmp_path, *flags, whatif=WhatIf())


def shown(gateway: Gateway, title: str) -> list[dict[str, Any]]:
    """The rows of a table, which Grafana's server reads with an operator's key."""
    panel = grafana.tables()[title]
    return grafana.rows(panel, gateway.call("GET", panel["targets"][0]["url"], "ops'").body)


def click(gateway: Gateway, title: str, action: str, row: dict[str, Any], key: str = "ops'", **asked: str) -> Reply:
    """Preflight, then the request, both with what a browser adds."""
    variables = {"gateway": GATEWAY}
    sent = grafana.request(grafana.tables()[title], action, row, {"key": key, **asked}, variables)
    assert sent.url.startswith(GATEWAY)
    path = sent.url.removeprefix(GATEWAY)
    headers = {name.lower().replace("-", "_"): value for name, value in sent.headers.items()}
    names = ",".join(sorted(name.lower() for name in sent.headers))
    asked_first = gateway.call(
        "OPTIONS",
        path,
        origin=GRAFANA,
        access_control_request_method=sent.method,
        access_control_request_headers=names,
    )
    assert (asked_first.status, asked_first.headers["access-control-allow-origin"]) == (200, GRAFANA)
    assert headers.pop("x_api_key") == key
    answer = gateway.call(sent.method, path, key, sent.body, origin=GRAFANA, **headers)
    assert answer.headers["access-control-allow-origin"] == GRAFANA
    return answer


def changed(gateway: Gateway) -> dict[str, Any]:
    """What differs from the start in the version in force."""
    found: dict[str, Any] = gateway.call("GET", POLICY, "ops'").body["changed"]
    return found


def test_apply_brings_a_candidate_into_force_as_it_is_shown(gateway: Gateway) -> None:
    first, now, other = shown(gateway, "What other settings would do")
    assert (first["candidate"], first["hit rate"], first["quality"], other["hit rate"]) == (
        "ttl-double",
        0.5,
        None,
        None,
    )
    applied = click(gateway, "What other settings would do", "Apply candidate", first)
    assert (applied.status, applied.body["version"], applied.body["why"]) == (200, 1, "what-if: ttl-double")
    assert changed(gateway) == {"prefix_cache.ttls": TTLS, "compression.policy": "snapkv@0.5"}
    again = click(gateway, "What other settings would do", "Apply candidate", first)
    assert again.status == 409, "the figures are of version 0"
    for row in (now, other):  # nothing to change; needs a restart
        assert click(gateway, "What other settings would do", "Apply candidate", {**row, "version": 1}).status == 400
    assert gateway.call("GET", POLICY, "ops'").body["version"] == 1


def test_ttl_and_budget_are_set_and_rolled_back(gateway: Gateway) -> None:
    def row() -> dict[str, Any]:
        (only,) = shown(gateway, "TTLs and budget")
        return only

    assert row() == {
        "policy": "full",
        "TTLs": '{"5m":300.0,"1h":3600.0}',
        "default TTL": "5m",
        "version": 0,
        "actions": "",
    }
    ttls = '{"5m": 600, "1h": 3600}'
    assert click(gateway, "TTLs and budget", "Set TTL", row(), ttls=ttls, why="longer").status == 200
    assert changed(gateway) == {"prefix_cache.ttls": TTLS}
    gateway.call("PUT", POLICY, "ops'", {"changes": {"compression.policy": "snapkv@0.5"}, "why": "test"})
    assert click(gateway, "TTLs and budget", "Set budget", row(), budget="0.3", why="memory is short").status == 200
    assert changed(gateway)["compression.policy"] == "snapkv@0.3"
    versions = shown(gateway, "Versions")
    assert [one["version"] for one in versions] == [3, 2, 1]
    assert versions[0]["why"] == "memory is short"
    assert click(gateway, "Versions", "Roll back", versions[1], why="answers got worse").status == 200
    assert changed(gateway)["compression.policy"] == "snapkv@0.5"
    for action in ("Roll back", "Roll back to the start"):
        assert click(gateway, "Versions", action, versions[2], why="late").status == 409, "seen before the last one"
    back = click(gateway, "Versions", "Roll back to the start", shown(gateway, "Versions")[0], why="as it was")
    assert (back.body["version"], back.body["rolled_back_to"]) == (5, 0)


def test_any_live_setting_is_changed_in_its_row(gateway: Gateway) -> None:
    for setting, value in (("prefix_cache.default_ttl", '"1h"'), ("routing.load_weight", "2")):
        row = next(row for row in shown(gateway, "Live settings") if row["setting"] == setting)
        assert click(gateway, "Live settings", "Change", row, value=value, why="a try").status == 200
        assert changed(gateway)[setting] == json.loads(value)
    assert click(gateway, "Live settings", "Change", row, value="3", why="late").status == 409


def test_without_the_role_nothing_changes(gateway: Gateway) -> None:
    (row, *_) = shown(gateway, "What other settings would do")
    assert click(gateway, "What other settings would do", "Apply candidate", row, key="plain's").status == 403
    assert click(gateway, "What other settings would do", "Apply candidate", row, key="nobody's").status == 401
    assert gateway.call("GET", POLICY, "ops'").body["version"] == 0
