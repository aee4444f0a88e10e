"""`warmkv observe`: the service under steady traffic, a Prometheus that scrapes it, and Grafana if it is installed."""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import yaml

from warmkv.config import Config, TenantConfig
from warmkv.config.tenants import TenantLimits
from warmkv.dashboards import alerts, build
from warmkv.faults import UserError
from warmkv.models.tiny import corpus
from warmkv.platform.local import free_port, metrics_addresses, running
from warmkv.platform.tenants import hash_key

HOST = "127.0.0.1"
SCRAPE_SECONDS = 5
READY_SECONDS = 60.0
STOP_SECONDS = 10.0
TENANTS = {"support": "messages", "research": "chat/completions", "nightly": "messages"}  # and the API of each
LIMITS = {"nightly": {"requests_per_minute": 36}}  # which it exceeds now and then
POLICIES = ("full", "full", "snapkv@0.2", "streaming_llm@0.4")
SETTINGS = (
    "gateway.port=0",
    "cluster.replicas=2",
    "prefix_cache.memory_bytes=128MiB",  # less than is asked about
    "prefix_cache.host.memory_bytes=32MiB",
    "prefix_cache.ttls={30s: 30, 5m: 300, 1h: 3600}",
    "prefix_cache.default_ttl=30s",  # shorter than the time between two questions about most documents
    "pricing.write={30s: 1.1, 5m: 1.25, 1h: 2.0}",
)
"""Under which a what-if finds something better: a longer TTL, which an operator can apply, and more memory."""
DOCUMENTS = 24  # that a tenant asks about again and again, the n-th a n-th as often as the first
DOCUMENT_CHARACTERS = 5000
ANSWER_TOKENS = 12
COLD_SHARE = 0.1  # of the requests, with a text that nobody asked about before
TURN_SHARE = 0.3  # that go on with a conversation
TURNS = 5


class ObserveError(UserError):
    """A program is missing, or did not start."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Where everything is, until it is stopped."""

    service: str
    operator_key: str = field(repr=False)
    prometheus: str
    grafana: str | None  # None: it is not installed


@contextmanager
def observing(config: Config, rate: float, seed: int) -> Iterator[Observed]:
    """Run service, traffic of `rate` requests a second, Prometheus and Grafana; end them all afterwards.

    Raises ObserveError, and what `running` raises.
    """
    binary = prometheus_binary()
    keys = {name: secrets.token_urlsafe(16) for name in TENANTS}
    grafana_port = free_port(HOST)
    config = observable(config, keys, f"http://{HOST}:{grafana_port}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmkv-observe-")))
        service = stack.enter_context(running(config))
        prometheus = stack.enter_context(scraping(binary, folder / "prometheus", metrics_addresses(), SCRAPE_SECONDS))
        grafana = stack.enter_context(
            showing(folder / "grafana", grafana_port, prometheus, service.url, service.operator_key)
        )
        stack.enter_context(traffic(service.url, config.model.name, keys, rate, seed))
        yield Observed(service.url, service.operator_key, prometheus, grafana)


def observable(config: Config, keys: Mapping[str, str], origin: str) -> Config:
    """Return the settings with tenants of these keys, a what-if service, and Grafana's origin allowed."""
    tenants = [
        TenantConfig(
            name=name,
            key_sha256=hash_key(key),
            rights=("policy",),
            limits=TenantLimits.model_validate(LIMITS.get(name, {})),
        )
        for name, key in keys.items()
    ]
    sections: dict[str, dict[str, Any]] = {
        "gateway": {"tenants": [tenant.model_dump(mode="json", exclude_unset=True) for tenant in tenants]},
        "control": {"whatif": {}, "allowed_origins": [origin]},
    }
    document = config.model_dump(mode="json", exclude_defaults=True)
    for section, settings in sections.items():
        document[section] = {**document.get(section, {}), **settings}
    return Config.model_validate(document)


# --- Prometheus and Grafana


def prometheus_binary() -> str:
    """Return Prometheus's program. Raises ObserveError if it is not installed."""
    if (found := shutil.which("prometheus")) is None:
        raise ObserveError("prometheus is not installed: `apt-get install prometheus`, or get it from prometheus.io")
    return found


@contextmanager
def scraping(binary: str, folder: Path, targets: Sequence[str], seconds: int) -> Iterator[str]:
    """Run a Prometheus that scrapes the targets and knows the alerts; its address. Its data are lost at the end."""
    folder.mkdir(parents=True)
    rules, settings = folder / "alerts.yaml", folder / "prometheus.yaml"
    rules.write_text(yaml.safe_dump(alerts.groups()), encoding="utf-8")
    interval = f"{seconds}s"
    document = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "ray", "static_configs": [{"targets": list(targets)}]}],
    }
    settings.write_text(yaml.safe_dump(document), encoding="utf-8")
    address = f"{HOST}:{free_port(HOST)}"
    command = [
        binary,
        f"--config.file={settings}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with child(command, f"http://{address}/-/ready", folder / "log"):
        yield f"http://{address}"


@contextmanager
def showing(folder: Path, port: int, prometheus: str, gateway: str, operator_key: str) -> Iterator[str | None]:
    """Run Grafana with data sources and dashboards, open to whoever reaches this machine's loopback; its address.

    None where it is not installed. Tables need its Infinity data source, which is a plugin.
    """
    if (binary := shutil.which("grafana")) is None:
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    provision(folder, prometheus, gateway, operator_key)
    home = next(
        (
            place
            for place in (Path(binary).resolve().parents[1], Path("/usr/share/grafana"))
            if (place / "conf").is_dir()
        ),
        Path("/usr/share/grafana"),
    )
    environment = {
        "GF_PATHS_DATA": str(folder / "data"),
        "GF_PATHS_LOGS": str(folder / "logs"),
        "GF_PATHS_PROVISIONING": str(folder / "provisioning"),
        "GF_SERVER_HTTP_ADDR": HOST,
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Admin",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
    }
    url = f"http://{HOST}:{port}"
    with child([binary, "server", "--homepath", str(home)], f"{url}/api/health", folder / "log", environment):
        yield url


def provision(folder: Path, prometheus: str, gateway: str, operator_key: str) -> None:
    """Write data sources and dashboards for a Grafana that reads them from files."""
    from warmkv.dashboards import publish

    target = publish.Target("", "", prometheus=prometheus, gateway=gateway, key=operator_key)
    boards, files = folder / "dashboards", folder / "provisioning"
    provider = {"name": "warmkv", "folder": "warmkv", "type": "file", "options": {"path": str(boards)}}
    for name, document in (
        ("datasources", {"apiVersion": 1, "datasources": publish.sources(target)}),
        ("dashboards", {"apiVersion": 1, "providers": [provider]}),
    ):
        path = files / name / "warmkv.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        path.chmod(0o600)  # the operator's key is in it
    boards.mkdir()
    for name, board in build.documents().items():
        shown = {**publish.opening(board, target), "time": {"from": "now-15m", "to": "now"}}
        (boards / f"{name}.json").write_text(json.dumps(shown), encoding="utf-8")


@contextmanager
def child(
    command: Sequence[str], ready: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a program in a session of its own, so that Ctrl-C comes to us alone. Raises ObserveError if it ends early."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not _answers(ready):
            if process.poll() is not None or time.monotonic() > deadline:
                lines = log.read_text(errors="replace").splitlines()[-5:]
                raise ObserveError("\n".join([f"{command[0]} did not start:", *lines]))
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=2).ok
    except requests.RequestException:
        return False


# --- traffic


@dataclass(slots=True)
class Client:
    """A tenant that asks about a few documents, goes on with conversations, and sometimes brings something new."""

    url: str
    model: str
    key: str
    random: random.Random
    texts: Sequence[str]
    api: str = "messages"
    outcomes: Counter[int] = field(default_factory=Counter)  # by status; 0: no answer
    _history: list[dict[str, Any]] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """Return the next request."""
        draw, question = self.random.random(), f"Question {self.random.randrange(10**6)}?"
        if draw < TURN_SHARE and self._history and len(self._history) < 2 * TURNS:
            self._history.append({"role": "user", "content": question})
        else:
            fresh = draw > 1 - COLD_SHARE
            often = [1 / rank for rank in range(1, len(self.texts) + 1)]
            text = excerpt(self.random) if fresh else self.random.choices(self.texts, often)[0]
            document = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
            self._history = [{"role": "user", "content": [document, {"type": "text", "text": question}]}]
        return {
            "model": self.model,
            "max_tokens": ANSWER_TOKENS,
            "messages": list(self._history),
            "warmkv": {"policy": self.random.choice(POLICIES)},
        }

    def ask(self) -> None:
        """Send the next request and wait for the answer."""
        try:
            sent = requests.post(
                f"{self.url}/v1/{self.api}", json=self.body(), headers={"x-api-key": self.key}, timeout=READY_SECONDS
            )
        except requests.RequestException:
            self.outcomes[0] += 1
            self._history = []
            return
        self.outcomes[sent.status_code] += 1
        if sent.ok:
            self._history.append({"role": "assistant", "content": self._answer(sent.json()) or "-"})
        else:
            self._history = []

    def _answer(self, answer: Any) -> str:
        message = answer if self.api == "messages" else answer["choices"][0]["message"]
        content = message["content"]
        return str(content if isinstance(content, str) else content[0]["text"])


def excerpt(draw: random.Random) -> str:
    """Return a part of a source file that the small model has not seen."""
    text = draw.choice(corpus.texts("heldout"))
    at = draw.randrange(max(1, len(text) - DOCUMENT_CHARACTERS))
    return text[at : at + DOCUMENT_CHARACTERS] or "-"


@contextmanager
def traffic(url: str, model: str, keys: Mapping[str, str], rate: float, seed: int) -> Iterator[list[Client]]:
    """Send `rate` requests a second meanwhile, as they come by a Poisson process, from a thread for each tenant."""
    stop, clients, threads = threading.Event(), [], []
    for number, (name, key) in enumerate(keys.items()):
        draw = random.Random(f"{seed} {number}")
        texts = [excerpt(draw) for _ in range(DOCUMENTS)]
        client = Client(url, model, key, draw, texts, TENANTS.get(name, "messages"))
        clients.append(client)

        def run(client: Client = client) -> None:
            while not stop.wait(client.random.expovariate(rate / len(keys))):
                client.ask()

        threads.append(threading.Thread(target=run, name=f"traffic {number}", daemon=True))
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        stop.set()
        for thread in threads:
            thread.join()
