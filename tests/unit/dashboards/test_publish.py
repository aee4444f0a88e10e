"""Publishing, against a server that answers as Grafana does and remembers what it was asked."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.polling import PATIENCE
from warmkv.cli import app
from warmkv.dashboards.boards import BOARDS
from warmkv.dashboards.build import documents
from warmkv.dashboards.publish import Published, PublishError, Target, folder_uid, publish

TOKEN = "glsa_right"
NEEDS = {  # permission, by method and beginning of the path; who has a role has those of the roles before it
    "Viewer": {"GET /folders": "folders:read", "GET /dashboards": "dashboards:read"},
    "Editor": {"POST /folders": "folders:create", "POST /dashboards": "dashboards:create"},
    "Admin": {
        "GET /datasources": "datasources:read",
        "POST /datasources": "datasources:create",
        "PUT /datasources": "datasources:write",
    },
}
Answer = tuple[int, Any]


class Grafana(ThreadingHTTPServer):
    """The endpoints that publishing uses, under `/grafana`, with the checks and refusals of Grafana's HTTP API.

    Sources: Dashboard, Folder and Data source HTTP API of its documentation, and how `/api` maps its errors.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, Any]] = []
        self.version: str | None = "12.1.0"
        self.role = "Admin"
        self.folders: dict[str, str] = {}
        self.sources: dict[str, dict[str, Any]] = {}
        self.secrets: dict[str, Any] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, int] = {}
        self.places: dict[str, str] = {}  # folder of a dashboard
        self.provisioned: set[str] = set()  # dashboards that Grafana reads from files
        self.forced: tuple[int, str] | None = None  # an answer to everything, whatever was asked

    @property
    def written(self) -> list[tuple[str, str]]:
        return [(method, path) for method, path, _ in self.requests if method != "GET"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/grafana"


def refused(code: int, message: str, /, **more: Any) -> Answer:
    return code, {"message": message, "traceID": "", **more}


def bad_uid(uid: Any) -> Answer | None:
    if not re.fullmatch(r"[A-Za-z0-9_-]*", uid or ""):
        return refused(400, "uid contains illegal characters")
    return refused(400, "uid too long, max 40 characters") if len(uid or "") > 40 else None


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

    def answer(self, body: Any) -> Answer:
        path = self.path.removeprefix("/grafana/api")
        if path == "/health":
            version = {"version": self.server.version} if self.server.version else {}  # anonymous users may not see it
            return 200, {"database": "ok", **version}
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return refused(401, "Invalid API key", messageId="api-key.invalid", statusCode=401)
        if body is not None and self.headers["Content-Type"] != "application/json":
            return refused(400, "bad request data")
        _, kind, rest = path.split("/", 2) if path.count("/") > 1 else (*path.split("/", 1), "")
        held = list(NEEDS)[: list(NEEDS).index(self.server.role) + 1]
        if not any(f"{self.command} /{kind}" in NEEDS[role] for role in held):
            lacking = next(
                needs[f"{self.command} /{kind}"] for needs in NEEDS.values() if f"{self.command} /{kind}" in needs
            )
            message = f"You'll need additional permissions to perform this action. Permissions needed: {lacking}"
            return 403, {"accessErrorId": "ACE0123456789", "message": message, "title": "Access denied"}
        answers = {"folders": self.folder, "datasources": self.source, "dashboards": self.dashboard}
        return answers[kind](rest, body)

    def folder(self, uid: str, body: Any) -> Answer:
        known = self.server.folders
        if self.command == "GET":
            if uid not in known:
                return refused(404, "folder not found", status="not-found")
            return 200, {
                "id": 1,
                "uid": uid,
                "title": known[uid],
                "url": f"/grafana/dashboards/f/{uid}/x",
                "version": 1,
            }
        if not body.get("title"):
            return refused(400, "folder title cannot be empty")
        if bad := bad_uid(body.get("uid")):
            return bad
        if body["uid"] in known:
            return refused(412, "the folder has been changed by someone else", status="version-mismatch")
        known[body["uid"]] = body["title"]
        return 200, {"id": 1, **body}

    def dashboard(self, rest: str, body: Any) -> Answer:
        server = self.server
        if self.command == "GET":
            uid = rest.removeprefix("uid/")
            if uid not in server.dashboards:
                return refused(404, "Dashboard not found")
            version, provisioned = server.versions[uid], uid in server.provisioned
            meta = {"url": f"/grafana/d/{uid}/x", "version": version, "folderUid": server.places[uid], "slug": "x"}
            kept = {**server.dashboards[uid], "id": 7, "version": version}  # which Grafana adds
            return 200, {"dashboard": kept, "meta": {**meta, "canSave": not provisioned, "provisioned": provisioned}}
        assert rest == "db"
        board = body["dashboard"]
        uid = board.get("uid")
        if not board.get("title"):
            return refused(400, "Dashboard title cannot be empty", status="empty-name")
        if bad := bad_uid(uid):
            return bad
        if board.get("id"):
            return refused(404, "Dashboard not found", status="not-found")  # an id of another Grafana
        if body.get("folderUid") and body["folderUid"] not in server.folders:
            return refused(400, "folder not found")
        if uid in server.provisioned:
            return refused(400, "Cannot save provisioned dashboard")
        if uid in server.dashboards and not body.get("overwrite") and board.get("version") != server.versions[uid]:
            return refused(412, "The dashboard has been changed by someone else", status="version-mismatch")
        server.dashboards[uid] = board
        server.places[uid] = body.get("folderUid", "")  # without one it goes to the root
        server.versions[uid] = version = server.versions.get(uid, 0) + 1
        told = {"uid": uid, "url": f"/grafana/d/{uid}/x", "version": version, "slug": "x", "status": "success"}
        return 200, {"id": 7, "folderUid": server.places[uid], **told}

    def source(self, rest: str, body: Any) -> Answer:
        known, uid = self.server.sources, rest.removeprefix("uid/")
        if self.command in ("GET", "PUT") and uid not in known:
            return refused(404, "Data source not found")
        if self.command == "GET":
            return 200, known[uid]
        if missing := [key for key in ("name", "type", "access") if not body.get(key)]:
            return refused(400, f"bad request data: {missing} required")
        if bad := bad_uid(body.get("uid")):
            return bad
        others = [one for one in known.values() if one["uid"] != uid]
        if body["name"] in [one["name"] for one in others]:
            return refused(409, "data source with the same name already exists")
        if self.command == "PUT" and known[uid]["readOnly"]:
            return refused(403, "Cannot update read-only data source")
        secrets = body.pop("secureJsonData", {})
        self.server.secrets[body["uid"]] = secrets  # of which only the names are ever shown
        kept = {**body, "id": 1, "orgId": 1, "readOnly": False, "secureJsonFields": dict.fromkeys(secrets, True)}
        known[body["uid"]] = kept
        return 200, {"datasource": kept, "id": 1, "message": "Datasource added", "name": body["name"]}

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
    return Target(grafana.url, more.pop("token", TOKEN), **{"timeout": PATIENCE, **more})


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
        (412, '{"message": "changed by someone else", "status": "version-mismatch"}', "changed by someone else"),
        (413, '{"message": "Dashboard is too large, max is 16 MB"}', "too large"),
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


@pytest.mark.parametrize(
    ("role", "addresses", "expected"),
    [
        ("Viewer", {}, "folders:create.*role Editor"),
        ("Editor", {}, None),
        ("Editor", {"prometheus": "http://prometheus:9090"}, "datasources:read.*must be Admin"),
        ("Admin", {"prometheus": "http://prometheus:9090"}, None),
    ],
)
def test_a_role_that_may_not_is_told_which_may(
    grafana: Grafana, role: str, addresses: dict[str, str], expected: str | None
) -> None:
    grafana.role = role
    if expected is None:
        publish(at(grafana, **addresses), documents())
        assert len(grafana.dashboards) == len(BOARDS)
        return
    with pytest.raises(PublishError, match=expected):
        publish(at(grafana, **addresses), documents())
    assert grafana.dashboards == {}


def test_what_grafana_reads_from_files_is_left_to_them(grafana: Grafana) -> None:
    target = at(grafana, prometheus="http://prometheus:9090")
    publish(target, documents())
    grafana.sources["prometheus"]["readOnly"] = True
    assert states(publish(target, documents()))["prometheus"] == "unchanged"
    with pytest.raises(PublishError, match=r"data source prometheus.*provisioned.*--prometheus"):
        publish(at(grafana, prometheus="http://elsewhere:9090"), documents())
    grafana.provisioned.add("warmkv-cost")
    grafana.dashboards["warmkv-cost"]["title"] = "edited"
    with pytest.raises(PublishError, match=r"dashboard warmkv-cost.*provisioned"):
        publish(target, documents())


def test_another_source_of_that_name_is_not_overwritten(grafana: Grafana) -> None:
    taken = {"uid": "P1809F7CD0C75ACF3", "name": "prometheus", "type": "prometheus", "readOnly": False}
    grafana.sources["P1809F7CD0C75ACF3"] = dict(taken)
    with pytest.raises(PublishError, match="same name already exists"):
        publish(at(grafana, prometheus="http://prometheus:9090"), documents())
    assert grafana.sources == {"P1809F7CD0C75ACF3": taken}


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
