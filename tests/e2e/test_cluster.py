"""The whole service on a real Ray: two replicas, real HTTP, the real SDKs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.conftest import OPERATOR, metrics
from tests.polling import PATIENCE, until
from warmkv import telemetry
from warmkv.model_shape import ModelShape, config_file
from warmkv.platform.kubernetes import memory
from warmkv.platform.named_actors import NAMESPACE
from warmkv.platform.prefix_directory import directory_name
from warmkv.policies.dispatcher import KEPT_SECONDS
from warmkv.policies.memory_plan import DeviceMemory
from warmkv.policies.pricing import price
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.studies.plans import sizing
from warmkv.simulator.workload import source

pytestmark = pytest.mark.cluster

TEXT = "class Window:\n    def __init__(self, size):\n        self.size = size\n" * 30


def ask(cluster: Any, content: Any, key: str, **options: Any) -> Any:
    warmkv = {"seed": 1, **options.pop("warmkv", {})}
    return cluster.anthropic(key).messages.create(
        model=cluster.config.model.name,
        max_tokens=options.pop("max_tokens", 6),
        messages=[{"role": "user", "content": content}],
        extra_body={"temperature": 0, "warmkv": warmkv},
        **options,
    )


def logged_lines(cluster: Any, ids: list[str]) -> list[str]:
    """Return the access log's lines of these requests, once all are there; other tests' may be of other settings."""

    def lines() -> list[str]:
        found = cluster.access_log.read_text().splitlines(keepends=True)
        return [line for line in found if json.loads(line)["id"] in ids]

    until(lambda: len(lines()) == len(ids), "every request is logged")
    return lines()


def marked(text: str, question: str) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": question},
    ]


def decoding(cluster: Any) -> int:
    return sum(replica["decoding"] for replica in cluster.replicas().values())


def test_the_running_document_is_the_manifests(cluster):
    if not cluster.from_manifest:
        pytest.skip("kubectl is not installed: the service was started from the overlay's settings instead")
    assert cluster.config.cluster.replicas == 2
    assert len(cluster.replicas()) == 2


def test_both_clients_get_the_same_answer_whole_and_streamed(cluster):
    whole = ask(cluster, "def main():", "same", max_tokens=12)
    with cluster.anthropic("same").messages.stream(
        model=cluster.config.model.name,
        max_tokens=12,
        messages=[{"role": "user", "content": "def main():"}],
        extra_body={"temperature": 0},
    ) as stream:
        streamed = stream.get_final_message()
    chat = cluster.openai("same").chat.completions.create(
        model=cluster.config.model.name,
        max_tokens=12,
        temperature=0,
        messages=[{"role": "user", "content": "def main():"}],
    )
    text = whole.content[0].text
    assert text == streamed.content[0].text == chat.choices[0].message.content


def test_the_next_request_lands_where_its_prefix_is_warm(cluster):
    for number in range(4):
        key = f"sticky {number}"
        before = {name: replica["blocks"] for name, replica in cluster.replicas().items()}
        first = ask(cluster, marked(TEXT + str(number), "one?"), key).usage
        home = first.warmkv["replica"]
        known = before[home]
        until(
            lambda home=home, known=known: cluster.replicas()[home]["blocks"] > known,
            "the directory hears of the blocks",
        )
        time.sleep(KEPT_SECONDS)  # in which the router hears of them, too
        for question in ("two?", "three?"):
            usage = ask(cluster, marked(TEXT + str(number), question), key).usage
            assert usage.warmkv["replica"] == home
            assert usage.cache_read_input_tokens == first.cache_creation_input_tokens


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_replicas_get_as_much_of_the_processor_as_other_processes(cluster):
    """Ray would start its workers at niceness 15."""
    found = [nice for name, nice in descendants(os.getpid()) if name.startswith("ray::ServeReplica")]
    assert found
    assert set(found) == {os.nice(0)}


def descendants(root: int) -> Iterator[tuple[str, int]]:
    """Yield command line and niceness of a process's children, their children and so on."""
    children: dict[int, list[tuple[int, str, int]]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            name = (folder / "cmdline").read_text()
            children.setdefault(int(fields[1]), []).append((int(folder.name), name, int(fields[16])))
    waiting = [root]
    for parent in waiting:
        for child, name, nice in children.get(parent, []):
            waiting.append(child)
            yield name, nice


def test_a_named_replica_is_preferred_and_gives_the_same_answer(cluster):
    answers = {}
    for name in cluster.replicas():
        message = ask(cluster, marked(TEXT, "What is the size?"), f"named {name}", warmkv={"replica": name})
        assert message.usage.warmkv["replica"] == name
        assert message.usage.cache_read_input_tokens == 0
        answers[name] = [block.text for block in message.content]
    assert len(answers) == 2
    assert len({tuple(texts) for texts in answers.values()}) == 1


def test_load_spreads_over_the_replicas(cluster):
    """Requests that share nothing, sent at once, must not herd onto one replica."""
    barrier = threading.Barrier(8)

    def one(number: int) -> str:
        barrier.wait()
        return ask(cluster, f"{number} {TEXT}", f"herd {number}", max_tokens=100).usage.warmkv["replica"]

    with ThreadPoolExecutor(8) as pool:
        used = list(pool.map(one, range(8)))
    assert min(used.count(name) for name in cluster.replicas()) >= 2


@pytest.mark.own_engine  # for its policy; tests/vllm cancels in vLLM
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(cluster, stream):
    body = {
        "model": cluster.config.model.name,
        "prompt": "def f(",
        "max_tokens": 8192,  # so many that it still decodes when its replica reports that it does
        "stream": stream,
        "warmkv": {"ignore_eos": True, "policy": "streaming_llm@64"},
    }
    leaving = http.client.HTTPConnection("127.0.0.1", cluster.config.gateway.port, timeout=PATIENCE)
    leaving.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    until(lambda: decoding(cluster) == 1, "the request decodes")
    leaving.close()
    until(lambda: decoding(cluster) == 0, "its slot is free")


def test_the_directory_comes_back_whole_after_it_was_killed(cluster):
    import ray

    earlier = {name: replica["blocks"] for name, replica in cluster.replicas().items()}
    home = ask(cluster, marked(TEXT + "kept", "one?"), "killed").usage.warmkv["replica"]
    before = until(
        lambda: {
            name: r["blocks"] for name, r in cluster.replicas().items() if name == home and r["blocks"] > earlier[home]
        },
        "the directory knows the blocks",
    )
    time.sleep(KEPT_SECONDS)  # in which the router hears of them, too
    ray.kill(ray.get_actor(directory_name("warmkv"), namespace=NAMESPACE), no_restart=False)
    during = ask(cluster, marked(TEXT + "kept", "two?"), "killed").usage  # routing goes on from the router's copy
    assert during.warmkv["replica"] == home
    assert during.cache_read_input_tokens > 0

    def restored() -> bool:
        try:
            found = cluster.replicas()
            return len(found) == cluster.config.cluster.replicas and found[home]["blocks"] >= before[home]
        except (KeyError, requests.RequestException):
            return False

    until(restored, "the replicas have sent their snapshots")


def test_the_access_log_has_a_line_for_every_request(cluster):
    message = ask(cluster, marked(TEXT + "logged", "?"), "logged")
    name = message.id.replace("msg_", "req_")

    def find() -> RequestRecord | None:
        lines = cluster.access_log.read_text().splitlines()
        return next((r for line in lines if (r := RequestRecord.from_json(line)).id == name), None)

    record = until(find, "the line is written")
    assert record.usage.total_written == message.usage.cache_creation_input_tokens
    assert record.resident_bytes == message.usage.warmkv["resident_bytes"]
    assert "logged" not in cluster.access_log.read_text()


def test_a_request_can_be_followed_from_the_gateway_to_its_replica(cluster):
    """Its id and its trace are in the header, in the access log and in the logs of both actors; an error's as well."""
    import ray

    def logged(deployment: str) -> str:
        folder = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"
        return "".join(file.read_text() for file in folder.glob(f"replica_warmkv_{deployment}_*.log"))

    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"x-api-key": "followed", "traceparent": f"00-{trace}-00f067aa0ba902b7-01", "x-request-id": "client-9"}
    body = {"model": cluster.config.model.name, "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
    url = f"{cluster.url}/v1/messages"
    answer = requests.post(url, json=body, headers=headers, timeout=PATIENCE)
    name, own = answer.headers["request-id"], answer.headers["traceparent"].split("-")[2]
    told = f"request={name} client=client-9 trace={trace} span={own}"
    until(lambda: told in logged("replica"), "the replica's log names the request")
    until(lambda: f'"id":"{name}"' in cluster.access_log.read_text(), "the access log names it")
    wrong = requests.post(url, json={**body, "max_tokens": -1}, headers=headers, timeout=PATIENCE)
    assert wrong.json()["request_id"] == wrong.headers["request-id"]
    until(lambda: f"request={wrong.headers['request-id']}" in logged("gateway"), "the gateway's log names it")
    assert "Hello" not in logged("replica") + logged("gateway")


def test_ready_while_replicas_take_requests(cluster):
    ready = requests.get(f"{cluster.url}/readyz", timeout=PATIENCE)
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "replicas": cluster.config.cluster.replicas})


def test_the_log_of_the_live_run_can_be_replayed(cluster, tmp_path):
    from typer.testing import CliRunner

    from warmkv.cli import app

    ids = [ask(cluster, marked(TEXT + "replayed", q), "replayed")._request_id for q in ("one?", "two?")]
    (tmp_path / "log.jsonl").write_text("".join(logged_lines(cluster, ids)))
    out = tmp_path / "result.json"
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "log.jsonl"), "--json", str(out)])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    assert rows


@pytest.mark.own_engine
def test_a_plan_predicts_memory_and_bill_of_the_demo(cluster, tmp_path):
    """From its settings, the model's config.json and the access log, within a tenth of what it reports."""
    ids = [ask(cluster, marked(TEXT + "planned", f"{n}?"), "planned")._request_id for n in range(6)]
    (tmp_path / "log.jsonl").write_text("".join(logged_lines(cluster, ids)))
    config = cluster.config
    trace = source.read(source.Source(tmp_path / "log.jsonl"), config)
    planned = sizing.evaluator(trace, config, lambda flags: config, {})({})
    usages = [record.usage for record in trace.requests.records]
    assert planned["dollars"] == pytest.approx(sum(price(usage, config.prices).total for usage in usages), rel=0.1)
    assert planned["read_tokens"] == pytest.approx(sum(usage.read for usage in usages), rel=0.1) != 0

    said = requests.get(f"{cluster.url}/v1/warmkv/memory", headers=OPERATOR, timeout=PATIENCE).json()["replicas"]
    assert len(said) == config.cluster.replicas
    tiny = ModelShape.model_validate(str(config_file("tiny")))
    for replica in said.values():
        plan, share = replica["plan"], 1 / config.cluster.replicas
        total = round(plan["given"]["bytes"] / share / config.engine.memory_fraction)
        kind: Any = "machine" if "machine" in plan["device"] else "group"
        predicted = memory.plan_replica(config, tiny, DeviceMemory(kind, plan["device"], total, total, share))
        of = {line.name: line.bytes for line in predicted.lines}
        assert of == pytest.approx({line["name"]: line["bytes"] for line in plan["lines"]}, rel=0.1)
        assert of["weights"] == pytest.approx(replica["weight_bytes"], rel=0.1)


@pytest.mark.own_engine  # which alone compresses
def test_metrics_are_exported_for_prometheus(cluster):
    ask(cluster, marked(TEXT + "measured", "?"), "measured", max_tokens=4)
    recorded = set(telemetry.ALL) - set(telemetry.TRANSFER)  # of these test_transfer has some to count
    recorded -= set(telemetry.WHATIF)  # test_whatif has an application with them
    recorded -= {telemetry.RETRIED, telemetry.REJECTED, telemetry.DROPPED_LINES}  # nothing fails or is full here
    recorded -= {
        telemetry.PREEMPTED,
        telemetry.TOUCHED,  # over vLLM alone
        telemetry.FAILED,
        telemetry.EVICTED_BLOCKS,
        telemetry.EXPIRED_BLOCKS,
        telemetry.LOST_BLOCKS,
        telemetry.BLOCK_LIFETIME,
        telemetry.BLOCK_IDLE,
        telemetry.TENANTS_READ,
        telemetry.TENANTS_REFUSED,
        telemetry.LIVE_CONFIG_CHANGE,  # test_control changes something
    }
    assert requests.get(f"{cluster.url}/nothing", timeout=PATIENCE).status_code == 404  # an error to count
    until(lambda: all(metric.exported in metrics() for metric in recorded), "every metric is exported")


@pytest.mark.own_engine
def test_replicas_say_what_they_do_until_they_serve(cluster):
    phases = ("loading the model", "comparing logits", "computing")  # which of them last until somebody asks, depends
    assert any(f"replica(s) {phase}" in said for said in cluster.said for phase in phases)
