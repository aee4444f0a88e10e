import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from warmkv.config import Config, ConfigError, EngineConfig, load, parse, removed, strict_yaml
from warmkv.config.removed import MOVED, REMOVED
from warmkv.policy_spec import PolicySpec

KEY = "a" * 64  # a hash, which YAML does not take for a number


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "warmkv.yaml"


def test_defaults_need_no_file():
    assert load(environ={}) == Config()


def test_file_then_environment_then_flags(file):
    file.write_text("engine: {max_slots: 2, step_tokens: 8, max_queue: 3}\n")
    environ = {"WARMKV_ENGINE__MAX_SLOTS": "4", "WARMKV_ENGINE__STEP_TOKENS": "64", "WARMKV_SALT": "not a setting"}
    engine = load(file, flags=["engine.max_slots=32"], environ=environ).engine
    assert (engine.max_slots, engine.step_tokens, engine.max_queue) == (32, 64, 3)


def test_a_step_has_a_token_for_every_sequence_and_auto_follows_the_device():
    with pytest.raises(ConfigError, match="write auto, or a whole number from 1 on; got 'many'"):
        load(flags=["engine.step_tokens=many"], environ={})
    few, many = EngineConfig(), EngineConfig(max_slots=3000)
    assert [few.tokens_per_step(on_gpu=gpu) for gpu in (False, True)] == [1024, 2048]
    assert many.tokens_per_step(on_gpu=False) == 3000
    assert EngineConfig(step_tokens=20).tokens_per_step(on_gpu=True) == 20
    assert EngineConfig(step_tokens=8, max_slots=9).tokens_per_step(on_gpu=True) == 9


def test_the_served_model_has_its_own_prices():
    flags = ["model.path=a/big", "pricing.models={big: {input: 9}, other: {input: 8}}"]
    assert (load(flags=flags, environ={}).prices.input, load(environ={}).prices.input) == (9, 3)


def test_the_last_flag_wins():
    assert load(flags=["cluster.replicas=2", "cluster.replicas=3"], environ={}).cluster.replicas == 3


def test_values_are_yaml():
    config = load(
        flags=[
            "engine.kv_bytes=2GiB",
            "prefix_cache.enabled=false",
            "compression.policy=snapkv@0.2",
            "model.path=a/b/",
        ],
        environ={"WARMKV_PREFIX_CACHE__TTLS": "{5m: 60}"},
    )
    assert config.engine.kv_bytes == 2 << 30
    assert config.prefix_cache.enabled is False
    assert config.prefix_cache.ttls == {"5m": 60.0}
    assert config.compression.policy == PolicySpec(name="snapkv", budget=0.2)
    assert config.model.name == "b"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gateway:\n  port: 1\ngateway:\n  strict: true\n", r"'gateway' is there twice, first in line 1.*line 3"),
        ("gateway: {port: 1, port: 2}\n", "'port' is there twice"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(file, text, says):
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.compile(says, re.DOTALL)):
        load(file, environ={})
    with pytest.raises(ConfigError, match="is there twice"):
        load(flags=["gateway={port: 1, port: 2}"], environ={})


def test_what_is_merged_from_an_anchor_may_be_written_again(file):
    file.write_text("gateway: {limits: &limits {requests_per_minute: 1}, tenants: []}\nengine: {max_slots: 3}\n")
    assert load(file, environ={}).gateway.limits.requests_per_minute == 1
    merged = strict_yaml.load("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n")
    assert merged == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}


@pytest.mark.parametrize("choice", ["auto", "on", "off"])
def test_on_and_off_are_what_they_say_though_yaml_reads_truth_values(file, choice):
    assert load(flags=[f"engine.compile={choice}"], environ={}).engine.compile == choice
    file.write_text(f"engine: {{compile: {choice}}}\n")
    assert load(file, environ={}).engine.compile == choice


def test_an_empty_file_and_empty_sections_are_defaults(file):
    file.write_text("")
    assert load(file, environ={}) == Config()
    file.write_text("engine:\n")
    assert load(file, flags=["engine.max_slots=3"], environ={}).engine.max_slots == 3


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("engine.max_slot=3", r"engine\.max_slot: unknown key; did you mean 'max_slots'\?"),
        ("engin.max_slots=3", r"engin: unknown key; did you mean 'engine'\?"),
        ("compression.policy.windw=3", r"compression\.policy\.windw: unknown key; did you mean 'window'\?"),
        ("cluster.xyzzy=3", r"cluster\.xyzzy: unknown key; known: .*cpus_per_replica"),
        ("gateway.tenants=[{nam: a}]", r"gateway\.tenants\.0\.nam: unknown key; did you mean 'name'\?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(flag, message):
    with pytest.raises(ConfigError, match=message):
        load(flags=[flag], environ={})


def test_an_unknown_variable_of_ours_is_refused():
    with pytest.raises(ConfigError, match=r"engine\.max_slot: unknown key"):
        load(environ={"WARMKV_ENGINE__MAX_SLOT": "3"})


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("engine.max_slots", "write it as section.key=value"),
        ("engine.max_slots={", "is not a YAML value"),
        ("engine.max_slots=0", r"engine\.max_slots: .*greater than or equal to 1"),
        ("engine.max_slots=many", r"engine\.max_slots: .*valid integer"),
        ("engine=3", "engine: "),
        ("engine.max_slots.more=3", r"engine\.max_slots: .*valid integer"),
        ("compression.policy=snapkv@lots", "write NAME@TOKENS or NAME@SHARE"),
        ("compression.policy=magic", r"compression\.policy\.name: "),
        ("compression.policy=snapkv@1.5", r"a share must be in \(0, 1\]"),
        ("compression.policy=snapkv@0", "at least 2"),
        ("compression.policy=streaming_llm@4", "leaves no recent token beside 4 sinks"),
        ("compression.policy=snapkv@0.2:kernel=4", "kernel must be odd"),
        ("prefix_cache.default_ttl=2h", "default_ttl '2h' is not one of ttls: 5m, 1h"),
        ("prefix_cache.ttls={5m: 0}", "every TTL must be positive"),
        ("prefix_cache.ttls={5m: 1, 2h: 3}", "no multiplier for the TTL '2h'"),
        ("prefix_cache.eviction=fifo", r"prefix_cache\.eviction: .*'lru', 'lfu', 'length' or 'cost'"),
        ("prefix_cache.storage=turbo4", r"prefix_cache\.storage: "),
        ("prefix_cache.disk.memory_bytes=1GiB", "a disk tier needs both path and memory_bytes"),
        ("prefix_cache.disk.path=blocks", "a disk tier needs both path and memory_bytes"),
        ("prefix_cache.tenant_share=1.5", r"prefix_cache\.tenant_share: .*less than or equal to 1"),
        ("prefix_cache.moving_bytes=-1", r"prefix_cache\.moving_bytes: "),
        ("routing.policy=random", r"routing\.policy: .*'round_robin'"),
        ("routing.load_weight=-1", r"routing\.load_weight: .*greater than or equal to 0"),
        ("routing.load_weight=.inf", r"routing\.load_weight: .*finite"),
        ("routing.transfer=sometimes", r"routing\.transfer"),
        ("transfer.byte_seconds=.inf", r"transfer\.byte_seconds: .*finite"),
        ("cluster.drain_seconds=-1", r"cluster\.drain_seconds: .*greater than or equal to 0"),
        ("cluster.autoscaling={}", r"cluster\.autoscaling\.max_replicas: .*required"),
        ("cluster.autoscaling={max_replicas: 2, min_replicas: 0}", r"min_replicas: .*greater than or equal to 1"),
        (
            "cluster.autoscaling={max_replicas: 4, min_replicas: 2}",
            "replicas must lie between autoscaling.min_replicas",
        ),
        ("cluster={replicas: 3, autoscaling: {max_replicas: 2}}", "replicas must lie between"),
        ("cluster.autoscaling={max_replicas: 2, target_ongoing_requests: 0}", r"target_ongoing_requests: .*than 0"),
        ("cluster.autoscaling={max_replicas: 2, upscale_delay_seconds: -1}", r"upscale_delay_seconds: .*equal to 0"),
        (
            "cluster.autoscaling={max_replicas: 2, downscale_delay_seconds: -1}",
            r"downscale_delay_seconds: .*equal to 0",
        ),
        ("directory.shards=0", r"directory\.shards: .*greater than or equal to 1"),
        ("directory.shards=257", r"directory\.shards: .*less than or equal to 256"),
        ("pricing.write={5m: 1.25}", "no multiplier for the TTL '1h'"),
        ("pricing.input=-1", r"pricing\.input: .*greater than or equal to 0"),
        ("pricing.write={5m: -1, 1h: 2}", r"pricing\.write\.5m: .*greater than or equal to 0"),
        ("pricing.read=.inf", r"pricing\.read: .*finite"),
        ("pricing.models={big: {read: -1}}", r"pricing\.models\.big\.read: .*greater than or equal to 0"),
        ("pricing.models={big: {raed: 1}}", r"pricing\.models\.big\.raed: unknown key"),
        ("gateway.tenants=[{name: a, key_sha256: b}]", r"gateway\.tenants\.0\.key_sha256: "),
        ("gateway.tenants=[{name: a}]", r"gateway\.tenants\.0: a has no key: set key_sha256, or keys"),
        (
            f"gateway.tenants=[{{name: a, key_sha256: {KEY}}}, {{name: b, keys: [{{sha256: {KEY}}}]}}]",
            "tenant a and of",
        ),
        (f"gateway.operators=[{{name: a, key_sha256: {KEY}, rights: []}}]", r"operators\.0\.rights: unknown key"),
        ("gateway.rights=[everything]", r"gateway\.rights\.0: .*'policy', 'replica' or 'ignore_eos'"),
        ("gateway.limits.requests_per_minute=-1", r"requests_per_minute: .*greater than or equal to 0"),
        ("gateway.limits.tokens_per_minute=-1", r"tokens_per_minute: .*greater than or equal to 0"),
        ("gateway.limits.concurrent_requests=-1", r"concurrent_requests: .*greater than or equal to 0"),
        ("gateway.limits.queue_share=0", r"gateway\.limits\.queue_share: .*greater than 0"),
        ("prefix_cache.ttls={5m: .nan}", "every TTL must be positive and finite"),
        ("prefix_cache.ttls={5m: .inf}", "every TTL must be positive and finite"),
        ("gateway.retries=-1", r"gateway\.retries: .*greater than or equal to 0"),
        ("gateway.stall_seconds=0", r"gateway\.stall_seconds: .*greater than 0"),
    ],
)
def test_what_cannot_be_used_is_refused(flag, message):
    with pytest.raises(ConfigError, match=message):
        load(flags=[flag], environ={})


def test_serve_sends_a_replica_what_it_takes():
    assert parse({}).ongoing_requests == 16 + 64
    assert parse({"engine": {"max_slots": 100, "max_queue": 28}}).ongoing_requests == 128


def test_there_are_never_more_replicas_than_autoscaling_allows():
    assert parse({"cluster": {"replicas": 3}}).cluster.most_replicas == 3
    assert parse({"cluster": {"replicas": 3, "autoscaling": {"max_replicas": 5}}}).cluster.most_replicas == 5


def test_a_fault_names_its_source(file):
    file.write_text("engine:\n  max_slots: 0\n  max_queue: 0\n  step_tokens: 0\ngateway:\n  tenants:\n  - nam: a\n")
    environ = {"WARMKV_ENGINE__MAX_QUEUE": "-1", "WARMKV_CLUSTR__REPLICAS": "2"}
    with pytest.raises(ConfigError) as caught:
        load(file, flags=["engine.step_tokens=-1", "prefix_cache.default_ttl=2h"], environ=environ)
    sources = dict(re.fullmatch(r"(\S+): .* \((.*)\)", line).groups() for line in str(caught.value).splitlines())
    assert sources == {
        "engine.max_slots": f"{file}, line 2",
        "engine.max_queue": "WARMKV_ENGINE__MAX_QUEUE",
        "engine.step_tokens": "--set engine.step_tokens",
        "gateway.tenants.0.name": f"{file}, line 7",
        "gateway.tenants.0.nam": f"{file}, line 7",
        "prefix_cache": "--set prefix_cache.default_ttl",
        "clustr": "WARMKV_CLUSTR__REPLICAS",
    }


def test_a_mapping_that_is_set_as_a_whole_takes_the_place_of_the_other(file):
    file.write_text("prefix_cache: {ttls: {5m: 10, 1h: 20}, min_tokens: 5}\npricing: {write: {5m: 1, 1h: 2, 1d: 3}}\n")
    environ = {"WARMKV_PREFIX_CACHE__TTLS": "{5m: 30}"}
    assert load(file, environ=environ).prefix_cache.ttls == {"5m": 30}
    assert load(file, environ=environ).prefix_cache.min_tokens == 5
    assert load(file, flags=["prefix_cache.ttls.1d=40"], environ=environ).prefix_cache.ttls == {"5m": 30, "1d": 40}


@pytest.mark.parametrize("key", REMOVED)
def test_a_key_that_is_no_setting_any_more_is_ignored_with_one_warning(file, caplog, key):
    removed._warn.cache_clear()
    section, *below = key.split(".")
    file.write_text(f"{section}: {'{'}{': {'.join(below)}: 3{'}' * len(below)}\n")
    assert load(file, environ={}) == load(flags=[f"{key}=3"], environ={}) == Config()
    assert load(file, environ={}) == Config()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        f"{key} is no setting any more: {REMOVED[key]} ({source})" for source in (f"{file}, line 1", f"--set {key}")
    ]


@pytest.mark.parametrize("key", MOVED)
def test_a_value_at_its_old_key_is_read_at_the_new_one_with_a_warning(file, caplog, key):
    removed._warn.cache_clear()
    section, *below = key.split(".")
    file.write_text(f"{section}: {'{'}{': {'.join(below)}: 1{'}' * len(below)}\n")
    assert load(file, environ={}) == load(flags=[f"{MOVED[key]}=1"], environ={}) != Config()
    assert caplog.messages == [f"{key} is no setting any more: it is {MOVED[key]} ({file}, line 1)"]


def test_a_moved_value_lies_beside_a_name_that_is_written_alone():
    old = ["simulator.gpu=L4", "simulator.roofline.flops_efficiency=0.5"]
    assert load(flags=old, environ={}) == load(flags=["simulator.gpu={name: L4, flops_efficiency: 0.5}"], environ={})


def test_every_fault_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        load(flags=["engine.max_slots=0", "cluster.replica=2"], environ={})
    assert len(str(caught.value).splitlines()) == 2


def test_a_knob_does_not_erase_a_policy_in_short_form(file):
    file.write_text("compression: {policy: snapkv@0.2}\n")
    with pytest.raises(ConfigError, match=r"compression\.policy is already 'snapkv@0\.2'"):
        load(file, flags=["compression.policy.window=16"], environ={})
    file.write_text("compression: {policy: {name: snapkv, budget: 0.2}}\n")
    policy = load(file, flags=["compression.policy.window=16"], environ={}).compression.policy
    assert (policy.name, policy.budget, policy.window) == ("snapkv", 0.2, 16)


def test_files_that_cannot_be_read(file):
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        load(file, environ={})
    for content, message in [
        ("a: [", "is not YAML"),
        ("- 1", "expected a mapping"),
        ("1: {}", "expected a mapping"),
        (b"\xff\xfe\x00", "not"),
    ]:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ConfigError, match=message):
            load(file, environ={})


def test_the_tree_is_frozen_and_written_as_it_is_read():
    config = Config()
    with pytest.raises(ValidationError):
        config.engine.max_slots = 3
    assert parse(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("short", ["full", "snapkv@0.2", "snapkv@1024", "streaming_llm@0.05", "snapkv@1e-05"])
def test_a_policy_label_reads_back(short):
    spec = PolicySpec.model_validate(short)
    assert PolicySpec.model_validate(spec.label) == spec
