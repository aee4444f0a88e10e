"""`warmkv serve` and `warmkv demo` as a user runs them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from typer.testing import CliRunner

from tests.e2e.conftest import OPERATOR, Cluster
from tests.faults.nodes import processes
from tests.polling import PATIENCE
from warmkv import demo
from warmkv.cli import app
from warmkv.config import Config
from warmkv.platform.local import Running, free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
WARMKV = Path(sys.executable).with_name("warmkv")


def first_event(lines: Iterator[bytes]) -> bytes:
    """Return the line that begins the first event of a stream that is no ping."""
    return next(line for line in lines if line.startswith(b"event:") and line != b"event: ping")


def test_serve_answers_until_it_is_interrupted(tmp_path: Path):
    log = tmp_path / "log.jsonl"
    port = free_port("127.0.0.1")
    settings = ["gateway.port=0", f"gateway.access_log={log}", "cluster.replicas=1", "cluster.drain_seconds=1"]
    command = [
        WARMKV,
        "serve",
        "--metrics-port",
        str(port),
        *(part for setting in settings for part in ("--set", setting)),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if found := re.search(r"at (http://\S+)", line):
                break
        else:
            pytest.fail(f"it never said where it serves:\n{seen}")
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
        answer = requests.post(f"{found[1]}/v1/messages", json=body, timeout=PATIENCE)
        assert answer.json()["usage"]["output_tokens"] > 0
        assert requests.get(f"{found[1]}/v1/warmkv/policy", timeout=PATIENCE).status_code == 403
        shown = subprocess.run([WARMKV, "policy", "show", "--url", found[1]], capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr  # it found the operator's key of this run
        assert requests.get(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE).status_code == 200
        long = {**body, "max_tokens": 4000, "stream": True, "warmkv": {"ignore_eos": True}}
        with requests.post(f"{found[1]}/v1/messages", json=long, stream=True, timeout=PATIENCE) as streamed:
            lines = streamed.iter_lines()
            assert first_event(lines) == b"event: message_start"
            process.send_signal(signal.SIGINT)
            events = [line for line in lines if line]
        assert events[-2] == b"event: error"  # it has a second to end, and takes many
        assert b"The server is being stopped" in events[-1]
        rest, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, seen + rest
        assert f":{port}/metrics" in rest
        assert "Traceback" not in seen + rest
        logged = [json.loads(line) for line in log.read_text().splitlines()]
        assert [(line["status"], line["error"]) for line in logged] == [("ok", ""), ("error", "overloaded_error")]
        assert logged[1]["output_tokens"] > 0
    finally:
        process.kill()


@pytest.mark.soak(least=0.5)  # it starts a service of its own
@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
def test_serve_ends_with_an_error_where_ray_ends_under_it(part: str):
    process = subprocess.Popen(
        [WARMKV, "serve", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        assert any("for Prometheus" in line for line in process.stdout)
        (ended,) = (one for one in processes() if one.parent == process.pid and one.command[0].endswith(f"/{part}"))
        ended.signal(signal.SIGKILL)
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1
        assert f"Ray's {part} has ended, and the service with it." in said
    finally:
        process.kill()


@pytest.mark.soak(least=0.5)
def test_a_second_interrupt_cuts_off_what_runs():
    process = subprocess.Popen(
        [WARMKV, "serve", "--port", "0", "--set", "cluster.replicas=1", "--set", "cluster.drain_seconds=3600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = next(found[1] for line in process.stdout if (found := re.search(r"at (http://\S+)", line)))
        assert any("for Prometheus" in line for line in process.stdout)
        body = {"model": "tiny", "max_tokens": 4000, "messages": [{"role": "user", "content": "Hello"}]}
        long = {**body, "stream": True, "warmkv": {"ignore_eos": True}}
        with requests.post(f"{url}/v1/messages", json=long, stream=True, timeout=PATIENCE) as streamed:
            lines = streamed.iter_lines()
            assert first_event(lines) == b"event: message_start"
            process.send_signal(signal.SIGINT)
            assert any("stopping" in line for line in process.stdout)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=PATIENCE)
        assert (process.returncode, "Traceback" in said) == (130, False), said
    finally:
        process.kill()


@pytest.mark.soak
def test_the_demo_passes(tmp_path: Path):
    out = tmp_path / "demo.json"
    done = subprocess.run([WARMKV, "demo", "--json", str(out)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    check(json.loads(out.read_text()))


@pytest.mark.short
def test_the_demo_passes_on_the_service_of_the_session(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """It asks that service in place of one of its own, which would be started as `serve` is above."""

    @contextmanager
    def running(config: Config) -> Iterator[Running]:
        assert config.cluster.replicas == cluster.config.cluster.replicas
        with cluster.changed({"routing.transfer": config.routing.transfer}):
            yield Running(cluster.url, cluster.config.gateway.port, {}, OPERATOR["x-api-key"])

    monkeypatch.setattr(demo, "running", running)
    out = tmp_path / "demo.json"
    done = CliRunner().invoke(app, ["demo", "--json", str(out)])
    assert done.exit_code == 0, done.output
    check(json.loads(out.read_text()))


def check(result: dict[str, Any]) -> None:
    assert result["passed"]
    assert {(row["api"], row["policy"].partition("@")[0]) for row in result["rows"]} == {
        (api, policy) for api in ("anthropic", "openai") for policy in ("full", "snapkv", "streaming_llm")
    }
    for row in result["rows"]:
        resident = {reply["details"]["resident_bytes"] for reply in row["replies"]}
        assert max(resident) > 0
    assert result["tools"]["called"] == "look_up"
    assert result["tools"]["read"] > demo.DOCUMENT_TOKENS / 2
