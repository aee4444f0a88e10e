"""Publishing, against a server that answers as Grafana does and remembers what it was asked."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from warmkv.cli import app
from warmkv.dashboards.build import documents
from warmkv.dashboards.publish import PublishError, folder_uid, publish

TOKEN = "glsa_right"


class Grafana(ThreadingHTTPServer):
    """The endpoints that publishing uses: folders by uid and dashboards, under the path `/grafana`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, Any]] = []
        self.folders: dict[str, str] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, int] = {}
        self.forced: tuple[int, str] | None = None  # an answer to everything, whatever was asked

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/grafana"


class Handler(BaseHTTPRequestHandler):
    server: Grafana

    def do_GET(self) -> None:
        self.respond(None)

    def do_POST(self) -> None:
        self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def respond(self, body: Any) -> None:
        self.server.requests.append((self.command, self.path, body))
        status, answer = self.server.forced or self.answer(body)
        text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def answer(self, body: Any) -> tuple[int, Any]:
        server, path = self.server, self.path.removeprefix("/grafana/api")
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return 401, {"message": "Invalid API key"}
        if self.command == "GET" and path.startswith("/folders/"):
            uid = path.removeprefix("/folders/")
            if uid in server.folders:
                return 200, {"uid": uid, "title": server.folders[uid]}
            return 404, {"message": "folder not found"}
        if self.command == "POST" and path == "/folders":
            server.folders[body["uid"]] = body["title"]
            return 200, body
        if self.command == "POST" and path == "/dashboards/db":
            uid = body["dashboard"]["uid"]
            if body["folderUid"] not in server.folders:
                return 400, {"message": "folder not found"}
            if uid in server.dashboards and not body["overwrite"]:
                return 412, {"message": "The dashboard has been changed by someone else"}
            server.dashboards[uid] = body["dashboard"]
            server.versions[uid] = server.versions.get(uid, 0) + 1
            return 200, {"uid": uid, "url": f"/grafana/d/{uid}/x", "version": server.versions[uid], "status": "success"}
        return 404, {"message": "Not found"}

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def grafana(monkeypatch: pytest.MonkeyPatch) -> Iterator[Grafana]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Grafana()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_first_publish_makes_the_folder_then_uploads(grafana: Grafana) -> None:
    (published,) = publish(grafana.url, TOKEN, documents(), folder="LLM serving", datasource="thanos")

    uid = "LLM-serving"
    assert [request[:2] for request in grafana.requests] == [
        ("GET", f"/grafana/api/folders/{uid}"),
        ("POST", "/grafana/api/folders"),
        ("POST", "/grafana/api/dashboards/db"),
    ]
    assert grafana.folders == {uid: "LLM serving"}
    assert grafana.requests[-1][2]["folderUid"] == uid
    assert published.url == f"{grafana.url}/d/warmkv-overview/x"
    kept = grafana.dashboards["warmkv-overview"]
    source = next(entry for entry in kept["templating"]["list"] if entry["type"] == "datasource")
    assert source["current"]["value"] == "thanos"
    assert kept["panels"] == documents()["overview"]["panels"]


def test_second_publish_replaces(grafana: Grafana) -> None:
    boards = documents()
    publish(grafana.url, TOKEN, boards)
    before = json.dumps(boards)
    (published,) = publish(grafana.url, TOKEN, boards)
    assert published.version == 2
    assert sum(request[:2] == ("POST", "/grafana/api/folders") for request in grafana.requests) == 1
    assert json.dumps(boards) == before, "the caller's documents were changed"


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (403, '{"message": "Access denied"}', "role Editor"),
        (400, '{"message": "bad dashboard"}', "bad dashboard"),
        (500, '{"message": "database is locked"}', "database is locked"),
        (502, "a message from a proxy", "failed|not as Grafana does"),
        (200, "<html>a login page</html>", "not as Grafana does"),
    ],
)
def test_refusals_say_what_to_do(grafana: Grafana, status: int, body: str, expected: str) -> None:
    grafana.forced = (status, body)
    with pytest.raises(PublishError, match=expected):
        publish(grafana.url, TOKEN, documents())


def test_wrong_token(grafana: Grafana) -> None:
    with pytest.raises(PublishError, match=r"401.*GRAFANA_TOKEN"):
        publish(grafana.url, "glsa_wrong", documents())
    assert grafana.dashboards == {}


def test_no_token_asks_nobody(grafana: Grafana) -> None:
    with pytest.raises(PublishError, match="no token"):
        publish(grafana.url, " ", documents())
    assert grafana.requests == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(PublishError, match=r"cannot reach Grafana at http://127.0.0.1:\d+.*refused"):
        publish(f"http://127.0.0.1:{free_port()}", TOKEN, documents())


@pytest.mark.parametrize(
    "url", ["127.0.0.1:3000", "ftp://grafana", "http://", "http://me:secret@grafana", "http://g:x"]
)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(PublishError, match="grafana_url") as caught:
        publish(url, TOKEN, documents())
    if "@" in url:
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("title", "uid"), [("warmkv", "warmkv"), ("LLM / chat", "LLM-chat"), ("?", "warmkv"), ("x" * 50, "x" * 40)]
)
def test_folder_uid(title: str, uid: str) -> None:
    assert folder_uid(title) == uid


# --- the commands -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["--url={}", "--set=dashboards.grafana_url={}"])
def test_command_publishes(grafana: Grafana, address: str) -> None:
    where = [address.format(grafana.url), "--folder", "LLM serving", "--datasource", "thanos"]
    result = CliRunner().invoke(app, ["dashboards", "publish", *where, "--json"], env={"GRAFANA_TOKEN": TOKEN})
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["dashboards"][0]["uid"] == "warmkv-overview"
    assert "thanos" in json.dumps(grafana.dashboards["warmkv-overview"]["templating"])
    assert grafana.folders == {"LLM-serving": "LLM serving"}


def test_dry_run_asks_nobody(grafana: Grafana) -> None:
    result = CliRunner().invoke(
        app, ["dashboards", "publish", "--url", grafana.url, "--dry-run"], env={"GRAFANA_TOKEN": TOKEN}
    )
    assert result.exit_code == 0, result.output
    assert "would publish" in result.stdout
    assert grafana.requests == []


def test_exit_codes(grafana: Grafana) -> None:
    run = CliRunner().invoke
    failed = run(app, ["dashboards", "publish", "--url", grafana.url], env={"GRAFANA_TOKEN": "glsa_wrong"})
    assert failed.exit_code == 1
    assert "401" in failed.stderr
    assert run(app, ["dashboards", "publish", "--set", "dashboards.grafana_ur=x"]).exit_code == 2
    assert run(app, ["dashboards", "publish", "--nonsense"]).exit_code == 2


def test_build_command_writes(tmp_path: Any) -> None:
    result = CliRunner().invoke(app, ["dashboards", "build", str(tmp_path / "boards"), "--json"])
    assert result.exit_code == 0, result.output
    names = ("overview.json", "alerts.yaml", "prometheusrule.yaml")
    assert json.loads(result.stdout)["files"] == [str(tmp_path / "boards" / name) for name in names]
    assert json.loads((tmp_path / "boards" / "overview.json").read_text())["title"] == "warmkv overview"


def test_absent_sdk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grafana_api", None)
    monkeypatch.delitem(sys.modules, "warmkv.dashboards.publish")
    monkeypatch.delattr("warmkv.dashboards.publish")
    result = CliRunner().invoke(app, ["dashboards", "publish", "--dry-run"])
    assert result.exit_code == 2
    assert "pip install 'warmkv[dashboards]'" in result.stderr
