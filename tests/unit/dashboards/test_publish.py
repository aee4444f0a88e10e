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
from warmkv.dashboards.boards import BOARDS
from warmkv.dashboards.build import documents
from warmkv.dashboards.publish import Published, PublishError, Target, folder_uid, publish

TOKEN = "glsa_right"


class Grafana(ThreadingHTTPServer):
    """The endpoints that publishing uses, under `/grafana`: health; folders, data sources and dashboards by uid."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, Any]] = []
        self.version: str | None = "12.1.0"
        self.folders: dict[str, str] = {}
        self.sources: dict[str, dict[str, Any]] = {}
        self.secrets: dict[str, Any] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, int] = {}
        self.places: dict[str, str] = {}  # folder of a dashboard
        self.forced: tuple[int, str] | None = None  # an answer to everything, whatever was asked

    @property
    def written(self) -> list[tuple[str, str]]:
        return [(method, path) for method, path, _ in self.requests if method != "GET"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/grafana"


class Handler(BaseHTTPRequestHandler):
    server: Grafana

    def do_GET(self) -> None:
        self.respond(None)

    def do_POST(self) -> None:
        self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_PUT(self) -> None:
        self.do_POST()

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
        if path == "/health":
            return 200, {"database": "ok"} | ({"version": server.version} if server.version else {})
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
        if path.startswith("/datasources"):
            return self.source(path.removeprefix("/datasources").removeprefix("/uid/"), body)
        if self.command == "GET" and path.startswith("/dashboards/uid/"):
            uid = path.removeprefix("/dashboards/uid/")
            if uid not in server.dashboards:
                return 404, {"message": "Dashboard not found"}
            meta = {"url": f"/grafana/d/{uid}/x", "version": server.versions[uid], "folderUid": server.places[uid]}
            kept = {**server.dashboards[uid], "id": 7, "version": server.versions[uid]}  # which Grafana adds
            return 200, {"dashboard": kept, "meta": meta}
        if self.command == "POST" and path == "/dashboards/db":
            uid = body["dashboard"]["uid"]
            if body["folderUid"] not in server.folders:
                return 400, {"message": "folder not found"}
            if uid in server.dashboards and not body["overwrite"]:
                return 412, {"message": "The dashboard has been changed by someone else"}
            server.dashboards[uid] = body["dashboard"]
            server.places[uid] = body["folderUid"]
            server.versions[uid] = server.versions.get(uid, 0) + 1
            return 200, {"uid": uid, "url": f"/grafana/d/{uid}/x", "version": server.versions[uid], "status": "success"}
        return 404, {"message": "Not found"}

    def source(self, uid: str, body: Any) -> tuple[int, Any]:
        known = self.server.sources
        if self.command == "GET":
            return (200, known[uid]) if uid in known else (404, {"message": "Data source not found"})
        if (self.command, uid in known) == ("PUT", False):
            return 404, {"message": "Data source not found"}
        if self.command == "POST" and body["uid"] in known:
            return 409, {"message": "data source with the same name already exists"}
        self.server.secrets[body["uid"]] = body.pop("secureJsonData", {})
        known[body["uid"]] = {**body, "id": 1, "readOnly": False}
        return 200, {"datasource": known[body["uid"]], "message": "Datasource added"}

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


def at(grafana: Grafana, **more: Any) -> Target:
    return Target(grafana.url, more.pop("token", TOKEN), **more)


def states(published: list[Published]) -> dict[str, str]:
    return {one.uid: one.state for one in published}


def test_first_publish_makes_the_folder_then_uploads(grafana: Grafana) -> None:
    boards = documents()
    published = publish(at(grafana, folder="LLM serving", datasource="thanos"), boards)

    uid = "LLM-serving"
    assert grafana.written == [
        ("POST", "/grafana/api/folders"),
        *[("POST", "/grafana/api/dashboards/db")] * len(boards),
    ]
    assert grafana.folders == {uid: "LLM serving"}
    assert set(grafana.places.values()) == {uid}
    assert set(states(published).values()) == {"created"}
    assert published[1].url == f"{grafana.url}/d/warmkv-overview/x"
    kept = grafana.dashboards["warmkv-overview"]
    source = next(entry for entry in kept["templating"]["list"] if entry["name"] == "datasource")
    assert source["current"]["value"] == "thanos"
    assert kept["panels"] == boards["overview"]["panels"]


def test_a_second_publish_changes_nothing(grafana: Grafana) -> None:
    boards = documents()
    target = at(grafana, prometheus="http://prometheus:9090", gateway="http://gateway:8400", key="operator")
    publish(target, boards)
    before, text = len(grafana.written), json.dumps(boards)
    assert set(states(publish(target, boards)).values()) == {"unchanged"}
    assert len(grafana.written) == before
    assert json.dumps(boards) == text, "the caller's documents were changed"


def test_what_differs_is_shown_then_replaced(grafana: Grafana) -> None:
    target, boards = at(grafana), documents()
    publish(target, boards)
    edited = grafana.dashboards["warmkv-cost"]
    panel = next(at for at, panel in enumerate(edited["panels"]) if panel["type"] == "timeseries")
    edited["panels"][panel]["title"] = "edited in Grafana"
    del grafana.dashboards["warmkv-routing"]
    grafana.places["warmkv-tuning"] = "elsewhere"
    before = len(grafana.written)
    compared = {one.uid: one for one in publish(target, boards, write=False)}
    assert len(grafana.written) == before
    assert compared["warmkv-cost"].differences == (f"panels[{panel}].title",)
    assert compared["warmkv-tuning"].differences == ("folder",)
    expected = {"warmkv-cost": "updated", "warmkv-tuning": "updated", "warmkv-routing": "created"}
    changed = {uid: one.state for uid, one in compared.items() if one.state != "unchanged"}
    assert changed == expected
    assert {uid: state for uid, state in states(publish(target, boards)).items() if state != "unchanged"} == expected
    assert len(grafana.written) == before + 3
    assert set(states(publish(target, boards)).values()) == {"unchanged"}
    assert grafana.versions["warmkv-cost"] == 2


def test_data_sources_are_made_by_uid_and_keys_change(grafana: Grafana) -> None:
    addresses = {"prometheus": "http://prometheus:9090", "gateway": "http://gateway:8400"}
    publish(at(grafana, datasource="thanos", key="wkv-one", **addresses), documents())
    assert {uid: source["type"] for uid, source in grafana.sources.items()} == {
        "thanos": "prometheus",
        "warmkv-api": "yesoreyeram-infinity-datasource",
    }
    api = grafana.sources["warmkv-api"]
    assert (api["url"], api["jsonData"]["apiKeyKey"]) == ("http://gateway:8400", "x-api-key")
    assert grafana.secrets["warmkv-api"] == {"apiKeyValue": "wkv-one"}
    assert "wkv-one" not in json.dumps([api, *grafana.dashboards.values()])
    assert states(publish(at(grafana, datasource="thanos", key="wkv-two", **addresses), documents()))["warmkv-api"] == (
        "updated"
    )
    assert grafana.secrets["warmkv-api"] == {"apiKeyValue": "wkv-two"}
    variables = {one["name"]: one for one in grafana.dashboards["warmkv-tuning"]["templating"]["list"]}
    assert variables["gateway"]["query"] == "http://gateway:8400"
    assert variables["api"]["current"]["value"] == "warmkv-api"


@pytest.mark.parametrize(("version", "fits"), [("11.6.3", False), ("12.0.0", True), ("13.1.0-pre", True), (None, True)])
def test_an_old_grafana_is_refused(grafana: Grafana, version: str | None, fits: bool) -> None:
    grafana.version = version
    if fits:
        publish(at(grafana), documents())
        return
    with pytest.raises(PublishError, match=r"is Grafana 11.6.3: .* need 12 or newer"):
        publish(at(grafana), documents())
    assert grafana.written == []


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
        publish(at(grafana), documents())


def test_wrong_token(grafana: Grafana) -> None:
    with pytest.raises(PublishError, match=r"401.*GRAFANA_TOKEN"):
        publish(at(grafana, token="glsa_wrong"), documents())
    assert grafana.dashboards == {}


def test_no_token_asks_nobody(grafana: Grafana) -> None:
    with pytest.raises(PublishError, match="no token"):
        publish(at(grafana, token=" "), documents())
    assert grafana.requests == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(PublishError, match=r"cannot reach Grafana at http://127.0.0.1:\d+.*refused"):
        publish(Target(f"http://127.0.0.1:{free_port()}", TOKEN), documents())


@pytest.mark.parametrize(
    "url", ["127.0.0.1:3000", "ftp://grafana", "http://", "http://me:secret@grafana", "http://g:x"]
)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(PublishError, match="grafana_url") as caught:
        publish(Target(url, TOKEN), documents())
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


def test_diff_command_changes_nothing(grafana: Grafana) -> None:
    def run(*command: str) -> str:
        result = CliRunner().invoke(
            app, ["dashboards", *command, "--url", grafana.url], env={"GRAFANA_TOKEN": TOKEN, "COLUMNS": "200"}
        )
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "dashboard warmkv overview: would be created" in run("diff")
    assert grafana.written == []
    run("publish")
    edited = grafana.dashboards["warmkv-overview"]
    edited["panels"] = [{**panel, "title": "edited"} for panel in edited["panels"]]
    before = len(grafana.written)
    told = run("diff")
    assert "dashboard warmkv overview: would be updated" in told
    assert "  panels[0].title\n" in told
    assert "  and " in told
    assert "dashboard warmkv cost and tenants: unchanged" in told
    assert len(grafana.written) == before


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
    names = (*(f"{board.name}.json" for board in BOARDS), "alerts.yaml", "prometheusrule.yaml")
    assert json.loads(result.stdout)["files"] == [str(tmp_path / "boards" / name) for name in names]
    assert json.loads((tmp_path / "boards" / "overview.json").read_text())["title"] == "warmkv overview"


def test_absent_sdk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grafana_api", None)
    monkeypatch.delitem(sys.modules, "warmkv.dashboards.publish")
    monkeypatch.delattr("warmkv.dashboards.publish")
    result = CliRunner().invoke(app, ["dashboards", "publish", "--dry-run"])
    assert result.exit_code == 2
    assert "pip install 'warmkv[dashboards]'" in result.stderr
