"""StreamingLLM over a stream without end: constant memory, bounded positions, no precision lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.engine.test_engine import prompt
from tests.unit.replicas.engine.test_matrix import driven
from warmkv.replicas.protocol import UnservableRequestError

TRAINED, LIMIT, LAYERS = 64, 16, 3


@pytest.mark.parametrize(
    ("policy", "times"),
    [
        (f"streaming_llm@{LIMIT}", 8),
        (f"streaming_llm@{LIMIT}+fp8", 8),
        ("streaming_llm@30", 8),
        pytest.param(f"streaming_llm@{LIMIT}", 200, marks=pytest.mark.soak),
    ],
)
def test_a_stream_of_many_times_the_context_is_as_exact_as_a_short_one(models, policy, times, soaked):
    """What a token sees goes back at most `layers * limit` tokens, and to the sinks; so a short stream can tell."""
    new = soaked(times, least=50) * TRAINED
    long = Driver(models["llama"], max_context=TRAINED, prefix_cache={"enabled": False})
    sizes, furthest = set(), [0]
    forward = long.engine.executor.forward

    def watched(ids: torch.Tensor, positions: torch.Tensor, state: Any) -> torch.Tensor:
        furthest[0] = max(furthest[0], int(positions.max()))
        sizes.add(long.engine.pool.allocated_bytes)
        return forward(ids, positions, state)

    long.engine.executor.forward = watched  # type: ignore[method-assign]
    sinks = prompt(4)
    tokens, logits = driven(long, make_request(sinks, new=new, policy=policy))
    assert furthest[0] < TRAINED
    assert len(sizes) <= 2  # before the slot is allocated, and from then on
    reach = int(policy.split("@")[1].split("+")[0]) * LAYERS + 8
    forced = iter([*tokens[-reach - 1 :], 0])
    short = Driver(models["llama"], prefix_cache={"enabled": False})
    seen: list[torch.Tensor] = []

    def draw(sequences: Any, logits: torch.Tensor, *given: Any) -> list[int]:
        seen.append(logits[0].clone())
        return [next(forced)]

    short.engine.executor._draw = draw  # type: ignore[method-assign]
    short.run(make_request(sinks, new=reach + 1, policy=policy))
    slack = 1e-3 if "fp8" not in policy else 0.1
    torch.testing.assert_close(logits[-1], seen[-1], rtol=slack, atol=slack)


def test_a_stream_needs_a_cache_within_the_context(driver):
    small = driver(max_context=64)
    with pytest.raises(UnservableRequestError, match="exceed the context"):
        small.submit(make_request(prompt(10), new=100, policy="streaming_llm@64"))
    with pytest.raises(UnservableRequestError, match="exceed the context"):
        small.submit(make_request(prompt(10), new=100, policy="snapkv@8+ring:window=4"))
