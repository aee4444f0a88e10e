"""One service with replicas of both engines: a request goes where its policy is served (`make test-vllm`).

vLLM's replica is two processes, each with half of the heads: tensor parallel, on the CPU.
"""

from __future__ import annotations

from pathlib import Path

import anthropic
import pytest
import ray
import requests

from tests.e2e.conftest import GPUS, application
from tests.e2e.test_parity import AT_ONCE
from tests.polling import PATIENCE, until
from warmkv.simulator.studies.replays.replay import run
from warmkv.simulator.studies.replays.variants import Variant
from warmkv.simulator.studies.replays.verify import verify
from warmkv.simulator.workload import access_log

pytest.importorskip("vllm", reason="make test-vllm")
pytestmark = pytest.mark.cluster

TEXT = "The council met in the hall at noon. Its minutes name five members. " * 12
OTHER = TEXT.replace("council", "board")
VLLM = {
    "engine": {"kind": "vllm", "kv_bytes": "64MiB"},
    "prefix_cache": {"memory_bytes": "64MiB"},
    "cluster": {"gpus_per_replica": GPUS},
}


def test_policies_go_to_the_replicas_that_serve_them_and_both_answer_alike(cluster, tmp_path: Path):
    groups = {"replicas": 1, "groups": {"vllm": VLLM}, "drain_seconds": 1}
    with application(
        cluster,
        "kinds",
        cluster={**groups, "application": "kinds", "cpus_per_replica": 0},
        gateway={"access_log": str(tmp_path / "access.jsonl")},
    ) as service:
        until(lambda: len(service.replicas()) == 2, "both replicas serve")
        kinds = {name: known["group"] for name, known in service.replicas().items()}
        own, vllm = (next(name for name, group in kinds.items() if group == wanted) for wanted in ("", "vllm"))

        (placed,) = ray.util.placement_group_table().values()  # vLLM's GPUs are on one node
        assert (placed["strategy"], placed["bundles"]) == ("STRICT_PACK", {0: {"GPU": GPUS}})

        models = requests.get(f"{service.url}/v1/models", timeout=PATIENCE).json()["data"]
        groups = {"replica": {"engine": "warmkv"}, "replica-vllm": {"engine": "vllm", "policies": ["full"]}}
        assert models[0]["warmkv"] == {"groups": groups}

        full = {
            name: service.ask(TEXT, max_tokens=12, policy="full", replica=name) for name in (own, vllm)
        }  # cold in both
        for name, message in full.items():
            assert message.usage.warmkv["replica"] == name
            assert message.usage.cache_creation_input_tokens > 64
        assert full[own].content[0].text == full[vllm].content[0].text
        assert full[own].usage.cache_creation_input_tokens == full[vllm].usage.cache_creation_input_tokens

        compressed = service.ask(TEXT, policy="snapkv@0.3", replica=vllm)  # which cannot: so the name does not count
        assert compressed.usage.warmkv["replica"] == own
        assert compressed.usage.cache_read_input_tokens == full[own].usage.cache_creation_input_tokens
        with pytest.raises(anthropic.APIStatusError):
            service.ask(TEXT, policy="no_such_policy")

        for policy in ("snapkv@0.3", "full"):  # the second is warm where the first had to go
            assert service.ask(OTHER, policy=policy).usage.warmkv["replica"] == own
        records = until(
            lambda: len(found := access_log.read(tmp_path / "access.jsonl").requests) == 5 and found, "all are logged"
        )
        assert [record.group for record in records] == ["", "vllm", "", "", ""]
        config = service.config
    verdict = verify(records, config, AT_ONCE)
    assert (verdict.refused, verdict.equal_hits, verdict.hit_error, verdict.equal_bills) == (0, 1, 0, 1)
    replayed = run(records, config, Variant(), AT_ONCE).jobs
    assert [job.replica for job in list(replayed)[2:]] == ["replica-0"] * 3
