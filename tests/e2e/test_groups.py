"""One service with replicas of both engines: a request goes where its policy is served (`make test-vllm`)."""

from __future__ import annotations

import anthropic
import pytest
import requests

from tests.e2e.conftest import application
from tests.polling import PATIENCE, until

pytest.importorskip("vllm", reason="make test-vllm")
pytestmark = pytest.mark.cluster

TEXT = "The council met in the hall at noon. Its minutes name five members. " * 12
VLLM = {"engine": {"kind": "vllm", "kv_bytes": "64MiB"}, "prefix_cache": {"memory_bytes": "64MiB"}}


def test_policies_go_to_the_replicas_that_serve_them_and_both_answer_alike(cluster):
    groups = {"replicas": 1, "groups": {"vllm": VLLM}, "drain_seconds": 1}
    with application(cluster, "kinds", cluster={**groups, "application": "kinds", "cpus_per_replica": 0}) as service:
        until(lambda: len(service.replicas()) == 2, "both replicas serve")
        kinds = {name: known["group"] for name, known in service.replicas().items()}
        own, vllm = (next(name for name, group in kinds.items() if group == wanted) for wanted in ("", "vllm"))

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
