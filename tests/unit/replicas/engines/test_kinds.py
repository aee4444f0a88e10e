"""The kinds of engines: which is built, and what is refused by name where one lacks it."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import warmkv
from tests.unit.platform.exchanges import Exchange, Gateway, message
from warmkv.config import ConfigError, parse
from warmkv.config.engine import NOT_OF_VLLM
from warmkv.platform import live_config
from warmkv.replicas.engines import build_engine, own, vllm_engine
from warmkv.replicas.engines.interface import Parts, Place


@pytest.mark.parametrize(("kind", "module"), [("warmkv", own), ("vllm", vllm_engine)])
def test_the_kind_decides_which_engine_is_built(kind, module, monkeypatch):
    monkeypatch.setattr(module, "build", lambda *arguments: arguments)
    config = parse({"engine": {"kind": kind}})
    assert build_engine(config, *"abcd") == (config, *"abcd")


OTHERS = {
    "engine.preempt_seconds": 3,
    "engine.parked_bytes": "1MiB",
    "engine.compile_seconds": 3,
    "engine.batch_invariant": True,
    "prefix_cache.eviction": "lfu",
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


def test_keeping_warm_is_refused_by_warmkv_s_own_engine_and_above_half_of_vllm_s_cache(monkeypatch):
    with pytest.raises(ConfigError, match=r"prefix_cache\.keep_warm cannot be had from an engine of kind warmkv"):
        parse({"prefix_cache": {"keep_warm": "1MiB"}})
    model = SimpleNamespace(device=None, sizes=None, max_context=64, token_bytes=10)
    llm = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=100)), shutdown=list)
    plan = SimpleNamespace(summary="", to_json=dict)
    watcher = SimpleNamespace(kill=list, communicate=list)
    for name, made in (
        ("read_model", model),
        ("plan_memory", (plan, "")),
        ("start_llm", llm),
        ("children_end_with_this_process", watcher),
        ("settled", None),
    ):
        monkeypatch.setattr(vllm_engine, name, lambda *arguments, made=made: made)

    def build(keep_warm: int) -> Parts:
        config = parse({"engine": {"kind": "vllm"}, "prefix_cache": {"keep_warm": keep_warm, "block_size": 32}})
        return vllm_engine.build(config, None, Place("r", 1, 1.0), lambda *_: None, lambda what: None)

    with pytest.raises(ConfigError, match=r"keep_warm must not exceed half of vLLM's cache, which has 32000 bytes"):
        build(16_001)


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


def test_vllm_s_cache_is_in_one_format_which_is_what_it_serves():
    fp8 = {"engine": {"kind": "vllm"}, "prefix_cache": {"storage": "fp8"}}
    with pytest.raises(ConfigError, match=r"compression\.policy: full cannot be had .* which serves full"):
        parse(fp8)
    config = parse({**fp8, "compression": {"policy": "full+fp8"}})
    assert config.capabilities[""].policies == ("full+fp8",)
    with pytest.raises(ConfigError, match=r"prefix_cache\.storage: kivi4 cannot be had from an engine of kind vllm"):
        parse({**fp8, "prefix_cache": {"storage": "kivi4"}})
    group = {"cluster": {"groups": {"small": fp8}}, "compression": {"policy": "snapkv@0.2"}}
    assert parse(group).capabilities["small"].policies == ("full+fp8",)
    group["cluster"]["groups"]["small"] = {**fp8, "prefix_cache": {"storage": "kivi4"}}
    with pytest.raises(ConfigError, match=r"groups\.small.*: prefix_cache\.storage: kivi4 cannot be had"):
        parse(group)


BOTH = {"engine": {"max_slots": 4}, "cluster": {"groups": {"vllm": {"engine": {"kind": "vllm"}}}}}


def test_a_group_has_the_settings_of_the_others_but_for_those_it_names():
    config = parse({**BOTH, "prefix_cache": {"block_size": 32}, "compression": {"policy": "snapkv@0.2"}})
    own, vllm = config.groups().values()
    assert (own.engine.kind, vllm.engine.kind, vllm.engine.max_slots) == ("warmkv", "vllm", 4)
    assert vllm.prefix_cache.block_size == 32
    assert (config.most_replicas, config.first_replicas) == (2, 2)
    assert parse(config.model_dump(mode="json")).groups() == config.groups()


@pytest.mark.parametrize("setting", NOT_OF_VLLM)
def test_a_group_of_vllm_inherits_nothing_that_vllm_lacks(setting):
    section, name = setting.split(".")
    own, vllm = parse({**BOTH, section: {name: OTHERS[setting]}}).groups().values()
    default = getattr(getattr(parse({}), section), name)
    assert getattr(getattr(own, section), name) != default
    assert getattr(getattr(vllm, section), name) == default


def test_a_group_of_warmkv_s_own_engine_keeps_nothing_warm_beside_vllm():
    groups = {"own": {"engine": {"kind": "warmkv"}}, "more": {}}
    settings = {"engine": {"kind": "vllm"}, "prefix_cache": {"keep_warm": 8}, "cluster": {"groups": groups}}
    assert [group.prefix_cache.keep_warm for group in parse(settings).groups().values()] == [8, 0, 8]
    groups["own"]["prefix_cache"] = {"keep_warm": 8}
    with pytest.raises(ConfigError, match=r"own: prefix_cache\.keep_warm cannot be had from an engine of kind warmkv"):
        parse(settings)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (
            {"engine": {"knd": "vllm"}},
            r"cluster\.groups\.other\.engine\.knd cannot differ; known: batch_invariant, compile",
        ),
        ({"prefix_cache": {"block_size": 32}}, r"other\.prefix_cache\.block_size cannot differ"),
        ({"gateway": {}}, r"other\.gateway: write the settings of cluster, engine"),
        ({"engine": {"kind": ["vllm"]}}, r"cluster\.groups\.other\.engine\.kind: Input should be 'warmkv' or 'vllm'"),
        ({"engine": {"max_slots": 0}}, r"cluster\.groups\.other\.engine\.max_slots: Input should be greater"),
        ({"engine": {"kind": "vllm"}, "prefix_cache": {"eviction": "lfu"}}, r"other: prefix_cache\.eviction cannot be"),
    ],
)
def test_what_is_wrong_with_a_group_is_told_with_its_place(group, message):
    with pytest.raises(ConfigError, match=message):
        parse({"cluster": {"groups": {"other": group}}})
    with pytest.raises(ConfigError, match="has small letters"):
        parse({"cluster": {"groups": {"An Other": {}}}})


def test_the_default_policy_must_be_served_by_one_group():
    both = {"engine": {"kind": "vllm"}, "compression": {"policy": "snapkv@0.2"}}
    with pytest.raises(
        ConfigError, match=r"compression\.policy: snapkv@0\.2 cannot be had from an engine of kind vllm"
    ):
        parse({**both, "cluster": {"groups": {"more": {"cluster": {"replicas": 2}}}}})
    parse({**both, "cluster": {"groups": {"own": {"engine": {"kind": "warmkv"}}}}})


def test_a_service_of_two_kinds_serves_what_one_of_them_can_and_says_which(tmp_path: Path):
    async def scenario() -> None:
        gateway = Gateway(tmp_path, "engine.kind=vllm", "cluster.groups={own: {engine: {kind: warmkv}}}")
        for policy in ("full", "snapkv@0.2"):
            served = await Exchange(gateway, "/v1/messages", message(gateway, warmkv={"policy": policy})).whole()
            assert served.status == 200
        listed = await Exchange(gateway, "/v1/models", b"", method="GET").whole()
        groups = {"replica": {"engine": "vllm", "policies": ["full"]}, "replica-own": {"engine": "warmkv"}}
        assert [model["warmkv"] for model in listed.json["data"]] == [{"groups": groups}]

    asyncio.run(scenario())


def test_gateway_router_and_simulator_know_no_kinds_of_engines():
    """They go by capabilities."""
    package = Path(warmkv.__file__).parent
    folders = ("platform", "policies", "prefixes", "simulator/cluster", "simulator/studies")
    sources = [path for folder in folders for path in (package / folder).rglob("*.py")]
    assert len(sources) > 100
    said = re.compile(r"""engine\.kind\b|EngineKind|== ["']vllm["']""")
    assert [str(path) for path in sources if said.search(path.read_text())] == []
