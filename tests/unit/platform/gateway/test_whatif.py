"""The endpoints of the what-if service: for operators alone, and what is refused loses nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.unit.platform.asgi import Gateway
from warmkv.config import load
from warmkv.platform.tenants import hash_key
from warmkv.platform.whatif.candidates import MOST_CANDIDATES, OperatorCandidates, check

PATH = "/v1/warmkv/whatif"
OPERATOR = f"gateway.operators=[{{name: ann, key_sha256: {hash_key('ann')}}}]"
CHANGES = {"prefix_cache.default_ttl": "1h"}


class WhatIf:
    """The candidates of a service that replays nothing."""

    def __init__(self) -> None:
        self.own = OperatorCandidates()

    async def table(self) -> dict[str, Any]:
        return {"candidates": [dict(one.changes) for one in self.own.all()]}

    async def add(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        check(load(environ={}), changes)
        return {"candidate": self.own.add(changes).name}

    async def remove(self, name: str) -> None:
        self.own.remove(name)


@pytest.fixture
def gateway(tmp_path):
    return Gateway(tmp_path, OPERATOR, "control.whatif={}", whatif=WhatIf())


def test_operators_add_candidates_see_them_and_take_them_away(gateway):
    added = gateway.call("POST", PATH, "ann", {"changes": CHANGES})
    assert (added.status, added.body) == (200, {"candidate": "1"})
    assert gateway.call("GET", PATH, "ann").body == {"candidates": [CHANGES]}
    assert gateway.call("DELETE", f"{PATH}/1", "ann").body == {"type": "candidate_removed", "candidate": "1"}
    assert gateway.call("GET", PATH, "ann").body == {"candidates": []}


def test_others_may_not(gateway):
    for method, path, body in (
        ("GET", PATH, None),
        ("POST", PATH, {"changes": CHANGES}),
        ("DELETE", f"{PATH}/1", None),
    ):
        refused = gateway.call(method, path, "bob", body)
        assert (refused.status, "not an operator" in refused.error) == (403, True)
    assert gateway.call("GET", PATH, "ann").body == {"candidates": []}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([CHANGES], "should be an object"),
        ({"changes": [1]}, "changes"),
        ({"changes": {}}, "changes"),
        ({"changes": CHANGES, "why": "x"}, "why"),
        ({"changes": {"prefix_cache.default_tl": "1h"}}, "did you mean 'prefix_cache.default_ttl'"),
        ({"changes": {"gateway.port": 1}}, "no choice that a replay can judge"),
        ({"changes": {"prefix_cache.default_ttl": "2m"}}, "default_ttl"),
    ],
)
def test_a_body_that_names_no_candidate_is_refused(gateway, body, said):
    refused = gateway.call("POST", PATH, "ann", body)
    assert (refused.status, said in refused.error) == (400, True), refused.body
    assert gateway.call("GET", PATH, "ann").body == {"candidates": []}


def test_too_many_candidates_and_unknown_ones_are_refused(gateway):
    for slots in range(MOST_CANDIDATES):
        assert gateway.call("POST", PATH, "ann", {"changes": {"engine.max_slots": slots + 1}}).status == 200
    refused = gateway.call("POST", PATH, "ann", {"changes": {"engine.max_slots": 99}})
    assert (refused.status, str(MOST_CANDIDATES) in refused.error) == (409, True)
    assert gateway.call("DELETE", f"{PATH}/77", "ann").status == 404
    assert len(gateway.call("GET", PATH, "ann").body["candidates"]) == MOST_CANDIDATES


def test_without_the_service_operators_are_told_how_to_switch_it_on(tmp_path):
    gateway = Gateway(tmp_path, OPERATOR)
    assert "control.whatif" in gateway.call("GET", PATH, "ann").error
    assert gateway.call("GET", PATH, "ann").status == 404
    assert gateway.call("GET", PATH, "bob").status == 403
