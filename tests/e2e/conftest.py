"""One Ray cluster for the session, started from the demo overlay's rendered manifest where kubectl is there."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import requests
import yaml

from warmkv.config import Config, parse
from warmkv.platform.document import serve_document
from warmkv.platform.local import free_port, start_document, start_ray, watching
from warmkv.platform.operator_key import with_operator

ROOT = Path(__file__).parents[2]
OVERLAY = ROOT / "k8s" / "overlays" / "demo"
OPERATOR = {"x-api-key": "operator of the tests"}  # headers


@dataclass(frozen=True)
class Cluster:
    """The service on a real Ray with two replicas, and the file its access log goes to."""

    url: str
    config: Config
    access_log: Path
    from_manifest: bool
    said: tuple[str, ...]  # while it started

    def anthropic(self, key: str) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0)

    def openai(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def replicas(self) -> dict[str, Any]:
        answer = requests.get(f"{self.url}/v1/warmkv/replicas", headers=OPERATOR, timeout=10)
        found: dict[str, Any] = answer.json()["replicas"]
        return found


def rendered_document() -> dict[str, Any]:
    """The Serve document inside the demo overlay's rendered RayService."""
    rendered = subprocess.run(["kubectl", "kustomize", str(OVERLAY)], capture_output=True, text=True, check=True).stdout
    services = [item for item in yaml.safe_load_all(rendered) if item["kind"] == "RayService"]
    document: dict[str, Any] = yaml.safe_load(services[0]["spec"]["serveConfigV2"])
    return document


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Started from the very document that Kubernetes would start; only address, model threads and log are ours."""
    from_manifest = shutil.which("kubectl") is not None
    document = (
        rendered_document()
        if from_manifest
        else serve_document(parse(yaml.safe_load((OVERLAY / "warmkv.yaml").read_text())))
    )
    log, port = tmp_path_factory.mktemp("service") / "access.jsonl", free_port("127.0.0.1")
    (application,) = document["applications"]
    args = application["args"]
    args.setdefault("gateway", {}).update(host="127.0.0.1", port=port, access_log=str(log))
    args.setdefault("engine", {}).update(threads=1)
    document["http_options"] = {"host": "127.0.0.1", "port": port}
    config = parse(args)
    config = config.model_copy(update={"gateway": with_operator(config.gateway, OPERATOR["x-api-key"])})
    application["args"] = config.model_dump(mode="json", exclude_defaults=True)
    os.environ["WARMKV_SALT"] = "salt of the tests"
    start_ray(config)
    import ray

    said: list[str] = []
    with watching(config, said.append):
        start_document(document)
    yield Cluster(f"http://127.0.0.1:{port}", config, log, from_manifest, tuple(said))
    ray.shutdown()


def metrics() -> str:
    """What the session's Ray shows Prometheus."""
    import ray

    (node,) = ray.nodes()
    return requests.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=10).text


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Wait until a condition holds and return what it gave."""
    import time

    def wait(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            if value := condition():
                return value
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            time.sleep(0.1)

    return wait
