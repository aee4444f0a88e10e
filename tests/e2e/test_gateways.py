"""Gateways listen beside Serve's proxy, and an upgrade loses no request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.conftest import OPERATOR, Cluster
from tests.polling import PATIENCE, until
from warmkv.platform.document import serve_document
from warmkv.platform.local import start_document

pytestmark = pytest.mark.cluster

LISTEN = "0A"  # a state in /proc/net/tcp
TOKENS = 40


def listeners(port: int) -> int:
    """Return sockets that listen at a port."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(fields[3] == LISTEN and fields[1].endswith(f":{port:04X}") for fields in lines)


def gateways(cluster: Cluster) -> set[str]:
    answer = requests.get(f"{cluster.url}/v1/warmkv/policy", headers=OPERATOR, timeout=PATIENCE)
    return set(answer.json()["parts"])


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
@pytest.mark.slow
@pytest.mark.soak
def test_no_request_is_lost_at_an_upgrade(cluster):
    """Serve replaces gateways and replicas. Clients open a connection for a request, and none of them tries twice."""
    until(lambda: listeners(cluster.config.gateway.port) == 2, "the gateway listens beside the proxy")
    before, over = gateways(cluster), threading.Event()
    answered, lost = [0] * 4, list[Any]()

    def ask(client: int) -> None:
        body = {"model": cluster.config.model.name, "prompt": f"def f{client}(", "max_tokens": TOKENS, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "warmkv": {"ignore_eos": True}}
        while not over.is_set():
            try:
                answer = requests.post(f"{cluster.url}/v1/completions", json=body, timeout=PATIENCE)
            except requests.RequestException as error:
                lost.append(error)
                continue
            if f'"completion_tokens": {TOKENS}' not in answer.text or not answer.text.endswith("[DONE]\n\n"):
                lost.append((answer.status_code, answer.text[-300:]))
            answered[client] += 1

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(len(answered))]
    for client in clients:
        client.start()
    try:
        more: Callable[[int], bool] = lambda wanted: min(answered) >= wanted  # noqa: E731
        until(lambda: more(2), "answers before")
        config = cluster.config.gateway.model_copy(update={"retries": 4})  # of no matter here
        start_document(serve_document(cluster.config.model_copy(update={"gateway": config})))
        until(lambda: gateways(cluster) - before, "there is another gateway")
        until(lambda: listeners(cluster.config.gateway.port) == 2, "it listens, and the one before no more")
        so_far = min(answered)
        until(lambda: more(so_far + 2), "answers afterwards")
    finally:
        over.set()
        for client in clients:
            client.join()
    assert not lost, lost
