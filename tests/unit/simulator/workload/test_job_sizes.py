"""What a request takes of a replica: a slot for the tokens that a gateway would let it draw."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import config, record
from warmkv.policies import budgets
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.record_builder import columns_of
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.workload.job_sizes import sizes_of

SHAPE = kv_shape(config())
POLICIES = ("full", "snapkv@8", "streaming_llm@8")


def allowed(policy, prompt, output, max_tokens, max_context, max_output):
    asked = replace(record(0.0, [1] * prompt, output=output), max_tokens=max_tokens)
    specs = [PolicySpec.model_validate(policy)], np.zeros(1, dtype=np.int64)
    (sizes,) = sizes_of(columns_of([asked]), specs, False, SHAPE, max_context, max_output)
    return sizes.allowed


@given(
    st.sampled_from(POLICIES), st.integers(1, 60), st.integers(0, 9), st.integers(0, 99), st.sampled_from([0, 16, 64]),
    st.integers(1, 40),
)  # fmt: skip
def test_a_slot_is_for_what_the_gateway_cuts_max_tokens_to(policy, prompt, output, max_tokens, context, most):
    cut, spec = min(max_tokens, most), PolicySpec.model_validate(policy)
    if context and context - prompt < cut:
        in_force = budgets.in_force(spec, prompt, max(cut, output))
        if not budgets.is_endless(in_force, prompt, max(cut, output), context):
            cut = max(1, context - prompt)
    assert allowed(policy, prompt, output, max_tokens, context, most) == max(output, cut)


@pytest.mark.parametrize(("policy", "tokens"), [("full", 4), ("snapkv@8", 4), ("streaming_llm@8", 40)])
def test_a_streaming_cache_goes_on_beyond_the_context(policy, tokens):
    assert allowed(policy, 60, 1, 99, 64, 40) == tokens
