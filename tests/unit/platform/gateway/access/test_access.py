"""Who may call what: no route without a key where tenants are configured, operators apart from tenants, rights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.platform.asgi import SECRET, Gateway, as_flag
from warmkv.config import ConfigError, GatewayConfig, load
from warmkv.platform import local
from warmkv.platform.application import build
from warmkv.platform.gateway.access.authentication import PUBLIC
from warmkv.platform.listening import check_listening, is_loopback
from warmkv.platform.operator_key import kept, key_file, read_key
from warmkv.platform.tenants import hash_key, open_tenant

TENANTS = as_flag(
    "gateway.tenants",
    [
        {"name": "plain", "key_sha256": hash_key("plain's")},
        {"name": "trusted", "key_sha256": hash_key("trusted's"), "rights": ["policy", "replica", "ignore_eos"]},
        {"name": "both", "key_sha256": hash_key("both's"), "operator": True},
    ],
)
OPERATORS = as_flag("gateway.operators", [{"name": "ops", "key_sha256": hash_key("ops'")}])
OF_OPERATORS = [
    *(("GET", "/v1/warmkv/" + name) for name in ("replicas", "memory", "live", "tenants", "policy", "policy/history")),
    ("PUT", "/v1/warmkv/policy"),
    ("POST", "/v1/warmkv/policy/rollback"),
]
CHANGE = {"changes": {"routing.overload": 3}, "why": "test"}


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Gateway:
    return Gateway(tmp_path_factory.mktemp("closed"), TENANTS, OPERATORS)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Gateway:
    return Gateway(tmp_path_factory.mktemp("open"), OPERATORS)


# --- keys


def test_every_route_but_the_probes_asks_for_a_key(closed: Gateway) -> None:
    routes = [
        (method, re.sub(r"\{.*?\}", "x", route.path))
        for route in closed.app.routes
        for method in getattr(route, "methods", ())
    ]
    assert ("GET", "/openapi.json") in routes
    assert len([route for route in closed.app.routes if isinstance(route, APIRoute)]) > 10
    for method, path in [*routes, ("GET", "/nothing"), ("GET", "/v1/messages"), ("OPTIONS", "/v1/messages")]:
        if path in PUBLIC:
            assert closed.call(method, path).status == 200
            continue
        for key in (None, "wrong"):
            answer = closed.call(method, path, key)
            assert answer.status == 401, (method, path)
            assert answer.headers["request-id"]
            if method != "HEAD":
                assert answer.body["error"]["type"] == "authentication_error"
                assert path not in str(answer.body)


def test_the_schema_is_there_for_who_has_a_key(closed: Gateway, opened: Gateway) -> None:
    assert "/v1/messages" in closed.call("GET", "/openapi.json", "plain's").body["paths"]
    assert opened.call("GET", "/openapi.json").status == 200


def test_a_tenant_drops_nothing_but_its_own(closed: Gateway) -> None:
    assert closed.call("DELETE", "/v1/warmkv/prefixes", "plain's").status == 200
    assert closed.call("DELETE", "/v1/warmkv/prefixes", "ops'").status == 403
    listed = closed.call("GET", "/v1/warmkv/tenants", "ops'").body["tenants"]
    assert closed.dropped == [tenant["label"] for tenant in listed if tenant["name"] == "plain"]


# --- operators


@pytest.mark.parametrize("key", [None, "", "any"])
def test_open_callers_are_no_operators(opened: Gateway, key: str | None) -> None:
    assert opened.messages(key).status == 200
    for method, path in OF_OPERATORS:
        refused = opened.call(method, path, key, CHANGE)
        assert refused.status == 403
        assert "gateway.operators" in refused.error


def test_an_operator_is_no_tenant(opened: Gateway, closed: Gateway) -> None:
    for gateway in (opened, closed):
        changed = gateway.call("PUT", "/v1/warmkv/policy", "ops'", CHANGE)
        assert (changed.status, changed.body["who"]) == (200, "ops")
        assert gateway.call("GET", "/v1/warmkv/replicas", "ops'").status == 200
        refused = gateway.messages("ops'")
        assert (refused.status, refused.body["error"]["type"]) == (403, "permission_error")
        assert "not a tenant" in refused.error


def test_a_tenant_may_be_an_operator_as_well(closed: Gateway) -> None:
    assert closed.messages("both's").status == 200
    assert closed.call("GET", "/v1/warmkv/policy", "both's").status == 200
    assert closed.call("GET", "/v1/warmkv/policy", "plain's").status == 403


# --- rights


OPTIONS: list[tuple[str, Any]] = [("policy", "snapkv@0.5"), ("replica", "only"), ("ignore_eos", True)]


@pytest.mark.parametrize(("right", "value"), OPTIONS)
def test_options_of_a_request_are_rights_where_there_are_tenants(
    closed: Gateway, opened: Gateway, tmp_path: Path, right: str, value: Any
) -> None:
    options = {"warmkv": {right: value}}
    for answer in (closed.messages("plain's", **options), closed.completion("plain's", **options)):
        assert (answer.status, answer.body["error"]["type"]) == (403, "permission_error")
        assert f"warmkv.{right}: this key lacks the right '{right}'" in answer.error
    assert closed.messages("trusted's", **options).status == 200
    assert opened.messages("any", **options).status == 200
    nobody = Gateway(tmp_path / "none", as_flag("gateway.rights", []))
    assert nobody.messages("any", **options).status == 403
    everybody = Gateway(tmp_path / "all", TENANTS, as_flag("gateway.rights", [right]))
    assert everybody.messages("plain's", **options).status == 200


@pytest.mark.parametrize(
    ("right", "switch"),
    [("policy", "compression.allow_request_policy"), ("replica", "routing.allow_request_replica")],
)
def test_what_is_switched_off_for_everybody_is_refused_by_name(tmp_path: Path, right: str, switch: str) -> None:
    gateway = Gateway(tmp_path, f"{switch}=false")
    refused = gateway.messages(warmkv={right: dict(OPTIONS)[right]})
    assert (refused.status, switch in refused.error) == (403, True)
    assert gateway.messages(warmkv={"ignore_eos": True}).status == 200


def test_options_that_ask_for_nothing_need_no_right(closed: Gateway) -> None:
    assert closed.messages("plain's", warmkv={"ignore_eos": False, "replica": None, "seed": 3}).status == 200


# --- where it listens


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "::1", "[::1]", "localhost", "LOCALHOST"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    check_listening(GatewayConfig(host=host))


BEYOND = ["0.0.0.0", "::", "", "10.0.0.1", "128.0.0.1", "localhost.example.org", "127.0.0.1.example.org", "node"]


@pytest.mark.parametrize("host", BEYOND)
def test_beyond_loopback_it_listens_with_tenants_or_where_that_was_asked_for(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match=r"gateway\.host.*gateway\.tenants_file.*gateway\.allow_open"):
        check_listening(GatewayConfig(host=host, operators=[{"name": "ops", "key_sha256": "0" * 64}]))
    check_listening(GatewayConfig(host=host, allow_open=True))
    check_listening(GatewayConfig(host=host, tenants=[{"name": "team", "key_sha256": "0" * 64}]))
    check_listening(GatewayConfig(host=host, tenants_file="tenants.yaml"))


@given(st.ip_addresses())
def test_only_two_networks_are_loopback(address: Any) -> None:
    assert is_loopback(str(address)) == (str(address).startswith("127.") or str(address) == "::1")


def test_nothing_starts_that_would_be_open_to_other_machines() -> None:
    open_ = {"gateway": {"host": "0.0.0.0"}}
    with pytest.raises(ConfigError, match="allow_open"):
        build(open_)
    with pytest.raises(ConfigError, match="allow_open"), local.running(load(flags=["gateway.host=0.0.0.0"])):
        pass
    document = {"http_options": {"host": "0.0.0.0", "port": 1}, "applications": [{"args": {}}]}
    with pytest.raises(ConfigError, match="allow_open"):  # whatever the application's own settings say
        local.start_document(document)


HERE = ["127.0.0.1:8400", "127.0.0.1", "localhost:8400", "[::1]:8400", ""]
ELSEWHERE = ["evil.example", "127.0.0.1.evil.example:8400", "10.0.0.1:8400", "user@evil.example", "[::1"]


@pytest.mark.parametrize("host", [*HERE, *ELSEWHERE])
def test_an_open_service_is_asked_by_the_names_of_loopback_alone(tmp_path: Path, host: str) -> None:
    """Refuse a page whose name leads here: it would be answered like a program of this machine."""
    gateway, status = Gateway(tmp_path), 200 if host in HERE else 403
    models = gateway.call("GET", "/v1/models", host=host)
    assert models.status == status
    if status == 403:
        assert "gateway.allow_open" in models.error
    assert gateway.call("GET", "/readyz", host=host).status == 200  # probes tell nothing
    assert gateway.call("GET", "/v1/warmkv/tenants", host=host).status == 403  # no operator's key


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        *((f"http://{host}", 200) for host in HERE if host),
        *((f"https://{host}", 403) for host in ELSEWHERE),
        ("null", 403),  # of a frame in any page
        ("app://notes", 200),  # no page
    ],
)
def test_an_open_service_does_nothing_for_pages_of_other_sites(tmp_path: Path, origin: str, status: int) -> None:
    gateway = Gateway(tmp_path)
    body = {"model": gateway.model, "prompt": "Hello", "max_tokens": 8}
    assert gateway.call("POST", "/v1/completions", None, body, host="localhost", origin=origin).status == status
    assert gateway.asked == (status == 200)


@pytest.mark.parametrize("flags", [("gateway.allow_open=true",), ("gateway.allow_open=true", "gateway.host=0.0.0.0")])
def test_a_service_that_was_opened_is_asked_by_any_name(tmp_path: Path, flags: tuple[str, ...]) -> None:
    named = {"host": "10.0.0.1:8400", "origin": "https://page.example"}
    assert Gateway(tmp_path, *flags).call("GET", "/v1/models", **named).status == 200


def test_with_tenants_a_service_is_asked_by_any_name(closed: Gateway) -> None:
    assert closed.call("GET", "/v1/models", "plain's", host="evil.example").status == 200


# --- the operator's key of a run


def test_the_key_of_a_run_is_for_its_user_only_and_as_long_as_it_runs(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    key_file(8400).parent.mkdir()
    key_file(8400).write_text("of a run that was killed")
    key_file(8400).chmod(0o666)
    with kept(8400, "first") as path:
        assert path.stat().st_mode & 0o777 == 0o600
        for url, key in (
            ("http://127.0.0.1:8400", "first"),
            ("http://localhost:8400/", "first"),
            ("http://127.0.0.1:8401", ""),
            ("http://example.org:8400", ""),  # is sent to nobody else
            ("http://127.0.0.1", ""),
            ("nowhere", ""),
            ("http://127.0.0.1:port", ""),
        ):
            assert read_key(url) == key, url
        with kept(8400, "second"):
            assert read_key("http://127.0.0.1:8400") == "second"
    assert not key_file(8400).exists()
    with kept(8400, "first"):
        key_file(8400).unlink()
        key_file(8400).write_text("of a later run")
    assert read_key("http://127.0.0.1:8400") == "of a later run"


def test_an_open_tenant_is_its_key() -> None:
    labels = {open_tenant(key, GatewayConfig(), SECRET).label for key in ("", "one", "other")}
    assert len(labels) == 3
