"""Size the slots of a replay for the tokens that the gateway of the service would let each request draw."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.platform.exchanges import Exchange
from tests.unit.platform.gateway.apis.test_fields import CHAT, Asked, body
from tests.unit.simulator.conversations import config, record
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.record_builder import columns_of
from warmkv.simulator.cache.kv_shape import kv_shape
from warmkv.simulator.workload.job_sizes import sizes_of

CONTEXT = 4096  # of the gateway


def allowed(policy, prompt, output, max_tokens, max_context, max_output):
    asked = replace(record(0.0, [1] * prompt, output=output), max_tokens=max_tokens)
    specs = [PolicySpec.model_validate(policy)], np.zeros(1, dtype=np.int64)
    (sizes,) = sizes_of(columns_of([asked]), specs, False, kv_shape(config()), max_context, max_output)
    return sizes.allowed


@pytest.mark.parametrize("policy", ["full", "snapkv@64", "streaming_llm@64", "streaming_llm@0.5"])
def test_a_slot_is_for_what_the_gateway_cuts_max_tokens_to(tmp_path, policy):
    """Ask for less and more than a limit, and than the context has room for."""

    async def given(limit, max_tokens):
        gateway = Asked(tmp_path, f"gateway.max_output_tokens={limit}")
        more = {"max_tokens": max_tokens, "warmkv": {"policy": policy}}
        await Exchange(gateway, CHAT, body(gateway, CHAT, **more)).whole()
        (request,) = gateway.asked
        return len(request.token_ids), request.sampling.max_tokens

    for limit, max_tokens in ((8192, 7), (100, 7), (100, 32_000), (8192, 4090), (8192, 32_000), (5, 5)):
        prompt, most = asyncio.run(given(limit, max_tokens))
        assert allowed(policy, prompt, 1, max_tokens, CONTEXT, limit) == most
    assert most == 5


@pytest.mark.parametrize(("policy", "tokens"), [("full", 4), ("snapkv@8", 4), ("streaming_llm@8", 40)])
def test_a_streaming_cache_goes_on_beyond_the_context(policy, tokens):
    assert allowed(policy, 60, 1, 99, 64, 40) == tokens


def test_what_was_drawn_has_room_whatever_the_limits():
    assert allowed("full", 60, 30, 0, 64, 20) == 30
    assert allowed("full", 60, 30, 99, 0, 20) == 30
