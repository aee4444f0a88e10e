"""The rendered manifests on a Ray cluster that runs as its pods would: their documents, as they are, and an upgrade."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import yaml

from tests.clients import anthropic_client, openai_client
from tests.faults.load import QUESTIONS, Load, Reply, ask
from tests.faults.network import Network
from tests.faults.nodes import GATEWAY, redis
from tests.faults.pods import PodCluster
from tests.polling import until
from tests.unit.k8s.manifests import Manifests, overlay
from warmkv.config import parse
from warmkv.platform.document import serve_document
from warmkv.platform.tenants import hash_key

pytestmark = [pytest.mark.faults, pytest.mark.soak, pytest.mark.timeout(1800)]

TENANTS = sorted({question.key for question in QUESTIONS})
SECRETS = {
    "warmkv-salt": {"salt": "salt of the tests"},
    "warmkv-tenants": {
        "tenants.yaml": yaml.safe_dump(
            {
                "tenants": [
                    {"name": f"t{number}", "key_sha256": hash_key(key), "rights": ["policy", "replica", "ignore_eos"]}
                    for number, key in enumerate(TENANTS)
                ]
            }
        )
    },
}


def without_a_gpu(manifests: Manifests) -> dict[str, Any]:
    """Return the document with the shipped model, on CPUs, and nothing else changed."""
    settings = manifests.config.model_dump(mode="json", exclude_defaults=True)
    del settings["model"]
    del settings["cluster"]["gpus_per_replica"]
    return serve_document(parse(settings))


@pytest.fixture(scope="module")
def pods(network: Network | None) -> Iterator[PodCluster]:
    """Yield the demo's head and a worker with the CPUs of both of its pods; volumes and variables are those of
    single-gpu, which has all of the demo's.
    """
    if network is None:
        pytest.skip("this machine does not let us make network namespaces: pods would share their ports")
    demo, single = overlay("demo"), overlay("single-gpu")
    maps = {one["metadata"]["name"]: one["data"] for one in single.kind("ConfigMap")}
    with ExitStack() as stack:
        stack.enter_context(network.entered("head"))
        store = stack.enter_context(redis(network.join("head")))
        state = (
            {"RAY_REDIS_ADDRESS": store, "RAY_external_storage_namespace": "pods"} if store else {}
        )  # as with gcs-ft
        cluster = PodCluster(state, network, groups=single.groups, known=SECRETS, config_maps=maps)
        stack.callback(cluster.stop)
        try:
            cluster.start_pod("head", "head")
        except AssertionError as error:
            if "mount:" in str(error) or "unshare:" in str(error):
                pytest.skip(f"this machine does not let us mount a read-only root: {error}")
            raise
        (group,) = demo.workers
        cpus = group["replicas"] * int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
        cluster.start_pod("worker", "replicas", **{"num-cpus": f"{cpus}"})
        yield cluster


def running(cluster: PodCluster) -> bool:
    """Whether KubeRay would call the service ready."""
    applications = cluster.status().values()
    assert all(one["status"] != "DEPLOY_FAILED" for one in applications), applications
    return bool(applications) and all(one["status"] == "RUNNING" for one in applications)


def learn(url: str) -> dict[tuple[int, str], Reply]:
    """Return answers of the service as long as nothing happens to it."""
    replies = {question.number: ask(url, question) for question in QUESTIONS}
    return {(number, reply.policy): reply for number, reply in replies.items()}


def check(load: Load) -> None:
    """No request was lost, none got a wrong answer."""
    assert not load.wrong(), load.wrong()[0]
    for streams in (True, False):
        assert not load.failed(streams=streams), load.failed(streams=streams)[0]


def test_the_root_of_a_pod_is_read_only(pods: PodCluster) -> None:
    def can_write(path: str) -> bool:
        return subprocess.run([*pods.within("worker"), "touch", path], capture_output=True).returncode == 0

    assert [can_write(f"{folder}/probe") for folder in ("/tmp", "/dev/shm", "/var/cache/huggingface")] == [True] * 3
    assert not any(can_write(f"{folder}/probe") for folder in ("", "/etc", "/etc/warmkv/config", "/root", "/var/cache"))


def test_documents_are_deployed_as_rendered_and_an_upgrade_loses_no_request(pods: PodCluster) -> None:
    document = overlay("demo").document
    pods.deploy(document)
    until(lambda: running(pods), "the demo runs")
    url = f"http://{pods.nodes['worker'].address}:{document['http_options']['port']}"
    messages = [{"role": "user", "content": "def main():"}]
    greedy = {"model": "tiny", "max_tokens": 8, "extra_body": {"temperature": 0}}  # or the first token may be the last
    said = anthropic_client(url, TENANTS[0]).messages.create(messages=messages, **greedy)
    chat = openai_client(url, TENANTS[0]).chat.completions.create(messages=messages, **greedy)
    assert said.content[0].text
    assert chat.choices[0].message.content
    expected = learn(url)
    upgraded = without_a_gpu(overlay("single-gpu"))
    with Load(url, expected) as load:
        load.wait(lambda seen: len(seen) >= len(QUESTIONS), "answers before the upgrade")
        pods.deploy(upgraded)
        until(lambda: pods.status()["warmkv"]["status"] != "RUNNING", "the upgrade begins")
        until(lambda: running(pods), "the upgrade is through")
        load.wait(lambda seen: len(seen) >= len(QUESTIONS), "answers after the upgrade")
    check(load)
    with pytest.raises(Exception, match="401"):
        anthropic_client(url, "nobody's").messages.create(model="tiny", max_tokens=8, messages=messages)


def test_the_head_is_replaced_and_no_request_is_lost(pods: PodCluster) -> None:
    """Its state is in Redis, and clients are connected to the worker, as the service for clients connects them."""
    if "RAY_REDIS_ADDRESS" not in pods.settings:
        pytest.skip("redis-server is not installed: without it, what the head knew dies with it")
    document = without_a_gpu(overlay("single-gpu"))
    pods.deploy(document)
    until(lambda: running(pods), "the service runs")
    url = f"http://{pods.nodes['worker'].address}:{document['http_options']['port']}"
    with Load(url, learn(url)) as load:
        load.wait(lambda seen: len(seen) >= len(QUESTIONS), "answers before the head goes")
        assert not pods.nodes["head"].find(GATEWAY)
        pods.remove("head")
        load.wait(lambda seen: len(seen) >= len(QUESTIONS), "answers without a head")
        pods.start_pod("head", "head")
        until(lambda: running(pods), "the new head knows the service")
        load.wait(lambda seen: len(seen) >= len(QUESTIONS), "answers with a new head")
    check(load)
