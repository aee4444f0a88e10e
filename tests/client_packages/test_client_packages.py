"""Clients that people run, unmodified, against the service: each in an environment of their own (`make clients`)."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.platform.conftest import Server
from warmkv.config import load

PYTHON = os.path.abspath(os.environ["WARMKV_CLIENTS_PYTHON"]) if "WARMKV_CLIENTS_PYTHON" in os.environ else ""
SCRIPTS = sorted(path.name for path in Path(__file__).parent.glob("ask_*.py"))
FLAGS = ("engine.threads=1", "gateway.models={claude-*: tiny, gpt-*: tiny}")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = Server(load(flags=FLAGS), time.monotonic, tmp_path_factory.mktemp("policy"))
    yield server.url
    server.stop()


@pytest.mark.skipif(not PYTHON, reason="needs WARMKV_CLIENTS_PYTHON, an interpreter with constraints-clients.txt")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_client_package_works_unmodified(url, script):
    environ = {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")},
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "any",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "any",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing is looked up elsewhere
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
    }
    ran = subprocess.run(
        [PYTHON, Path(__file__).parent / script], env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
