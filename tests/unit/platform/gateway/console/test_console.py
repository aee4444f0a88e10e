"""The console in a real browser: live numbers, a candidate applied and rolled back, a question asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import requests

from tests.browser import Page, browsing
from tests.html import Page as Parsed
from tests.polling import PATIENCE, until
from tests.unit.platform.asgi import Gateway
from tests.unit.platform.conftest import OPERATOR
from tests.unit.platform.gateway.access.test_access import OPERATORS, TENANTS
from warmkv.platform.gateway.console import FOLDER, PATHS
from warmkv.prefixes.misses import Reason
from warmkv.simulator.studies.replays.log_fit import ENOUGH

TEXT = "for position in range(length):\n    total += position\n" * 12


# --- as it is served


def test_the_page_needs_no_key_and_may_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, TENANTS, OPERATORS)
    for path in PATHS:
        served = gateway.call("GET", path)
        assert served.status == 200
        policy = served.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert (served.headers["x-content-type-options"], served.headers["cache-control"]) == ("nosniff", "no-cache")
    assert gateway.call("GET", "/console/nothing").status == 401
    assert gateway.call("GET", "/console/../console/index.html").status == 401


def test_nothing_in_it_is_inline_or_from_elsewhere() -> None:
    page = Parsed()
    html = (FOLDER / "index.html").read_text()
    page.feed(html)
    assert set(page.links) <= {path.removeprefix("/") for path in PATHS}
    assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?![^>]*\ssrc=)", html)
    script = (FOLDER / "console.js").read_text()
    for word in ("innerHTML", "insertAdjacentHTML", "eval(", "Storage", "cookie ", "http:", "https:"):
        assert word not in script.replace("http://www.w3.org/2000/svg", ""), word
    assert "url(" not in (FOLDER / "style.css").read_text()


def test_it_has_words_for_every_reason_of_a_miss() -> None:
    script = (FOLDER / "console.js").read_text()
    assert [reason for reason in get_args(Reason) if f'\n  {reason}: "' not in script] == []


# --- in a browser


def ask(server: Any, question: str) -> None:
    block = {"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}
    server.anthropic().messages.create(
        model=server.config.model.name,
        max_tokens=2,
        messages=[{"role": "user", "content": [block, {"type": "text", "text": question}]}],
        extra_body={"temperature": 0},
    )


def get(server: Any, path: str) -> Any:
    return requests.get(f"{server.url}/v1/warmkv/{path}", headers=OPERATOR, timeout=PATIENCE).json()


def connect(page: Page, url: str, key: str) -> None:
    page.open(f"{url}/console")
    page.type("#key", key)
    page.press("Enter")


def click(page: Page, label: str) -> None:
    """Go to a button by its label, and press Enter there."""
    button = f"document.querySelector('button[aria-label=\"{label}\"]')"
    until(lambda: page.value(f"{button} !== null && !{button}.disabled"), f"there is a button {label}")
    page.value(f"{button}.focus()")
    page.press("Enter")
    assert page.value("document.getElementById('confirm').open")
    assert page.value("document.activeElement.id") == "why"


def test_an_operator_sees_applies_and_rolls_back(serve: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    server = serve("engine.threads=1", "control.whatif={}")
    for number in range(ENOUGH + 4):
        ask(server, f"Question {number}?")
    with browsing(tmp_path) as page:
        page.look(1000, 760)
        connect(page, server.url, OPERATOR["x-api-key"])
        live = get(server, "live")
        until(lambda: f"{100 * live['hit_rate']:.1f}%" in page.text("#cards"), "the hit rate is shown")
        assert f"{live['tokens']['cached']:,} of {live['tokens']['prompt']:,} prompt tokens" in page.text("#cards")
        assert "the cache saved $" in page.text("#cards")
        assert "Version 0, model tiny, 1 replica." in page.text("#scope")

        page.type("input[name=setting]", "prefix_cache.default_ttl")
        page.type("input[name=value]", "1h")
        page.press("Enter")
        click(page, "Apply 1")
        assert page.text("#confirm-what") == "prefix_cache.default_ttl = 1h"
        page.press("Enter")
        until(lambda: "Version 1 is in force" in page.text("#status"), "it is applied")
        policy = get(server, "policy")
        assert (policy["version"], policy["why"]) == (1, "what-if: 1")
        assert policy["settings"]["prefix_cache.default_ttl"] == "1h"
        until(lambda: "in force" in page.text("#versions tr:first-child"), "the table shows it")
        until(lambda: "Version 1, model" in page.text("#scope"), "so do the live figures")

        click(page, "Roll back to version 0")
        page.type("#why", "it was better")
        page.press("Enter")
        until(lambda: "Version 2 is in force" in page.text("#status"), "it is rolled back")
        policy = get(server, "policy")
        assert (policy["rolled_back_to"], policy["settings"]["prefix_cache.default_ttl"]) == (0, "5m")
        until(lambda: "it was better" in page.text("#versions tr:first-child"), "the table shows why")

        page.type("#ask textarea", TEXT)
        page.type("#ask input[name=question]", "And now?")
        page.press("Enter")
        until(lambda: "first token after" in page.text("#answers"), "the answer is there")
        answer = page.text("#answers")
        assert re.search(r"Price\s+\$0\.\d+: input", answer)
        assert "under full, version 2" in answer
        assert "nothing read; cold from messages.0.content.0 on: no earlier request of this tenant" in answer
        page.type("#ask input[name=question]", "And again?")
        page.press("Enter")
        until(lambda: "And again?" in page.text("#answers"), "it is asked again")
        assert "read up to messages.0.content.0\n" in page.text("#answers .answer")

        if folder := request.config.getoption("pictures"):
            until(lambda: page.value("document.querySelectorAll('#candidates small').length > 3"), "figures are there")
            page.value("scrollTo(0, 0)")
            page.picture(Path(folder) / "console.png")
        assert page.faults == []
        for kept in ("localStorage.length", "sessionStorage.length", "document.cookie", "location.search", "key.value"):
            assert page.value(kept) in (0, "")
        page.look(360, 740, "dark")
        assert page.value("document.documentElement.scrollWidth <= innerWidth")  # tables scroll by themselves
        red, green, blue = map(int, re.findall(r"\d+", page.value("getComputedStyle(document.body).backgroundColor")))
        assert max(red, green, blue) < 64

        page.value("document.getElementById('forget').focus()")
        page.press("Enter")
        assert page.text("#cards") == page.text("#versions") == ""
        connect(page, server.url, "somebody's")
        until(lambda: "not an operator's" in page.text("#status"), "who is no operator is told")
        assert page.text("#versions") == ""


PATCH = """
window.seen = []; window.held = window.altered = null; window.down = false;
window.fetch = ((fetch) => async (url, options) => {
  seen.push(url.pathname);
  if (held) await held;
  if (down) throw new Error("the network is down");
  const answer = await fetch(url, options);
  if (!altered || !url.pathname.endsWith("/policy")) return answer;
  return new Response(JSON.stringify({ ...await answer.json(), ...altered }), { status: answer.status });
})(window.fetch)
"""


def put(server: Any, changes: dict[str, Any]) -> None:
    body = {"changes": changes, "why": "by another"}
    answer = requests.put(f"{server.url}/v1/warmkv/policy", json=body, headers=OPERATOR, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text


def asked(page: Page, path: str) -> int:
    """Count how often the page has asked for a path since PATCH."""
    return int(page.value(f"seen.filter((path) => path.endsWith('{path}')).length"))


def test_a_candidate_is_applied_to_the_version_that_it_was_replayed_with(serve: Any, tmp_path: Path) -> None:
    server = serve("engine.threads=1", "control.whatif={}")
    for number in range(ENOUGH + 4):
        ask(server, f"Question {number}?")
    with browsing(tmp_path) as page:
        connect(page, server.url, OPERATOR["x-api-key"])
        page.value(PATCH)
        click(page, "Apply ttl-double")
        put(server, {"prefix_cache.ttls": {"5m": 200, "1h": 7200}})
        until(lambda: get(server, "whatif")["version"] == 1, "it is replayed anew")
        page.value("seen = []")
        until(lambda: asked(page, "/whatif") >= 2, "the page has heard of it")
        page.press("Enter")
        until(lambda: "version 0 is not in force: version 1 is" in page.text("#status"), "it is refused")
        assert get(server, "policy")["settings"]["prefix_cache.ttls"] == {"5m": 200, "1h": 7200}


def test_what_is_not_in_force_or_may_not_be_meant_is_told(serve: Any, tmp_path: Path) -> None:
    server = serve("engine.threads=1")
    put(server, {"prefix_cache.ttls": {"5m": 300}})
    put(server, {"prefix_cache.ttls": {"5m": 300, "1h": 3600}})
    with browsing(tmp_path) as page:
        connect(page, server.url, OPERATOR["x-api-key"])
        click(page, "Roll back to version 1")
        page.type("#why", "as it was")
        page.press("Enter")
        until(lambda: "Version 3 is in force." in page.text("#status"), "it is rolled back")
        assert "mark a prefix with the TTL '1h' are refused from now on; there are 5m." in page.text("#status")
        assert page.text("#behind") == ""
        page.value(PATCH)
        page.value("altered = {parts: {b: {version: 1, fault: 'no price for 1h'}}, fault: 'versions cannot be read'}")
        until(lambda: "versions cannot be read" in page.text("#behind"), "what is wrong with the versions is shown")
        assert "Gateway b has version 1 in force, not 3: no price for 1h" in page.text("#behind")
        page.value("altered = null")
        until(lambda: page.text("#behind") == "", "it is gone with its reason")
        page.value("down = true")
        until(lambda: page.text("#status") == "the network is down", "a failure is told")
        page.value("down = false")
        until(lambda: page.text("#status") == "It answers again.", "and its end")


def test_a_session_ends_with_its_key_and_the_focus_stays_where_it_is(serve: Any, tmp_path: Path) -> None:
    server = serve("engine.threads=1")
    put(server, {"routing.overload": 3})
    with browsing(tmp_path) as page:
        connect(page, server.url, OPERATOR["x-api-key"])
        until(lambda: page.text("#cards") != "", "it is connected")
        page.value(PATCH)
        page.value("held = new Promise((resolve) => { window.release = resolve; }); true")
        until(lambda: page.value("seen.length") >= 3, "it asks again")
        page.value("document.getElementById('forget').click()")
        page.value("held = null; release()")
        page.value("new Promise((resolve) => setTimeout(resolve, 500))")
        assert page.text("#cards") == page.text("#versions") == ""
        for _ in range(3):  # the same key again and again
            page.type("#key", OPERATOR["x-api-key"])
            page.press("Enter")
        until(lambda: page.text("#versions") != "", "it is connected again")
        page.value("document.querySelector('#versions button').focus()")
        page.value("document.querySelector('#versions tr').dataset.old = 'yes'; seen = []; true")
        until(lambda: page.value("document.querySelector('#versions [data-old]') === null"), "the table is drawn anew")
        assert page.value("document.activeElement.getAttribute('aria-label')") == "Roll back to version 0"
        until(lambda: asked(page, "/history") >= 2, "some seconds pass")
        assert asked(page, "/live") <= 8


def test_live_figures_are_of_the_last_minutes_and_priced(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, OPERATORS)
    live = "/v1/warmkv/live"
    empty = gateway.call("GET", live, "ops'").body
    assert (empty["hit_rate"], empty["ttft"], empty["requests"]["ok"]) == (None, {"p50": None, "p99": None}, 0)
    gateway.cached_tokens = 4
    usage = gateway.completion("a").body["usage"]
    shown = gateway.call("GET", live, "ops'").body
    tokens = {"prompt": usage["prompt_tokens"], "cached": 4, "output": 3}
    assert (shown["requests"], shown["tokens"]) == ({"ok": 1, "error": 0, "cancelled": 0}, tokens)
    assert shown["hit_rate"] == pytest.approx(4 / usage["prompt_tokens"])
    assert shown["dollars"]["billed"] == pytest.approx(usage["warmkv"]["price"]["total"])
    assert shown["dollars"]["saved"] == pytest.approx(4 * 3e-6 * 0.9)  # read for a tenth of the input's price
    gateway.now += shown["seconds"] + 1
    assert gateway.call("GET", live, "ops'").body["tokens"]["prompt"] == 0
