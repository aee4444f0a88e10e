"""The policy endpoints and `warmkv policy` over real HTTP, with a real engine behind them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from typer.testing import CliRunner

from tests.polling import PATIENCE, until
from tests.unit.platform.conftest import OPERATOR, Server
from warmkv import telemetry
from warmkv.cli import app
from warmkv.config import load
from warmkv.platform import operator_key
from warmkv.platform.control import Control, Report
from warmkv.platform.live_config import LIVE, History, Version, described
from warmkv.platform.live_config_store import FolderStore
from warmkv.platform.operator_key import with_operator
from warmkv.platform.tenants import hash_key

LONG = "for position in range(length):\n    total += position\n" * 40


@pytest.fixture(scope="module")
def tuned(serve):
    return serve("engine.threads=1")


@pytest.fixture(autouse=True)
def as_configured(request):
    yield
    if "tuned" in request.fixturenames:
        roll_back(request.getfixturevalue("tuned"), to=0)


def put(server: Any, changes: dict[str, Any], *, key: str = "operator", status: int = 200, **more: Any) -> Any:
    body = {"changes": changes, "why": "test", **more}
    answer = requests.put(f"{server.url}/v1/warmkv/policy", json=body, headers={"x-api-key": key}, timeout=PATIENCE)
    assert answer.status_code == status, answer.text
    return answer.json()


def roll_back(server: Any, *, status: int = 200, **more: Any) -> Any:
    url, body = f"{server.url}/v1/warmkv/policy/rollback", {"why": "test", **more}
    answer = requests.post(url, json=body, headers=OPERATOR, timeout=PATIENCE)
    assert answer.status_code == status, answer.text
    return answer.json()


def get(server: Any, path: str = "") -> Any:
    return requests.get(f"{server.url}/v1/warmkv/policy{path}", headers=OPERATOR, timeout=PATIENCE).json()


def ask(server: Any, text: str = "Hello", ttl: str | None = None, **options: Any) -> Any:
    block: dict[str, Any] = {"type": "text", "text": text}
    if ttl:
        block["cache_control"] = {"type": "ephemeral", "ttl": ttl}
    return server.anthropic().messages.create(
        model=server.config.model.name,
        max_tokens=options.pop("max_tokens", 4),
        messages=[{"role": "user", "content": [block, {"type": "text", "text": "?"}]}],
        extra_body={"temperature": 0},
        **options,
    )


def test_before_any_change_the_configuration_is_in_force(serve):
    shown = get(serve("engine.threads=1", "routing.overload=5"))
    assert (shown["version"], shown["changed"], shown["fault"]) == (0, {}, None)
    assert set(shown["settings"]) == set(LIVE)
    assert shown["settings"]["routing.overload"] == 5
    assert shown["parts"] == {"only": {"version": 0, "fault": None}}


def test_the_next_answer_is_under_the_new_policy_and_prices(tuned):
    before = ask(tuned, LONG).usage
    answered = put(tuned, {"compression.policy": "snapkv@0.2", "pricing.input": 300, "pricing.output": 0})
    assert answered["parts"] == {"only": {"version": answered["version"], "fault": None}}
    after = ask(tuned, LONG).usage
    assert (before.warmkv["policy"], after.warmkv["policy"]) == ("full", "snapkv@0.2")
    assert after.warmkv["policy_version"] == answered["version"]
    assert after.warmkv["kept_tokens"] < before.warmkv["kept_tokens"]
    assert after.input_tokens == before.input_tokens
    assert after.warmkv["price"]["input"] == pytest.approx(100 * before.warmkv["price"]["input"])
    assert after.warmkv["price"]["output"] == 0 < before.warmkv["price"]["output"]
    assert ("warmkv_live_config_version", answered["version"], {}) in tuned.metrics.seen
    assert ("warmkv_live_config_refused", False, {}) in tuned.metrics.seen


def test_a_request_in_flight_ends_as_it_began(tuned):
    body = {"temperature": 0, "warmkv": {"ignore_eos": True}}
    messages = [{"role": "user", "content": [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]}]
    version = get(tuned)["version"]
    with tuned.anthropic("flying").messages.stream(
        model=tuned.config.model.name, max_tokens=150, messages=messages, extra_body=body
    ) as stream:
        events = iter(stream)
        next(events)
        changes = {
            "compression.policy": "snapkv@0.2",
            "pricing.input": 300,
            "prefix_cache.ttls": {"1d": 86400},
            "prefix_cache.default_ttl": "1d",
            "pricing.write": {"1d": 9},
        }
        assert put(tuned, changes)["version"] == version + 1
        (usage,) = (event.usage for event in events if event.type == "message_delta")
    assert (usage.warmkv["policy"], usage.warmkv["policy_version"]) == ("full", version)
    assert usage.warmkv["price"]["output"] == pytest.approx(150 * 15e-6)
    assert usage.warmkv["price"]["write"]["5m"] > 0


def test_every_answer_is_under_one_version_whatever_changes_meanwhile(tuned):
    begun = get(tuned)["version"]
    expected = {begun: ("full", 15.0)}

    def one(number: int) -> Any:
        return ask(tuned, f"{number} {LONG[:400]}", "5m", max_tokens=8).usage

    usages = [one(0)]
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(one, range(1, 17))
        for number in range(1, 13):
            policy, dollars = ("snapkv@0.2", "full")[number % 2], float(number)
            version = put(tuned, {"compression.policy": policy, "pricing.output": dollars})["version"]
            expected[version] = (policy, dollars)
        usages += [*answers, one(17)]
    for usage in usages:
        policy, dollars = expected[usage.warmkv["policy_version"]]
        assert usage.warmkv["policy"] == policy
        assert usage.warmkv["price"]["output"] == pytest.approx(usage.output_tokens * dollars / 1e6)
    assert (usages[0].warmkv["policy_version"], usages[-1].warmkv["policy_version"]) == (begun, max(expected))


def test_a_new_ttl_can_be_used_and_an_old_one_is_gone(tuned):
    ttls = {"prefix_cache.ttls": {"5m": 300, "1d": 86400}, "pricing.write": {"5m": 1.25, "1d": 3}}
    put(tuned, {**ttls, "compression.policy": "h2o@0.5"})  # which keeps column sums beside the blocks
    first, second = (ask(tuned, LONG + "new ttl", "1d").usage for _ in range(2))
    written = first.cache_creation_input_tokens
    assert written > 0
    assert first.warmkv["price"]["write"]["1d"] == pytest.approx(written * 9e-6)
    assert second.cache_read_input_tokens == written
    request = tuned.requests[-1]
    assert request.terms.lifetimes.ttls == {"5m": 300, "1d": 86400}
    with pytest.raises(Exception, match="'1h' is not one of '5m', '1d'"):
        ask(tuned, LONG, "1h")


def test_prefixes_live_as_long_as_the_policy_at_their_request_said(serve):
    now = [0.0]
    server = serve("engine.threads=1", "prefix_cache.automatic=false", clock=lambda: now[0])
    put(server, {"prefix_cache.ttls": {"5m": 10, "1h": 3600}})
    written = ask(server, LONG, "5m").usage.cache_creation_input_tokens
    roll_back(server)
    now[0] = 11.0
    again = ask(server, LONG, "5m").usage
    assert (again.cache_read_input_tokens, again.cache_creation_input_tokens) == (0, written)
    now[0] = 300.0
    assert ask(server, LONG, "5m").usage.cache_read_input_tokens == written


def test_routing_parameters_go_with_the_request(tuned):
    put(tuned, {"routing.overload": 3})
    ask(tuned)
    assert tuned.attempts[-1].routing.overload == 3


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"changes": {"routing.overlod": 3}, "why": "x"}, "did you mean 'overload'"),
        ({"changes": {"engine.max_slots": 3}, "why": "x"}, "cannot be changed while the service runs"),
        ({"changes": {"prefix_cache.ttls": {"9m": 3}}, "why": "x"}, "default_ttl"),
        ({"changes": {}, "why": "x"}, "changes: "),
        ({"changes": {"routing.overload": 3}}, "why: Field required"),
        ({"changes": {"routing.overload": 3}, "why": " "}, "why: "),
        ({"changes": {"routing.overload": 3}, "why": "x", "who": "me"}, "who: "),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(tuned, body, says):
    before = get(tuned)
    answer = requests.put(f"{tuned.url}/v1/warmkv/policy", json=body, headers=OPERATOR, timeout=PATIENCE)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert get(tuned) == before


def test_who_is_late_is_told(tuned):
    version = put(tuned, {"routing.overload": 3})["version"]
    put(tuned, {"routing.overload": 4}, version=version)
    error = put(tuned, {"routing.overload": 5}, version=version, status=409)["error"]
    assert error["type"] == "conflict_error"
    assert f"version {version + 1} is, by local (test)" in error["message"]
    assert roll_back(tuned, version=version, status=409)["error"]["type"] == "conflict_error"
    assert get(tuned)["settings"]["routing.overload"] == 4


def test_the_way_back_and_the_history(tuned):
    first = put(tuned, {"routing.overload": 3})["version"]
    put(tuned, {"routing.overload": 4})
    back = roll_back(tuned)
    assert (back["settings"]["routing.overload"], back["rolled_back_to"]) == (3, first)
    assert roll_back(tuned, to=0)["settings"]["routing.overload"] == 8
    versions = get(tuned, "/history")["versions"]
    assert [version["version"] for version in versions[:4]] == [first + 3, first + 2, first + 1, first]
    assert [version["rolled_back_to"] for version in versions[:4]] == [0, first, None, None]
    assert {version["who"] for version in versions} == {"local"}
    assert roll_back(tuned, to=first + 99, status=404)["error"]["type"] == "not_found_error"


def test_only_operators_may(serve):
    tenants = [
        {"name": "team", "key_sha256": hash_key("team's")},
        {"name": "ops", "key_sha256": hash_key("ops'"), "operator": True},
    ]
    server = serve("engine.threads=1", f"gateway.tenants={json.dumps(tenants)}")
    for key, status in (("team's", 403), ("nobody's", 401)):
        put(server, {"routing.overload": 3}, key=key, status=status)
        for method, path in (("GET", ""), ("GET", "/history"), ("POST", "/rollback")):
            url = f"{server.url}/v1/warmkv/policy{path}"
            answer = requests.request(method, url, json={"why": "x"}, headers={"x-api-key": key}, timeout=PATIENCE)
            assert answer.status_code == status
    assert put(server, {"routing.overload": 3}, key="ops'")["who"] == "ops"


# --- the command


def run(*args: str, key: str = OPERATOR["x-api-key"]) -> Any:
    return CliRunner().invoke(app, ["policy", *args], env={"WARMKV_API_KEY": key})


def test_the_command_shows_sets_and_goes_back(tuned):
    url = ("--url", tuned.url)
    text = "prefix_cache.ttls={5m: 60, 1h: 600}"
    done = run("set", "compression.policy=snapkv@0.2", text, "--why", "short", *url)
    assert done.exit_code == 0, done.output
    assert "by local at " in done.output
    assert "compression.policy = snapkv@0.2" in done.output
    shown = json.loads(run("show", "--json", *url).output)
    assert (shown["settings"]["prefix_cache.ttls"], shown["why"]) == ({"5m": 60, "1h": 600}, "short")
    assert f"gateway only: version {shown['version']}" in run("show", *url).output
    back = run("rollback", "--why", "worse", "--based-on", str(shown["version"]), *url)
    assert "compression.policy = full" in back.output
    versions = json.loads(run("history", "--json", *url).output)["versions"]
    assert [version["why"] for version in versions[:2]] == ["worse", "short"]
    assert "snapkv@0.2" in run("history", *url).output


def test_the_command_finds_the_key_of_a_service_of_this_user(tuned, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with operator_key.kept(int(tuned.url.rpartition(":")[2]), OPERATOR["x-api-key"]):
        assert run("show", "--url", tuned.url, key="").exit_code == 0
    without = run("show", "--url", tuned.url, key="")
    assert without.exit_code == 2
    assert "not an operator's" in without.stderr


def test_the_command_says_what_is_wrong(tuned):
    for args, code, says in (
        (("set", "routing.overlod=3", "--why", "x", "--url", tuned.url), 2, "did you mean 'overload'"),
        (("set", "routing.overload=3", "--why", "x", "--based-on", "9999", "--url", tuned.url), 2, "is not in force"),
        (("set", "routing.overload", "--why", "x", "--url", tuned.url), 2, "section.key=value"),
        (("set", "routing.overload={", "--why", "x", "--url", tuned.url), 2, "is not a YAML value"),
        (("rollback", "--to", "9999", "--why", "x", "--url", tuned.url), 2, "is not kept"),
        (("show", "--url", f"{tuned.url}/elsewhere"), 2, "GET /elsewhere/v1/warmkv/policy"),
        (("show", "--url", "http://127.0.0.1:1"), 1, "refused"),
        (("show", "--url", "nowhere"), 1, "unknown url type"),
    ):
        done = run(*args)
        assert (done.exit_code, says in done.stderr) == (code, True), (args, done.output, done.stderr)


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.0 200 OK\r\n\r\n<html>", b"HTTP/1.0 200 OK\r\n\r\n{}"]
)
def test_the_command_says_that_something_else_answers(answer: bytes):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve_once() -> None:
            with listening.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve_once)
        thread.start()
        done = run("show", "--url", f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join(PATIENCE)
    assert (done.exit_code, "not as a gateway does: is its address right?" in done.stderr) == (1, True), done.exception


def test_what_may_not_be_meant_is_warned_of(tuned):
    """A TTL that goes, and prices that bill nothing: told once, by what is new in them."""
    url = ("--why", "x", "--url", tuned.url)
    done = run("set", "pricing.models={nomodel: {input: 1}, tiny: {input: 2}}", "prefix_cache.ttls={5m: 300}", *url)
    assert done.exit_code == 0
    told = " ".join(done.stderr.split())
    assert "warning: requests that mark a prefix with the TTL '1h' are refused from now on; there are 5m" in told
    assert "warning: pricing.models.nomodel: this service serves tiny and bills nothing by it" in told
    assert told.count("warning: ") == 2
    with pytest.raises(Exception, match="'1h' is not one of '5m'"):
        ask(tuned, LONG, "1h")
    assert put(tuned, {"pricing.models.nomodel.input": 3})["warnings"] == []
    assert "warnings" not in get(tuned)
    (warning,) = (roll_back(tuned, to=0), put(tuned, {"prefix_cache.ttls": {"5m": 300}}))[1]["warnings"]
    assert "'1h'" in warning


def test_a_setting_that_is_given_twice_is_refused(tuned):
    before = get(tuned)
    done = run("set", "pricing.input=4", " pricing.input =5", "--why", "x", "--url", tuned.url)
    assert (done.exit_code, "pricing.input is given twice" in done.stderr) == (2, True)
    assert get(tuned) == before


def test_a_change_is_a_metric_that_says_who_what_and_why(tuned):
    info = telemetry.LIVE_CONFIG_CHANGE.name
    why = 'memory "is" short\n' + 100 * "long "
    number = put(tuned, {"routing.overload": 3}, why=why)["version"]
    roll_back(tuned)
    changed, back = [labels for name, _, labels in tuned.metrics.seen if name == info][-2:]
    assert (changed["version"], changed["who"], changed["what"]) == (str(number), "local", "routing.overload = 3")
    assert (changed["why"][:22], len(changed["why"]), changed["why"][-3:]) == ('memory "is" short long', 200, "...")
    assert (back["what"], back["why"]) == (f"back to version {number - 1}", "test")
    assert described(Version(number=1, why=""))["why"] == "not given"  # Grafana would show an empty label's name


def test_a_gateway_shows_the_settings_of_the_version_that_it_names(tuned):
    asked = []

    async def changed_elsewhere() -> dict[str, Any]:
        """Return what the actor says when a gateway that has not heard of a version is asked."""
        status = await Control.status(tuned.control)
        asked.append(status["current"].number)
        return {**status, "current": Version(number=10**6, settings={"routing.overload": 7.0}, why="elsewhere")}

    tuned.control.status = changed_elsewhere
    try:
        shown = get(tuned)
    finally:
        del tuned.control.status
    assert asked
    assert (shown["version"], shown["settings"]["routing.overload"]) == (10**6, 7.0)


def test_a_kept_version_that_does_not_fit_is_told_with_the_way_out(tmp_path):
    """As after a start with other settings: `1h` has a lifetime by the version, and no price by the settings."""
    kept = History(
        versions=(Version(number=1, settings={"prefix_cache.ttls": {"5m": 300, "1h": 1800}}, why="shorter"),)
    )
    FolderStore(tmp_path).write("warmkv-policy.json", kept.model_dump_json().encode())
    flags = ["engine.threads=1", "prefix_cache.ttls={5m: 300}", "pricing.write={5m: 1.25}"]
    config = load(flags=flags, environ={})
    config = config.model_copy(update={"gateway": with_operator(config.gateway, OPERATOR["x-api-key"])})
    server = Server(config, time.monotonic, tmp_path)
    url = ("--url", server.url)
    try:
        until(lambda: get(server)["parts"]["only"]["fault"], "the gateway has said what it cannot take")
        shown = run("show", *url).output.splitlines()
        assert shown[:2] == ["version 1: shorter", "it is not in force, version 0 is:"]
        assert "version 1 of the live configuration, kept from before, does not fit the settings at start" in shown[2]
        assert "no multiplier for the TTL '1h'" in shown[2]
        assert "`warmkv policy rollback --to 0` goes back to these" in shown[2]
        refused = run("set", "compression.policy=h2o@0.5", "--why", "x", *url)
        assert refused.exit_code == 2
        assert shown[2] in " ".join(refused.stderr.split())
        back = run("rollback", "--to", "0", "--why", "as started", *url)
        assert back.exit_code == 0
        assert "not in force" not in back.output
        assert run("set", "compression.policy=h2o@0.5", "--why", "x", *url).exit_code == 0
        report = Report(10**9, 0, "it was started with other settings")
        asyncio.run_coroutine_threadsafe(server.control.follow("other", report, 0), server.loop).result(PATIENCE)
        for command in (("set", "routing.overload=3"), ("rollback", "--to", "0")):
            done = run(*command, "--why", "x", *url)
            assert (done.exit_code, "gateway only: version" in done.stdout) == (1, True)
            assert "gateway other goes by version 0: it was started with other" in " ".join(done.stderr.split())
    finally:
        server.stop()
