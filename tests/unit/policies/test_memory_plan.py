"""The memory plan: its lines add up, what is explicit stands, what is auto shares the rest, what cannot fit is told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmkv.config import EngineConfig, PrefixCacheConfig
from warmkv.config.engine import GPU_STEP_TOKENS
from warmkv.policies.compression.softmax import LOGITS_AT_ONCE
from warmkv.policies.memory_plan import (
    CUDA_CONTEXT_BYTES,
    MOST_RECORDED,
    RECORDED_LAYER_BYTES,
    SCORING_BYTES,
    DeviceMemory,
    MemoryPlanError,
    ModelSizes,
    attention_bytes,
    check_weights,
    plan,
)
from warmkv.policies.slot_sizes import KVShape, slot_bytes, workspace_bytes
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.slots.row_tables import padded_batch

GB, GIB = 10**9, 1 << 30
LLAMA_8B = ModelSizes(16_060_522_496, KVShape(32, 8, 128, 2, 32), 4096, 14336, 128_256)
TINY = ModelSizes(30_000_000, KVShape(6, 2, 32, 4, 8), 256, 688, 4096)


def gpu(size, share=1.0):
    return DeviceMemory("gpu", "a GPU", size, size, share, CUDA_CONTEXT_BYTES)


def machine(free, share=1.0, total=64 * GIB):
    return DeviceMemory("machine", "this machine", free, total, share)


def group(limit, share=1.0):
    return DeviceMemory("group", "the control group", limit, limit, share)


def planned(memory, sizes=LLAMA_8B, context=131_072, engine=None, cache=None, **more):
    return plan(memory, sizes, EngineConfig(**engine or {}), PrefixCacheConfig(**cache or {}), context, **more)


def bytes_of(found):
    return {line.name: line.bytes for line in found.lines}


def test_an_8b_model_on_80_gb_takes_prompts_of_its_whole_context():
    found = planned(gpu(80 * GB), attention_token_bytes=2_048)  # of flash attention, as measured at the start
    found.check()
    for tokens in (100_000, 130_000):
        full = PolicySpec()
        needed = workspace_bytes(full, LLAMA_8B.shape, tokens) + slot_bytes(full, LLAMA_8B.shape, tokens, 72)
        assert needed <= found.kv.bytes
    assert found.prompt_tokens == 131_072
    assert found.stored.bytes == pytest.approx(found.kv.bytes / 2)  # a third of both
    assert 0 <= found.left < 100


def test_cuda_graphs_have_a_line_where_steps_are_recorded():
    few, many = (bytes_of(planned(gpu(80 * GB), engine={"max_slots": slots}))["graphs"] for slots in (16, 256))
    layers = MOST_RECORDED * 32 * RECORDED_LAYER_BYTES
    logits = 16 * 128_256 * 2  # that steps leave
    assert few == pytest.approx(layers + logits + 16 * 128_256 * 34, rel=0.02)  # and what sampling takes
    assert many - layers == pytest.approx(16 * (few - layers))
    for engine in ({"compile": "off"}, {"batch_invariant": True}):
        assert "graphs" not in bytes_of(planned(gpu(80 * GB), engine=engine))
    assert "graphs" not in bytes_of(planned(machine(32 * GIB), TINY))


def test_estimates_hold_for_what_replicas_do_in_modules_that_need_torch():
    assert SCORING_BYTES == 4 * 4 * LOGITS_AT_ONCE
    assert all(padded_batch(slots) <= -(-slots // 16) * 16 for slots in range(1, 1000))


def test_half_a_gpu_has_half_its_memory():
    whole, half = planned(gpu(160 * GB)), planned(gpu(160 * GB, 0.5))
    assert half.given.bytes * 2 == whole.given.bytes
    assert half.kv.bytes < whole.kv.bytes / 2  # each has weights of its own


def test_what_does_not_fit_is_told_with_every_line_and_what_helps():
    with pytest.raises(MemoryPlanError) as raised:
        planned(gpu(16 * GB)).check()
    text = str(raised.value)
    assert "given 14,400,000,000" in text
    for expected in ("16,060,522,496", "weights", "slots (engine.kv_bytes, auto)", "left", "engine.memory_fraction"):
        assert expected in text
    with pytest.raises(MemoryPlanError, match="needed"):
        planned(gpu(80 * GB), engine={"kv_bytes": 60 * GB}).check()
    with pytest.raises(MemoryPlanError, match=r"weights alone .* needed 16,060,522,496 bytes, given 7,200,000,000"):
        check_weights(gpu(8 * GB), EngineConfig(), LLAMA_8B.weights)


def test_explicit_sizes_stand_and_are_subtracted_from_what_auto_has():
    auto = planned(gpu(80 * GB))
    stored = planned(gpu(80 * GB), cache={"memory_bytes": 30 * GB})
    assert (stored.stored.bytes, stored.stored.auto) == (30 * GB, False)
    assert stored.kv.bytes < auto.kv.bytes
    assert stored.left == pytest.approx(0, abs=100)
    slots = planned(gpu(80 * GB), engine={"kv_bytes": 10 * GB})
    assert (slots.kv.bytes, slots.kv.auto) == (10 * GB, False)
    assert slots.stored.bytes > auto.stored.bytes + 20 * GB
    both = planned(gpu(80 * GB), engine={"kv_bytes": 10 * GB}, cache={"memory_bytes": 5 * GB})
    assert both.left > 30 * GB
    off = planned(gpu(80 * GB), cache={"enabled": False, "memory_bytes": 5 * GB})
    assert off.stored.bytes == 0
    assert off.kv.bytes > auto.kv.bytes


TIERS = {"host": {"memory_bytes": 64 * GIB}}


def test_blocks_on_their_way_to_lower_tiers_may_take_as_much_as_the_longest_prompt():
    prompt = 8_192 * LLAMA_8B.shape.token_bytes
    for memory in (gpu(80 * GB), group(200 * GB)):
        found = planned(memory, context=8_192, cache=TIERS)
        assert bytes_of(found)["moving"] == found.moving.bytes == prompt
        assert found.sized(PrefixCacheConfig(**TIERS)).moving_limit == prompt
    fp8 = planned(gpu(80 * GB), context=8_192, cache=TIERS | {"storage": "fp8"})
    assert fp8.moving.bytes == prompt / 2
    small = planned(gpu(80 * GB), context=8_192, cache={"host": {"memory_bytes": GIB // 2}})
    assert small.moving.bytes == GIB // 2
    explicit = planned(gpu(80 * GB), context=8_192, cache=TIERS | {"moving_bytes": 12345})
    assert bytes_of(explicit)["moving"] == explicit.moving.bytes == 12345
    assert "moving" not in bytes_of(planned(gpu(80 * GB), context=8_192))


def test_what_is_on_its_way_to_lower_tiers_leaves_room_for_slots():
    """Leave room beside contexts that would take much of the GPU, and beside sizes that are set."""
    flash = {"attention_token_bytes": 2_048}
    found, without = (planned(gpu(80 * GB), cache=cache, **flash) for cache in (TIERS, {}))
    both = without.kv.bytes + without.stored.bytes
    assert both / 9 < found.moving.bytes < both / 7
    assert found.kv.bytes + found.stored.bytes + found.moving.bytes == pytest.approx(both, rel=0.01)
    found.check()
    full = planned(gpu(80 * GB), engine={"kv_bytes": 40 * GB}, cache=TIERS | {"memory_bytes": 12 * GB}, **flash)
    full.check()
    assert 256 << 20 < full.moving.bytes < both / 9
    assert planned(gpu(18 * GB + GIB), cache=TIERS, **flash).moving.bytes == 256 << 20


def test_a_limit_says_who_chose_it():
    found = planned(machine(8 * GIB), TINY, 4096, cache={"memory_bytes": 1234})
    assert str(found.kv) == f"auto = {found.kv.bytes} bytes"
    assert str(found.stored) == "1234"


def test_a_laptop_keeps_most_of_its_memory_and_gives_what_it_gave_before():
    small = planned(machine(8 * GIB, 0.5), TINY, 4096)
    assert (small.kv.bytes, small.stored.bytes) == pytest.approx((GIB, GIB // 2), abs=1)
    large = planned(machine(64 * GIB), TINY, 4096)
    assert large.kv.bytes + large.stored.bytes == pytest.approx(16 * GIB, abs=2)  # a quarter
    assert large.left > 35 * GIB


def test_a_control_group_is_used_up_to_the_fraction_and_estimates_never_stop_a_start():
    found = planned(group(8 * GIB), TINY, 4096)
    assert found.left == pytest.approx(0, abs=2)
    assert found.given.bytes == int(8 * GIB * 0.9)
    tight = planned(group(GIB), TINY, 4096, engine={"step_tokens": 512})
    tight.check()
    assert tight.left < 0  # as far as the estimates are right
    assert tight.kv.bytes + tight.stored.bytes == pytest.approx(GIB * 0.9 / 4, rel=0.1)
    with pytest.raises(MemoryPlanError):
        planned(group(GIB), TINY, 4096, engine={"kv_bytes": 2 * GIB}).check()


def test_a_host_tier_takes_the_memory_of_a_cpu_but_not_of_a_gpu():
    host = {"host": {"memory_bytes": 2 * GIB}}
    plain, tiered = planned(group(16 * GIB), TINY, 4096), planned(group(16 * GIB), TINY, 4096, cache=host)
    assert bytes_of(tiered)["host tier"] == 2 * GIB
    assert tiered.kv.bytes < plain.kv.bytes
    assert "host tier" not in bytes_of(planned(gpu(80 * GB), cache=host))


def test_a_kernel_that_holds_all_logits_leaves_less_for_slots():
    estimated = planned(gpu(80 * GB))
    measured = planned(gpu(80 * GB), attention_token_bytes=5 * attention_bytes(LLAMA_8B, GPU_STEP_TOKENS))
    assert measured.kv.bytes < estimated.kv.bytes
    assert "measured" in next(line.source for line in measured.lines if line.name == "attention")
    assert 0 <= measured.left < 100


def test_the_longest_prompt_that_slots_admit_has_memory_for_its_attention():
    found = planned(gpu(24 * GB))
    assert found.prompt_tokens == found.kv.bytes // LLAMA_8B.shape.token_bytes < 131_072
    assert bytes_of(found)["attention"] >= found.prompt_tokens * attention_bytes(LLAMA_8B, GPU_STEP_TOKENS)


sizes = st.builds(
    lambda weights, layers, heads, group, dim, dtype, wide: ModelSizes(
        weights, KVShape(layers, heads, dim, dtype, heads * group), wide, 3 * wide, 50_000
    ),
    st.integers(0, 30 * GB),
    st.integers(1, 80),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([32, 64, 128]),
    st.sampled_from([2, 4]),
    st.integers(64, 8192),
)
limits = st.one_of(st.just("auto"), st.integers(0, 60 * GB))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([gpu, group, machine]),
    st.integers(GIB, 200 * GIB),
    st.sampled_from([1.0, 0.5, 1 / 3]),
    sizes,
    limits,
    limits,
    st.integers(16, 1_000_000),
)
def test_the_lines_add_up_and_auto_never_exceeds_what_is_given(kind, total, share, model, kv, stored, context):
    found = planned(kind(total, share), model, context, {"kv_bytes": kv}, {"memory_bytes": stored})
    assert found.given.bytes == sum(line.bytes for line in found.lines) + found.left
    assert all(line.bytes >= 0 for line in found.lines)
    assert [line["bytes"] for line in found.to_json()["lines"]] == [line.bytes for line in found.lines]
    assert found.prompt_tokens <= context
    lines = bytes_of(found)
    assert (lines["slots"], lines["prefixes"]) == (found.kv.bytes, found.stored.bytes)
    if kv != "auto":
        assert found.kv.bytes == kv
    if stored != "auto":
        assert found.stored.bytes == stored
    if kind is gpu:
        assert (found.left >= 0) == (found.needed <= found.most)
    if kv == "auto" and kind is gpu and found.left < 0:  # nothing is left over: slots have the least there can be
        assert found.kv.bytes == 3 * min(context, GPU_STEP_TOKENS) * model.shape.token_bytes
