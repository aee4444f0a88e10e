"""HEAD where there is GET, 405 with the methods that there are, 404 where there is nothing; through ASGI and HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.polling import PATIENCE
from tests.unit.platform.asgi import Gateway

PAGES = ["/health", "/healthz", "/readyz", "/v1/models", "/v1/models/tiny", "/console", "/openapi.json"]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Gateway:
    return Gateway(tmp_path_factory.mktemp("methods"))


@pytest.mark.parametrize("path", [*PAGES, "/nothing", "/v1/models/absent"])
def test_head_is_get_without_a_body(gateway: Gateway, path: str) -> None:
    whole, head = (gateway.call(method, path) for method in ("GET", "HEAD"))
    assert (head.status, head.body) == (whole.status, "")
    assert whole.body
    for reply in (whole, head):
        del reply.headers["request-id"]
    assert head.headers == whole.headers


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/messages", "POST"),
        ("HEAD", "/v1/messages", "POST"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("POST", "/v1/models/tiny", "GET, HEAD"),
        ("PUT", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
        ("DELETE", "/v1/warmkv/policy", "GET, HEAD, PUT"),
        ("POST", "/healthz", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_405_with_those_that_there_are(
    gateway: Gateway, method: str, path: str, allowed: str
) -> None:
    refused = gateway.call(method, path)
    assert (refused.status, refused.headers["allow"]) == (405, allowed)
    if method != "HEAD":
        assert refused.error == f"invalid_request_error: {method} is not allowed here (allowed: {allowed})"


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE"])
def test_what_is_not_there_is_404_by_any_method(gateway: Gateway, method: str) -> None:
    for path in ("/", "/v1", "/v1/nothing", "/v1/messages/batches"):
        assert gateway.call(method, path).status == 404


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_slash_too_many_is_404_and_no_redirect(gateway: Gateway, method: str) -> None:
    """Send no redirect: it would lead a client with its key to http and to the host that it named."""
    refused = gateway.call(method, "/v1/chat/completions/")
    assert (refused.status, refused.headers.get("location")) == (404, None)
    assert refused.error == f"not_found_error: there is no {method} /v1/chat/completions/ on this server"


def test_head_keeps_an_answer_to_its_request(tmp_path: Path) -> None:
    """A connection stays usable: what follows HEAD is the next answer, not a body."""
    from ray.serve.config import HTTPOptions

    from warmkv.platform.gateway.http_server import HttpServer, Paths
    from warmkv.platform.local import free_port

    async def run() -> list[Any]:
        port = free_port("127.0.0.1")
        options = HTTPOptions(host="127.0.0.1", port=port)
        server = HttpServer(Paths(Gateway(tmp_path).app, "ours"), "ours", options, shared=False)
        await server.follow({"ours": "/"})

        def ask() -> list[Any]:
            with requests.Session() as session:
                urls = [f"http://127.0.0.1:{port}{path}" for path in ("/healthz", "/v1/models", "/v1/messages")]
                found = [session.head(url, timeout=PATIENCE) for url in urls]
                return [*found, session.get(urls[0], timeout=PATIENCE)]

        answers = await asyncio.to_thread(ask)
        await server.close(PATIENCE, lambda: pytest.fail("nothing is to be given up"))
        return answers

    *heads, last = asyncio.run(run())
    assert [answer.status_code for answer in heads] == [200, 200, 405]
    assert all(answer.content == b"" and int(answer.headers["content-length"]) > 0 for answer in heads)
    assert last.json()["status"] == "ok"
