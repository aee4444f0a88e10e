"""`warmkv observe`: what its clients ask, what Grafana finds, and that programs end with it."""

from __future__ import annotations

import json
import random
import stat
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import requests
import yaml

from tests.polling import PATIENCE, until
from warmkv import observe
from warmkv.config import Config, load
from warmkv.observe import Client, ObserveError
from warmkv.platform.local import free_port

STAND_IN = f"""#!{sys.executable}
# A program called grafana: shows its environment to whoever asks.
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        text = json.dumps([sys.argv[1:], dict(os.environ)]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

HTTPServer((os.environ["GF_SERVER_HTTP_ADDR"], int(os.environ["GF_SERVER_HTTP_PORT"])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class Handler(BaseHTTPRequestHandler):
    """Answers every other message, and refuses the others."""

    seen: list[dict[str, Any]]

    def do_POST(self) -> None:
        self.seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        taken = len(self.seen) % 2 == 1
        text = json.dumps({"content": [{"type": "text", "text": "yes"}]} if taken else {}).encode()
        self.send_response(200 if taken else 429)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[ThreadingHTTPServer]:
    Handler.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def client(url: str = "http://127.0.0.1:1") -> Client:
    return Client(url, "tiny", "key", random.Random(1), ["one", "two"])


def test_a_client_asks_of_few_texts_again_and_again_goes_on_and_brings_new_ones() -> None:
    asking = client()
    texts, turns = [], 0
    for _ in range(400):
        body = asking.body()
        assert body["warmkv"]["policy"] in observe.POLICIES
        texts.append(body["messages"][0]["content"][0]["text"])
        turns += len(body["messages"]) > 1
        asking._history.append({"role": "assistant", "content": "yes"})
        assert len(body["messages"]) <= 2 * observe.TURNS
        roles = [message["role"] for message in body["messages"]]
        assert roles == [("user", "assistant")[at % 2] for at in range(len(roles))]
    assert {"one", "two"} < set(texts)
    fresh = sum(text not in ("one", "two") for text in texts)
    assert 10 < fresh < 120
    assert 50 < turns < 200


def test_outcomes_are_counted_and_a_conversation_ends_with_a_refusal(gateway: ThreadingHTTPServer) -> None:
    asking = client(f"http://127.0.0.1:{gateway.server_address[1]}")
    asking.ask()
    assert asking._history[-1] == {"role": "assistant", "content": "yes"}
    asking.ask()
    assert (asking.outcomes, asking._history) == ({200: 1, 429: 1}, [])
    away = client(f"http://127.0.0.1:{free_port('127.0.0.1')}")
    away.ask()
    assert away.outcomes == {0: 1}


def test_the_settings_leave_something_to_tune() -> None:
    cache = load(flags=list(observe.SETTINGS), environ={}).prefix_cache
    ttl = cache.ttls[cache.default_ttl]
    share = (1 / observe.DOCUMENTS) / sum(
        1 / rank for rank in range(1, observe.DOCUMENTS + 1)
    )  # of the rarest document
    a_second = 2.0 / len(observe.TENANTS) * (1 - observe.TURN_SHARE - observe.COLD_SHARE) * share  # at the default rate
    assert ttl < 1 / a_second < max(cache.ttls.values())
    assert cache.host.memory_bytes
    assert set(observe.LIMITS) <= set(observe.TENANTS)


def test_a_client_reads_the_answers_of_its_api() -> None:
    chat = client()
    chat.api = "chat/completions"
    assert chat._answer({"choices": [{"message": {"content": "yes"}}]}) == "yes"
    assert client()._answer({"content": [{"type": "text", "text": "no"}]}) == "no"


def test_traffic_comes_from_every_tenant_and_ends(gateway: ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{gateway.server_address[1]}"
    with observe.traffic(url, "tiny", {"a": "1", "b": "2"}, rate=1000, seed=1) as clients:
        until(lambda: all(sum(one.outcomes.values()) > 2 for one in clients), "both have asked")
    asked = len(Handler.seen)
    assert sum(sum(one.outcomes.values()) for one in clients) == asked


def test_the_service_knows_the_tenants_and_grafana_s_origin() -> None:
    config = observe.observable(Config(), {"support": "key"}, "http://127.0.0.1:3000")
    assert [tenant.name for tenant in config.gateway.tenants] == ["support"]
    assert config.gateway.tenants[0].rights == ("policy",)
    nightly = observe.observable(Config(), {"nightly": "key"}, "http://127.0.0.1:3000").gateway.tenants[0]
    assert nightly.limits.requests_per_minute == observe.LIMITS["nightly"]["requests_per_minute"]
    assert config.control.whatif is not None
    assert config.control.allowed_origins == ("http://127.0.0.1:3000",)


def test_a_program_that_ends_early_is_told_with_its_last_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such flag')"]
    starting = observe.child(command, "http://127.0.0.1:1/", tmp_path / "log")
    with pytest.raises(ObserveError, match="did not start:\nno such flag"), starting:
        pytest.fail("it is not there")


def test_prometheus_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ObserveError, match="apt-get install prometheus"):
        observe.prometheus_binary()


def test_grafana_finds_data_sources_and_dashboards_and_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in, for Grafana is not installed where these tests run: what it is given is what it reads."""
    binary, folder = tmp_path / "bin" / "grafana", tmp_path / "run"
    binary.parent.mkdir()
    (tmp_path / "conf").mkdir()
    folder.mkdir()
    binary.write_text(STAND_IN)
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(binary.parent))
    port = free_port("127.0.0.1")
    with observe.showing(folder, port, "http://p:9090", "http://g:8400", "operator's") as url:
        assert url == f"http://127.0.0.1:{port}"
        arguments, environment = requests.get(url, timeout=PATIENCE).json()
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=PATIENCE)
    assert arguments == ["server", "--homepath", str(tmp_path)]
    files = Path(environment["GF_PATHS_PROVISIONING"])
    (provider,) = yaml.safe_load((files / "dashboards" / "warmkv.yaml").read_text())["providers"]
    boards = {path.stem for path in Path(provider["options"]["path"]).iterdir()}
    assert {"overview", "tuning"} < boards
    sources = yaml.safe_load((files / "datasources" / "warmkv.yaml").read_text())["datasources"]
    assert {source["uid"]: source["url"] for source in sources} == {
        "prometheus": "http://p:9090",
        "warmkv-api": "http://g:8400",
    }
    assert stat.S_IMODE((files / "datasources" / "warmkv.yaml").stat().st_mode) == 0o600
    tuning = (Path(provider["options"]["path"]) / "tuning.json").read_text()
    assert "http://g:8400" in tuning
    assert "operator's" not in tuning


def test_without_grafana_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with observe.showing(tmp_path / "run", 1, "http://p", "http://g", "key") as url:
        assert url is None
