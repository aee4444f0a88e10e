"""Every setting has a test that shows its effect: the table names it. What no other test shows is shown here."""

import ast
import asyncio
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import torch
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from transformers import AutoTokenizer

from tests.unit.platform.exchanges import Exchange, Gateway, chat, message
from tests.unit.policies.test_memory_plan import GB, gpu, planned
from warmkv.config import AutoscalingConfig, Config, ControlConfig, ModelConfig, load
from warmkv.platform import application
from warmkv.platform.document import serve_document
from warmkv.platform.live_config_store import ClusterStore, FolderStore, store_of
from warmkv.policies import eviction
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.tiers import tiers_of
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.cores import threads_per_replica
from warmkv.replicas.loading.load import resolve_device, resolve_dtype
from warmkv.replicas.loading.tokenizer import load_tokenizer
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.cache.layout import layout
from warmkv.simulator.cluster.autoscaler import Scaling, decide
from warmkv.simulator.cluster.stores import Levels, Stores
from warmkv.simulator.steps.costs import StepKind
from warmkv.simulator.studies.replays.step_times import choose_cost

ROOT = Path(__file__).parents[2]

EFFECTS = {
    "tests/unit/test_settings_effects.py": {
        "test_the_model_goes_by_its_name": ["model.path", "model.served_name"],
        "test_a_revision_is_what_is_loaded": ["model.revision"],
        "test_a_device_and_a_type_are_those_of_the_weights": ["model.device", "model.dtype"],
        "test_a_plan_takes_its_share_of_the_memory": ["engine.memory_fraction"],
        "test_replicas_share_the_cores_unless_threads_are_set": ["engine.threads"],
        "test_blocks_leave_in_the_order_of_the_setting": ["prefix_cache.eviction"],
        "test_blocks_without_a_mark_live_as_long_as_the_default": ["prefix_cache.default_ttl"],
        "test_versions_lie_in_the_folder": ["control.path"],
        "test_a_gateway_refuses_by_its_limits": [
            "prefix_cache.max_breakpoints",
            "gateway.max_output_tokens",
        ],
        "test_an_answer_without_a_limit_has_the_default": ["gateway.default_output_tokens"],
        "test_the_service_is_where_the_settings_say": [
            "cluster.application",
            "gateway.host",
            "gateway.port",
            "gateway.route_prefix",
        ],
        "test_the_last_replicas_stay": ["cluster.autoscaling.min_replicas"],
        "test_steps_take_what_the_settings_say": [
            "simulator.step_a",
            "simulator.step_b",
            "simulator.step_c",
            "simulator.overhead_seconds",
        ],
        "test_blocks_come_from_disk_at_its_bandwidth": ["simulator.disk_bandwidth"],
    },
    "tests/unit/dashboards/test_publish.py": {
        "test_command_publishes": ["dashboards.grafana_url"],
    },
    "tests/unit/cli/test_price_command.py": {
        "test_the_articles_example": ["pricing.input"],
        "test_reads_that_save_nothing_never_pay": ["pricing.read"],
        "test_a_model_s_own_prices_are_used": ["pricing.models"],
    },
    "tests/unit/measuring/test_profiling.py": {"test_what_does_not_fit_in_memory_is_left_out": ["engine.kv_bytes"]},
    "tests/unit/platform/gateway/access/test_access.py": {
        "test_what_is_switched_off_for_everybody_is_refused_by_name": [
            "compression.allow_request_policy",
            "routing.allow_request_replica",
        ],
        "test_beyond_loopback_it_listens_with_tenants_or_where_that_was_asked_for": ["gateway.allow_open"],
        "test_options_of_a_request_are_rights_where_there_are_tenants": ["gateway.tenants", "gateway.rights"],
        "test_open_callers_are_no_operators": ["gateway.operators"],
    },
    "tests/unit/platform/gateway/access/test_browsers.py": {
        "test_a_preflight_needs_no_key_and_lets_the_origin_s_actions_through": ["control.allowed_origins"],
    },
    "tests/unit/platform/test_access_log.py": {
        "test_gateways_that_share_a_file_rotate_it_without_losing_a_line": [
            "gateway.access_log",
            "gateway.access_log_bytes",
        ],
    },
    "tests/unit/platform/gateway/apis/test_agents.py": {
        "test_the_billing_line_is_shown_where_the_setting_is_off": ["gateway.omit_billing_line"],
    },
    "tests/unit/platform/gateway/apis/test_contract.py": {
        "test_a_minimum_of_its_own": ["prefix_cache.min_tokens"],
        "test_an_operator_s_own_ttl_is_billed_and_expires": ["prefix_cache.ttls", "pricing.write"],
        "test_a_time_out_is_504_and_in_a_stream_an_event": ["gateway.request_timeout_seconds"],
    },
    "tests/unit/platform/whatif/test_replays.py": {
        "test_the_budget_that_is_known_to_be_best_is_first_where_quality_was_measured": ["control.whatif.quality"],
    },
    "tests/unit/platform/whatif/test_autopilot.py": {
        "test_the_settings_decide": [
            "control.autopilot.min_gain",
            "control.autopilot.max_model_error",
            "control.autopilot.settle_seconds",
        ],
    },
    "tests/unit/platform/test_directory.py": {
        "test_memory_is_bounded_and_what_is_left_out_is_counted": ["directory.max_blocks"],
        "test_the_limits_hold_for_all_shards_together": ["directory.shards"],
    },
    "tests/unit/platform/gateway/intake/test_intake.py": {
        "test_a_body_that_is_too_large_is_refused_by_its_header_unread": ["gateway.max_body_bytes"],
    },
    "tests/unit/platform/gateway/apis/test_fields.py": {
        "test_a_strict_gateway_refuses_what_nobody_knows": ["gateway.strict"],
        "test_other_names_of_the_model": ["gateway.models"],
    },
    "tests/unit/platform/gateway/access/test_limits.py": {
        "test_requests_a_minute": ["gateway.limits.requests_per_minute"],
        "test_tokens_a_minute_are_settled_by_what_was_used": ["gateway.limits.tokens_per_minute"],
        "test_requests_at_a_time_and_the_share_of_the_queue": [
            "gateway.limits.concurrent_requests",
            "gateway.limits.queue_share",
        ],
    },
    "tests/unit/platform/test_live_config_api.py": {
        "test_the_next_answer_is_under_the_new_policy_and_prices": ["compression.policy", "pricing.output"],
    },
    "tests/unit/platform/gateway/apis/test_tool_calls.py": {
        "test_a_named_response_template_reads_answers": ["model.response_template"],
    },
    "tests/unit/platform/gateway/apis/test_messages.py": {"test_a_full_queue_is_overloaded": ["engine.max_queue"]},
    "tests/unit/platform/gateway/intake/test_overload.py": {
        "test_a_gateway_takes_what_replicas_and_queues_hold": ["cluster.replicas"],
    },
    "tests/unit/platform/test_packs.py": {
        "test_the_tenants_of_a_pack_read_it_from_the_first_request_on": ["prefix_cache.packs"],
        "test_a_pack_that_does_not_fit_is_refused_with_the_reason": ["prefix_cache.block_size"],
        "test_packs_are_neither_evicted_nor_forgotten": ["prefix_cache.memory_bytes"],
        "test_a_pack_goes_to_host_memory_where_the_device_has_no_room": ["prefix_cache.host.memory_bytes"],
    },
    "tests/unit/platform/gateway/test_resume.py": {
        "test_a_replica_that_is_busy_with_others_gives_signs_of_life": ["engine.max_slots"],
        "test_after_so_many_retries_the_last_fault_is_raised": ["gateway.retries"],
        "test_silence_is_a_fault_after_a_while": ["gateway.stall_seconds"],
    },
    "tests/unit/platform/test_tenants_file.py": {"test_a_running_gateway_follows_the_file": ["gateway.tenants_file"]},
    "tests/unit/policies/test_routing.py": {
        "test_warmth_is_weighed_against_load": ["routing.load_weight"],
        "test_an_overloaded_replica_goes_last_however_warm": ["routing.overload"],
    },
    "tests/unit/policies/test_tiers.py": {
        "test_tiers_follow_the_settings": ["prefix_cache.disk.memory_bytes", "prefix_cache.disk.path"],
    },
    "tests/unit/policies/test_transfer.py": {
        "test_nobody_fetches_what_is_not_worth_it": ["routing.transfer"],
        "test_terms_follow_the_settings": ["transfer.byte_seconds"],
    },
    "tests/unit/replicas/block_store/test_disk.py": {
        "test_what_cannot_be_written_for_want_of_a_place_is_dropped": ["prefix_cache.moving_bytes"],
    },
    "tests/unit/replicas/test_device_memory.py": {
        "test_replicas_share_what_they_are_on": ["cluster.cpus_per_replica", "cluster.gpus_per_replica"],
    },
    "tests/unit/replicas/slots/test_forward.py": {
        "test_compiled_passes_draw_what_eager_ones_do_and_are_never_built_again": ["engine.compile"],
    },
    "tests/unit/replicas/engine/test_warm_up.py": {
        "test_a_start_ends_when_its_seconds_are_over": ["engine.compile_seconds"],
    },
    "tests/unit/replicas/engine/test_preemption.py": {
        "test_one_is_set_aside_after_a_while_within_the_limit_of_bytes_unless_that_is_off": [
            "engine.preempt_seconds",
            "engine.parked_bytes",
        ],
    },
    "tests/unit/replicas/test_prefix_tiers.py": {
        "test_a_store_in_fp8_on_the_device_holds_four_times_as_much": ["prefix_cache.storage"],
        "test_lossy_tiers_answer_with_nearly_the_same_logits": [
            "prefix_cache.host.storage",
            "prefix_cache.disk.storage",
        ],
        "test_one_tenant_cannot_evict_another_below_its_share": ["prefix_cache.tenant_share"],
    },
    "tests/unit/replicas/engines/test_ledger.py": {
        "test_a_live_mark_is_touched_when_others_have_filled_half_of_the_room": ["prefix_cache.keep_warm"],
    },
    "tests/unit/replicas/engines/test_kinds.py": {
        "test_a_group_has_the_settings_of_the_others_but_for_those_it_names": ["cluster.groups"],
        "test_the_kind_decides_which_engine_is_built": ["engine.kind"],
    },
    "tests/unit/replicas/engine/test_batch_invariant.py": {
        "test_every_product_has_the_same_rows": ["engine.batch_invariant"],
    },
    "tests/unit/replicas/loading/test_self_check.py": {"test_the_check_can_be_turned_off": ["engine.self_check"]},
    "tests/unit/simulator/cache/test_late_index.py": {
        "test_routers_send_elsewhere_what_they_do_not_know_to_be_warm": ["simulator.index_delay"],
    },
    "tests/unit/simulator/cache/test_replica_cache.py": {
        "test_only_marked_prefixes_are_kept_unless_automatic": ["prefix_cache.automatic"],
    },
    "tests/unit/simulator/cluster/test_autoscaling.py": {
        "test_a_cluster_grows_under_load_and_shrinks_after_it_by_hand": [
            "cluster.autoscaling.max_replicas",
            "cluster.autoscaling.target_ongoing_requests",
            "cluster.autoscaling.upscale_delay_seconds",
            "cluster.autoscaling.downscale_delay_seconds",
        ],
        "test_a_replica_that_is_stopped_ends_what_it_has_unless_that_takes_too_long": ["cluster.drain_seconds"],
    },
    "tests/unit/simulator/cluster/test_cluster.py": {
        "test_what_never_fits_is_refused": ["engine.max_context"],
        "test_the_replica_equals_an_obvious_one": ["engine.step_tokens"],
        "test_routing_by_prefix_or_session_finds_what_others_miss": ["routing.policy"],
    },
    "tests/unit/simulator/cluster/test_failures.py": {
        "test_a_request_that_had_not_begun_is_sent_again": ["simulator.failures"],
        "test_requests_wait_while_no_replica_is_there_and_as_many_as_may": [
            "simulator.startup_seconds",
            "cluster.max_queued_requests",
        ],
    },
    "tests/unit/simulator/cluster/test_gateways.py": {
        "test_gateways_that_do_not_know_of_each_other_load_a_replica_unevenly": ["cluster.gateways"],
    },
    "tests/unit/simulator/cluster/test_memory.py": {
        "test_a_model_has_what_its_gpu_has_room_for": ["simulator.model", "simulator.gpu"],
    },
    "tests/unit/simulator/cluster/test_reading.py": {
        "test_reading_from_host_memory_takes_its_bytes_at_the_bandwidth": ["simulator.host_bandwidth"],
    },
    "tests/unit/simulator/cluster/test_transfers.py": {},
    "tests/unit/simulator/engine/test_formations.py": {
        "test_a_short_prompt_waits_for_a_long_one_only_first_come_first_served": ["simulator.batching"],
    },
    "tests/unit/simulator/latency/test_profile.py": {
        "test_the_source_names_file_machine_and_error": ["simulator.profile"],
    },
    "tests/unit/simulator/reports/test_run_folder.py": {
        "test_the_slo_is_counted_as_it_is_set": ["simulator.slo.ttft", "simulator.slo.tpot"],
    },
    "tests/unit/simulator/studies/replays/test_replay.py": {
        "test_a_disabled_cache_bills_everything_as_input": ["prefix_cache.enabled"],
    },
}
"""Test that shows the effect, by file; a list or a mapping, such as gateway.tenants, is one setting."""


def leaves(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return a model's settings by their dotted names."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        ours = [kind for kind in sections if kind.__module__.startswith("warmkv.config")]
        if ours and get_origin(field.annotation) not in (tuple, dict):
            found |= leaves(ours[0], f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = field
    return found


def test_every_setting_has_a_test_that_shows_its_effect():
    shown = [setting for tests in EFFECTS.values() for settings in tests.values() for setting in settings]
    assert sorted(shown) == sorted(leaves(Config))


def test_settings_stay_few():
    """What no operator would set is a constant with a name, and what follows from others is derived."""
    assert len(leaves(Config)) <= 112


def test_every_setting_is_described():
    assert [name for name, field in leaves(Config).items() if not field.description] == []


@pytest.mark.parametrize("file", EFFECTS)
def test_the_tests_of_the_table_are_there_and_name_the_setting(file):
    text = (ROOT / file).read_text()
    functions = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert EFFECTS[file].keys() <= functions
    for settings in EFFECTS[file].values():
        for setting in settings:
            assert setting.rpartition(".")[2] in text


def settings(*flags: str) -> Config:
    return load(flags=flags, environ={})


def test_the_model_goes_by_its_name():
    assert settings("model.path=a/b").model.name == "b"
    assert settings("model.path=a/b", "model.served_name=c").model.name == "c"


def test_a_revision_is_what_is_loaded(monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path, **options: (path, options))
    assert load_tokenizer(ModelConfig(path="a/b", revision="v2")) == ("a/b", {"revision": "v2"})


def test_a_device_and_a_type_are_those_of_the_weights():
    model = settings("model.device=cuda:1", "model.dtype=float16").model
    assert resolve_device(model.device) == torch.device("cuda", 1)
    assert resolve_dtype(model.dtype, torch.device("cpu")) == torch.float16


def test_a_plan_takes_its_share_of_the_memory():
    half, most = (planned(gpu(80 * GB), engine={"memory_fraction": share}) for share in (0.5, 0.9))
    assert half.given.bytes * 9 == most.given.bytes * 5


def test_replicas_share_the_cores_unless_threads_are_set():
    assert threads_per_replica(settings("engine.threads=0"), 2, 8, {}) == 4
    assert threads_per_replica(settings("engine.threads=3"), 2, 8, {}) == 3


def test_blocks_leave_in_the_order_of_the_setting():
    for name, order in (("lru", eviction.lru), ("lfu", eviction.lfu), ("length", eviction.length)):
        config = settings(
            f"prefix_cache.eviction={name}", "prefix_cache.memory_bytes=1", "prefix_cache.host={memory_bytes: 1}"
        )
        assert [tier.order for tier in tiers_of(config.prefix_cache, kv_shape(config))] == [order, order]


def test_blocks_without_a_mark_live_as_long_as_the_default():
    assert Lifetimes.of(settings("prefix_cache.default_ttl=1h").prefix_cache).default == 3600


def test_versions_lie_in_the_folder(tmp_path):
    assert isinstance(store_of(ControlConfig(path=tmp_path)), FolderStore)
    assert isinstance(store_of(ControlConfig()), ClusterStore)


def marked(count: int) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}} for _ in range(count)]


def test_a_gateway_refuses_by_its_limits(tmp_path):
    flags = ("prefix_cache.max_breakpoints=2", "gateway.max_output_tokens=9", "gateway.strict=true")

    async def run() -> None:
        gateway = Gateway(tmp_path, *flags)
        for body, status in (
            (message(gateway, marked(2)), 200),
            (message(gateway, marked(3)), 400),
            (message(gateway, max_tokens=9), 200),
            (message(gateway, max_tokens=10), 400),
        ):
            assert (await Exchange(gateway, "/v1/messages", body).whole()).status == status

    asyncio.run(run())


def test_an_answer_without_a_limit_has_the_default(tmp_path):
    asked = []

    class Asked(Gateway):
        def answer(self, attempt):
            asked.append(attempt.request.sampling.max_tokens)
            return super().answer(attempt)

    async def run() -> None:
        gateway = Asked(tmp_path, "gateway.default_output_tokens=7")
        await Exchange(gateway, "/v1/chat/completions", chat(gateway)).whole()

    asyncio.run(run())
    assert asked == [7]


def test_the_service_is_where_the_settings_say():
    flags = ("cluster.application=a", "gateway.host=127.0.0.2", "gateway.port=81", "gateway.route_prefix=/b")
    document = serve_document(settings(*flags))
    (app,) = document["applications"]
    assert document["http_options"] == {"host": "127.0.0.2", "port": 81}
    assert (app["name"], app["route_prefix"]) == ("a", "/b")


def test_serve_s_health_checks_have_half_of_a_stall(monkeypatch):
    monkeypatch.setattr(application, "start_directory", lambda *_: [])
    monkeypatch.setattr(application, "start_control", lambda *_: None)
    monkeypatch.setattr(application, "start_whatif", lambda *_: None)
    bound: Any = application.build({"gateway": {"stall_seconds": 12}})
    config = bound._bound_deployment._deployment_config
    assert (config.health_check_timeout_s, config.health_check_period_s) == (6, 2)


def test_the_last_replicas_stay():
    idle = Scaling(3, -1, 0.0)
    for least in (1, 2):
        rule = AutoscalingConfig(min_replicas=least, max_replicas=3, downscale_delay_seconds=0)
        assert decide(idle, 0.0, rule, 1.0).target == least


@pytest.mark.parametrize("setting", ["step_a", "step_b", "step_c", "overhead_seconds"])
def test_steps_take_what_the_settings_say(setting):
    flags = [f"simulator.{each}={2 * (each == setting)}" for each in ("step_a", "step_b", "step_c", "overhead_seconds")]
    times, _ = choose_cost([], settings(*flags), lambda record: PolicySpec(), "config")
    cost = times.of(StepKind.of(PolicySpec())).decode
    expected = {"step_a": (2, 0), "step_b": (6, 0), "step_c": (10, 0), "overhead_seconds": (0, 2)}
    assert (cost.seconds(3, 5), times.overhead) == expected[setting]


def test_blocks_come_from_disk_at_its_bandwidth(tmp_path):
    seconds = []
    for rate in (1e6, 4e6):
        disk = f"prefix_cache.disk={{memory_bytes: 1MiB, path: {tmp_path}}}"
        config = settings("prefix_cache.memory_bytes=1", disk, f"simulator.disk_bandwidth={rate}")
        stores = Stores(
            config, Lifetimes.of(config.prefix_cache), kv_shape(config).token_bytes, 1, layout([]), Levels()
        )
        seconds.append(stores.tier_seconds[1])
    assert seconds[0] == pytest.approx(4 * seconds[1])


@pytest.mark.parametrize("setting", ["layers", "kv_heads", "head_dim", "dtype_bytes"])
def test_the_kv_of_a_token_has_its_shape(setting):
    before = getattr(settings().simulator.model, setting)
    more = kv_shape(settings(f"simulator.model.{setting}={3 * before}"))
    assert more.token_bytes == 3 * kv_shape(settings()).token_bytes
