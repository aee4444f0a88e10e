"""The kinds of engines: which is built, and what is refused by name where one lacks it."""

import asyncio
from pathlib import Path

import pytest

from tests.unit.platform.exchanges import Exchange, Gateway, message
from warmkv.config import ConfigError, parse
from warmkv.config.engine import NOT_OF_VLLM
from warmkv.platform import live_config
from warmkv.replicas.engines import build_engine, own, vllm_engine


@pytest.mark.parametrize(("kind", "module"), [("warmkv", own), ("vllm", vllm_engine)])
def test_the_kind_decides_which_engine_is_built(kind, module, monkeypatch):
    monkeypatch.setattr(module, "build", lambda *arguments: arguments)
    config = parse({"engine": {"kind": kind}})
    assert build_engine(config, *"abcd") == (config, *"abcd")


OTHERS = {
    "engine.preempt_seconds": 3,
    "engine.parked_bytes": "1MiB",
    "prefix_cache.eviction": "lfu",
    "prefix_cache.storage": "fp8",
    "prefix_cache.host": {"memory_bytes": "1MiB"},
    "prefix_cache.disk": {"memory_bytes": "1MiB", "path": "/somewhere"},
    "prefix_cache.moving_bytes": "1MiB",
    "prefix_cache.tenant_share": 0.5,
    "prefix_cache.packs": ["/somewhere"],
}


@pytest.mark.parametrize("setting", NOT_OF_VLLM)
def test_what_vllm_lacks_is_refused_by_its_setting(setting):
    section, name = setting.split(".")
    settings = {section: {name: OTHERS[setting]}}
    parse(settings)
    with pytest.raises(ConfigError, match=f"{setting} cannot be had from an engine of kind vllm"):
        parse({**settings, "engine": {**settings.get("engine", {}), "kind": "vllm"}})


def test_a_policy_that_vllm_lacks_cannot_be_put_in_force():
    with pytest.raises(
        ConfigError, match=r"compression\.policy: snapkv@0\.2 cannot be had from an engine of kind vllm"
    ):
        parse({"engine": {"kind": "vllm"}, "compression": {"policy": "snapkv@0.2"}})
    config = parse({"engine": {"kind": "vllm"}})
    with pytest.raises(ConfigError, match="which serves full"):
        live_config.changed(config, {"compression.policy": "snapkv@0.2"})


def test_a_request_s_policy_that_no_engine_has_is_refused_and_the_models_tell_which_there_are(tmp_path: Path):
    async def scenario() -> None:
        gateway = Gateway(tmp_path, "engine.kind=vllm")
        refused = await Exchange(gateway, "/v1/messages", message(gateway, warmkv={"policy": "snapkv@0.2"})).whole()
        assert refused.status == 400
        assert b"warmkv.policy: snapkv@0.2 cannot be had from an engine of kind vllm, which serves full" in refused.body
        served = await Exchange(gateway, "/v1/messages", message(gateway, warmkv={"policy": "full"})).whole()
        assert served.status == 200
        listed = await Exchange(gateway, "/v1/models", b"", method="GET").whole()
        assert [model["warmkv"] for model in listed.json["data"]] == [{"engine": "vllm", "policies": ["full"]}]

    asyncio.run(scenario())
