"""One Ray cluster for the session, started from the demo overlay's rendered manifest where kubectl is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import requests
import yaml

from tests.clients import anthropic_client, openai_client
from tests.polling import PATIENCE
from warmkv.config import Config, parse
from warmkv.platform.document import serve_document
from warmkv.platform.local import free_port, start_document, start_ray, watching
from warmkv.platform.operator_key import with_operator

ROOT = Path(__file__).parents[2]
OVERLAY = ROOT / "k8s" / "overlays" / "demo"
OPERATOR = {"x-api-key": "operator of the tests"}  # headers
GRAFANA = "http://grafana.example.org:3000"  # where dashboards are seen
ENVIRONMENT = {
    "WARMKV_SALT": "salt of the tests",
    # A replica that takes longer to say how long its queue is, is passed over, even if a request names it.
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "10",
    "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "10",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",  # each turn costs processor time, of which the tests have little
    "RAY_metrics_report_interval_ms": "2000",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}


@dataclass(frozen=True)
class Cluster:
    """The service on a real Ray with two replicas, and the file its access log goes to."""

    url: str
    config: Config
    access_log: Path
    from_manifest: bool
    said: tuple[str, ...]  # while it started

    def anthropic(self, key: str) -> anthropic.Anthropic:
        return anthropic_client(self.url, key)

    def openai(self, key: str) -> openai.OpenAI:
        return openai_client(self.url, key)

    def replicas(self) -> dict[str, Any]:
        answer = requests.get(f"{self.url}/v1/warmkv/replicas", headers=OPERATOR, timeout=PATIENCE)
        found: dict[str, Any] = answer.json()["replicas"]
        return found

    def change(self, method: str = "PUT", path: str = "", **body: Any) -> Any:
        """Change the policy in force, or roll it back."""
        url = f"{self.url}/v1/warmkv/policy{path}"
        answer = requests.request(method, url, json={"why": "test", **body}, headers=OPERATOR, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @contextmanager
    def changed(self, changes: Mapping[str, Any]) -> Iterator[None]:
        """Have changes in force meanwhile; afterwards the service is as it was started."""
        try:
            self.change(changes=changes)
            yield
        finally:
            self.change("POST", "/rollback", to=0)


def rendered_document() -> dict[str, Any]:
    """Return the Serve document inside the demo overlay's rendered RayService."""
    rendered = subprocess.run(["kubectl", "kustomize", str(OVERLAY)], capture_output=True, text=True, check=True).stdout
    services = [item for item in yaml.safe_load_all(rendered) if item["kind"] == "RayService"]
    document: dict[str, Any] = yaml.safe_load(services[0]["spec"]["serveConfigV2"])
    return document


ENGINES: dict[str, dict[str, dict[str, Any]]] = {
    "warmkv": {"engine": {"threads": 1}},
    "vllm": {
        "engine": {"kind": "vllm", "threads": 1, "kv_bytes": "256MiB"},
        "prefix_cache": {"memory_bytes": "256MiB"},  # one pool with the other
    },
}
"""Settings of the service by `--engine`."""

GPUS = 2
"""That Ray gives out on the node of vLLM's tests, so that it places replicas by them. They compute on CPUs."""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Yield a service started from the document that Kubernetes would start; address, threads and log are ours."""
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
    for section, settings in ENGINES[request.config.getoption("engine")].items():
        args.setdefault(section, {}).update(settings)
    args.setdefault("control", {}).update(allowed_origins=[GRAFANA])
    document["http_options"] = {"host": "127.0.0.1", "port": port}
    config = parse(args)
    config = config.model_copy(update={"gateway": with_operator(config.gateway, OPERATOR["x-api-key"])})
    application["args"] = config.model_dump(mode="json", exclude_defaults=True)
    os.environ.update(ENVIRONMENT)
    if config.engine.kind == "vllm":
        os.environ["RAY_OVERRIDE_RESOURCES"] = json.dumps({"GPU": GPUS})
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
    return requests.get(
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=PATIENCE
    ).text


@dataclass(frozen=True)
class Application:
    """Another application on the session's Ray, with settings of its own."""

    name: str
    url: str
    config: Config

    def ask(self, text: str, question: str = "?", **options: Any) -> Any:
        """Ask for a message; `text` ends in a breakpoint."""
        marked = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        return anthropic_client(self.url, "any").messages.create(
            model=self.config.model.name,
            max_tokens=options.pop("max_tokens", 6),
            messages=[{"role": "user", "content": [marked, {"type": "text", "text": question}]}],
            extra_body={"temperature": 0, "warmkv": {"seed": 1, **options}},
        )

    def replicas(self) -> dict[str, Any]:
        answer = requests.get(f"{self.url}/v1/warmkv/replicas", headers=OPERATOR, timeout=PATIENCE)
        found = answer.json()["replicas"]
        return {name: known for name, known in found.items() if "phase" not in known}

    def running(self) -> int:
        from ray import serve

        states = serve.status().applications[self.name].deployments["replica"].replica_states
        return states.get("RUNNING", 0) if set(states) <= {"RUNNING"} else 0


@contextmanager
def application(session: Cluster, name: str, **sections: dict[str, Any]) -> Iterator[Application]:
    """Deploy an application beside the session's, and delete it at the end: cheaper than a Ray of its own."""
    from ray import serve

    port = session.config.gateway.port
    own = {
        "cluster": {"application": name, "cpus_per_replica": 0},
        "gateway": {"host": "127.0.0.1", "port": port, "route_prefix": f"/{name}"},
        "engine": {"threads": 1},
    }
    config = parse({part: {**own.get(part, {}), **sections.get(part, {})} for part in own.keys() | sections.keys()})
    config = config.model_copy(update={"gateway": with_operator(config.gateway, OPERATOR["x-api-key"])})
    start_document(serve_document(config))
    try:
        yield Application(name, f"http://127.0.0.1:{port}/{name}", config)
    finally:
        serve.delete(name)
