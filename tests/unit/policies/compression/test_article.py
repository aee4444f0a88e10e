"""The worked examples of the review article, as tests of what warmkv really calls.

The article is "KV cache compression: H2O, SnapKV, StreamingLLM, and prompt caching reviewed" (Neural Tech Daily); the
70B model is from "The Mathematics of KV Cache Memory" of a second one. Some of their arithmetic is rounded or off: the
right values stand here, and the docstring says what was printed. Prices and break-even: `../test_pricing.py`.
"""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from tests.unit.replicas.slow_methods.expected_attention import rotation
from warmkv.policies.budgets import in_force, kept_tokens, slot_limit
from warmkv.policies.compression import build
from warmkv.policies.compression.prefill_state import PrefillState, add_column_sums
from warmkv.policies.compression.scoring import best, pool_positions
from warmkv.policies.compression.selection import Selection
from warmkv.policies.compression.softmax import Softmax
from warmkv.policies.slot_sizes import KVShape, slot_bytes
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.slots.attention import attend_rows
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.slot import Slot, SlotRequest
from warmkv.replicas.slots.slots import SlotPool

DIM = 8
UNITS = torch.eye(DIM)
INV_FREQ = 10_000.0 ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
LLAMA_2_7B = KVShape(layers=32, kv_heads=32, head_dim=128, dtype_bytes=2)
LLAMA_2_70B = KVShape(layers=80, kv_heads=8, head_dim=128, dtype_bytes=2)
VOTES = [0.1, 0.4, 0.5, 0.3, 0.0, 0.1, 0.8, 0.7, 0.6, 0.2, 0.0, 0.0, 0.1, 0.3, 0.4, 0.2, 0.0, 0.5, 0.6, 0.0]
"""Votes on 20 tokens, counted from 0 (math entry 3)."""


# --- slots: one layer, one head, values that are unit vectors, so that an output is the attention on each token


def handed_over(policy: str, keys: Tensor, received: list[float]) -> tuple[SlotPool, Slot]:
    """Return a slot that begins with all tokens of a short prompt: keys [n, DIM] and the attention each received."""
    tokens = len(keys)
    spec = in_force(PolicySpec.model_validate(policy), tokens, 10)
    pool = SlotPool(KVShape(1, 1, DIM, 4), torch.float32, torch.device("cpu"))
    slot = pool.claim(SlotRequest(spec, tokens, 10), 1 << 30)
    assert slot is not None
    values = UNITS[None, None, :tokens]
    selection = Selection(torch.arange(tokens)[None], torch.tensor([received]))
    pool.fill(slot, PrefillState(keys[None, None], values, q_heads=1), [selection])
    return pool, slot


def step(pool: SlotPool, slot: Slot, query: Tensor, key: Tensor) -> Tensor:
    """Return one token decoded; its attention on every token of the sequence, 0 for those that have been evicted."""
    value = UNITS[slot.tokens]
    state = DecodeState(pool, [slot], INV_FREQ)
    return state.attend(0, *(x.view(1, 1, 1, DIM) for x in (query, key, value)), Softmax()).flatten()


def query_for(attention: list[float]) -> Tensor:
    """Return a query that gives this attention to keys that are unit vectors, whatever other tokens there are."""
    return torch.tensor([*attention, *[1e-30] * (DIM - len(attention))]).log()


def scores(pool: SlotPool) -> Tensor:
    (slab,) = pool.slabs
    return slab.memory.scores[0, 0]


# --- section 3: the size of a cache


def test_the_cache_of_llama_2_7b_at_128k_tokens_is_over_four_times_its_weights():
    """Printed as about 64 GB for 128,000 tokens: that is 67.1 GB; 64 GiB it is at 131,072 tokens, exactly."""
    assert LLAMA_2_7B.token_bytes * 128_000 / 1e9 == pytest.approx(67.1, abs=0.05)
    assert LLAMA_2_7B.token_bytes * 131_072 == 64 << 30
    assert 4 < LLAMA_2_7B.token_bytes * 128_000 / 14e9 < 5


def test_the_cache_of_llama_2_70b_at_128k_tokens_takes_43_gigabytes():
    assert LLAMA_2_70B.token_bytes * 131_072 / 1e9 == pytest.approx(43, abs=0.1)
    assert LLAMA_2_70B.token_bytes * 131_072 == 40 << 30


def test_grouped_queries_keep_the_cache_of_a_70b_model_below_its_weights_at_100k_tokens():
    """Section 2 has the cache larger than a 70B model (140 GB in half precision) at 100,000 tokens.

    That holds where each of the 64 query heads has a KV head of its own. With the 8 of Llama-2-70B it is 32.8 GB.
    """
    weights = 70e9 * 2
    each = KVShape(layers=80, kv_heads=64, head_dim=128, dtype_bytes=2)
    assert each.token_bytes * 100_000 > weights
    assert LLAMA_2_70B.token_bytes * 100_000 / 1e9 == pytest.approx(32.8, abs=0.05)
    assert LLAMA_2_70B.token_bytes * 100_000 < weights


# --- H2O: section 5.1, math entries 1 and 2, algorithm 1


def test_h2o_at_20_percent_is_10_percent_recent_and_10_percent_heavy_hitters():
    spec = PolicySpec.model_validate("h2o@0.2")
    budget = kept_tokens(spec, 1000)
    assert budget == 200
    assert build(spec).ends(budget) == (0, 100)


def test_h2o_attention_of_the_scores_3_1_4_and_a_half():
    """Printed as [0.234, 0.032, 0.636, 0.019], which sums to 0.921 and so is no softmax."""
    sums = torch.zeros(1, 4)
    query = torch.tensor([3.0, 1.0, 4.0, 0.5]).view(1, 1, 4)
    add_column_sums(sums, query, torch.eye(4)[None], 3, Softmax())
    torch.testing.assert_close(sums[0], torch.tensor([0.2541, 0.0344, 0.6907, 0.0209]), atol=5e-5, rtol=0)


def test_h2o_after_five_such_steps_has_the_third_token_as_heavy_hitter_and_the_fourth_to_drop():
    """The article says that the sums might read [1.0, 0.3, 3.1, 0.15]; five equal steps give the ones here."""
    sums = torch.zeros(1, 4)
    query = torch.tensor([3.0, 1.0, 4.0, 0.5]).view(1, 1, 4)
    for _ in range(5):
        add_column_sums(sums, query, torch.eye(4)[None], 3, Softmax())
    torch.testing.assert_close(sums[0], torch.tensor([1.270, 0.172, 3.453, 0.104]), atol=5e-4, rtol=0)
    assert best(sums, 4).tolist() == [[2, 0, 1, 3]]


def test_h2o_trace_with_three_entries_evicts_the_second_token():
    """t4 attends beside t1, t2 and t3, all scores are brought up to date, and the lowest of the four leaves.

    The article lets the cache exceed k = 3 during a step and evicts at its end. warmkv evicts as the next token comes
    in, so that a budget is never exceeded: the same trace has a budget of 4 here.
    """
    pool, slot = handed_over("h2o@4", UNITS[:3], [0.6, 0.2, 0.4])
    shares = step(pool, slot, query_for([0.3, 0.1, 0.1, 0.5]), UNITS[3])
    torch.testing.assert_close(shares[:4], torch.tensor([0.3, 0.1, 0.1, 0.5]))
    torch.testing.assert_close(scores(pool)[:4], torch.tensor([0.9, 0.3, 0.5, 0.5]))
    after = step(pool, slot, torch.zeros(DIM), UNITS[4])
    torch.testing.assert_close(after, torch.tensor([0.25, 0.0, 0.25, 0.25, 0.25, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(scores(pool)[[0, 2, 3]], torch.tensor([0.9, 0.5, 0.5]) + 0.25)
    assert scores(pool)[1] == 0.25  # of t5, in the place of t2: it begins anew


def test_h2o_held_to_three_entries_evicts_the_same_token_before_the_fourth_attends():
    pool, slot = handed_over("h2o@3", UNITS[:3], [0.6, 0.2, 0.4])
    shares = step(pool, slot, torch.zeros(DIM), UNITS[3])
    torch.testing.assert_close(shares[:4], torch.tensor([1 / 3, 0.0, 1 / 3, 1 / 3]))


def test_h2o_evicts_nothing_until_its_budget_is_used_up():
    pool, slot = handed_over("h2o@6", UNITS[:3], [0.6, 0.2, 0.4])
    for token in (3, 4, 5):
        shares = step(pool, slot, torch.zeros(DIM), UNITS[token])
        assert (shares > 0).sum() == token + 1
    assert (step(pool, slot, torch.zeros(DIM), UNITS[6]) > 0).sum() == 6


def test_greedy_choice_covers_most_attention_and_more_than_its_bound_promises():
    """Math entry 2. The bound for a best cover of 10 is 5.49; with scores that add up, greedy finds the best itself."""

    def bound(most: float, alpha: float = 0.1, beta: float = 0.2) -> float:
        return (1 - alpha) * (1 - 1 / math.e) * most - beta

    assert bound(10.0) == pytest.approx(5.49, abs=0.005)
    most = max(sum(chosen) for chosen in combinations(VOTES, 4))
    covered = sum(VOTES[i] for i in best(torch.tensor(VOTES), 4).tolist())
    assert covered == pytest.approx(most)
    assert covered > bound(most)


# --- SnapKV: section 5.2, math entry 3, algorithm 2


def prompt_with(votes: list[float], window: int) -> PrefillState:
    """Return a prompt whose last `window` queries give these votes to the tokens before them.

    Keys are unit vectors, so a query is the logarithm of its attention. A query of a head has 1 to give and the
    article's votes sum to 5.8, so it takes two query heads; what is left of a query goes to the window's first token.
    """
    tokens, rows = len(votes) + window, 2 * window
    attention = torch.full((tokens,), 1e-30)
    attention[: len(votes)] = torch.tensor(votes).clamp(min=1e-30) / rows
    attention[len(votes)] = 1 - sum(votes) / rows
    queries = torch.zeros(1, 2, tokens, tokens)
    queries[:, :, -window:] = attention.log()
    keys = torch.eye(tokens)[None, None]
    prompt = PrefillState(torch.empty(1, *keys.shape[1:]), torch.empty(1, *keys.shape[1:]), q_heads=2, observed=window)
    prompt.begin_chunk(tokens)
    prompt.attend(0, queries, keys, keys, Softmax())
    prompt.end_chunk()
    return prompt


def chosen(policy: str, votes: list[float], window: int = 4) -> list[int]:
    (selection,) = build(policy).select(prompt_with(votes, window))
    (positions,) = selection.positions.tolist()
    return positions


def test_snapkv_without_pooling_picks_6_7_8_and_18():
    assert sorted(best(torch.tensor(VOTES), 4).tolist()) == [6, 7, 8, 18]
    assert chosen("snapkv@8:window=4,kernel=1,pooling=max", VOTES) == [6, 7, 8, 18, 20, 21, 22, 23]


def test_snapkv_votes_pooled_with_a_kernel_of_3():
    """Printed as 0.5, 0.5 and then seven times 0.8: 0.8 is at 5, 6 and 7, the neighbours of the vote at 6, only."""
    pooled = [0.4, 0.5, 0.5, 0.5, 0.3, 0.8, 0.8, 0.8, 0.7, 0.6, 0.2, 0.1, 0.3, 0.4, 0.4, 0.4, 0.5, 0.6, 0.6, 0.6]
    torch.testing.assert_close(pool_positions(torch.tensor(VOTES), 3, "max"), torch.tensor(pooled))


def test_snapkv_with_pooling_keeps_the_whole_cluster():
    """Printed as {6, 7, 8, 19}. By the pooled votes it is 5 to 8; position 18 loses to the neighbour of the cluster."""
    assert chosen("snapkv@8:window=4,kernel=3,pooling=max", VOTES) == [5, 6, 7, 8, 20, 21, 22, 23]


def test_snapkv_of_20_tokens_keeps_8_a_compression_of_two_and_a_half():
    """The last 4 of the 20 are the window, as in the article, so the votes are those on the first 16.

    The article's share of 0.2 leaves the window out; warmkv's budget counts every token that is kept: 0.4.
    """
    kept = chosen("snapkv@0.4:window=4,kernel=3,pooling=max", VOTES[:16])
    assert kept == [5, 6, 7, 8, 16, 17, 18, 19]
    assert 20 / len(kept) == 2.5


def test_snapkv_leaves_a_prompt_within_its_budget_alone():
    assert chosen("snapkv@20:window=4", VOTES[:16]) == list(range(20))


def test_max_pooling_with_a_kernel_of_13_reaches_6_positions_to_both_sides():
    spike = torch.zeros(40)
    spike[20] = 1.0
    assert pool_positions(spike, 13, "max").nonzero().flatten().tolist() == list(range(14, 27))


def test_a_prompt_of_380k_tokens_in_1024_entries_is_a_compression_of_380():
    prompt = 380 * 1024
    assert prompt / kept_tokens(PolicySpec.model_validate("snapkv@1024"), prompt) == 380


# --- StreamingLLM: section 5.3, math entry 4, algorithm 3


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        # printed as [0.609, 0.001, 0.001, 0.002, 0.387]
        ([True] * 5, [0.62057, 0.00057, 0.00093, 0.00154, 0.37639]),
        # printed as [0.001, 0.002, 0.004, 0.993]
        ([False] + [True] * 4, [0.0, 0.00149, 0.00246, 0.00405, 0.99200]),
    ],
    ids=["with-the-sink", "without-the-sink"],
)
def test_attention_on_a_sink_goes_to_the_match_when_the_sink_is_gone(seen, expected):
    """Scores [5, -2, -1.5, -1, 4.5]: the sink and the match share the attention; without the sink the match has all."""
    keys = torch.eye(5)[None]
    query = torch.tensor([5.0, -2.0, -1.5, -1.0, 4.5]).view(1, 1, 5)
    shares = attend_rows(query, keys, keys, torch.tensor([seen]).float().log(), Softmax()).flatten()
    torch.testing.assert_close(shares, torch.tensor(expected), atol=5e-6, rtol=0)


def test_streaming_trace_with_2_sinks_and_3_recent_over_7_tokens():
    """t6 drops t3 and t7 drops t4, and positions are always 0 to 4, whatever those in the stream are.

    The article names the cache after t6 and the positions for t7. As t7 comes in it has dropped t4, so the positions
    in the stream, which it gives as {0, 1, 3, 4, 5}, are those of t6's step; for t7 they would be {0, 1, 4, 5, 6}.
    """
    random = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(2, 7, DIM, dtype=torch.float64, generator=random) / 2  # attention is spread out

    def turned(x: Tensor, at: int) -> Tensor:
        return rotation(at, INV_FREQ) @ x

    def attention(newest: int, cached: list[int], positions: list[int]) -> Tensor:
        """Return attention of the newest token on the cached ones, the newest last; all turned to these positions."""
        query = turned(queries[newest], positions[-1])
        logits = [query @ turned(keys[i], at) for i, at in zip(cached, positions, strict=True)]
        return torch.zeros(DIM, dtype=torch.float64).scatter(0, torch.tensor(cached), torch.stack(logits).softmax(0))

    stream = torch.stack([turned(keys[i], i) for i in range(7)]).float()
    pool, slot = handed_over("streaming_llm@5:sinks=2", stream[:5], [0.0] * 5)
    for newest, cached in ((5, [0, 1, 3, 4, 5]), (6, [0, 1, 4, 5, 6])):
        shares = step(pool, slot, turned(queries[newest], newest).float(), stream[newest]).double()
        assert shares.nonzero().flatten().tolist() == cached
        torch.testing.assert_close(shares, attention(newest, cached, [0, 1, 2, 3, 4]), atol=1e-5, rtol=0)
        assert (shares - attention(newest, cached, cached)).abs().max() > 0.005


def test_streaming_hands_over_the_sinks_and_the_recent_tokens_of_a_longer_prompt():
    prompt = PrefillState(torch.zeros(1, 1, 6, DIM), torch.zeros(1, 1, 6, DIM), q_heads=1)
    (selection,) = build("streaming_llm@5:sinks=2").select(prompt)
    assert selection.positions.tolist() == [[0, 1, 3, 4, 5]]


def test_a_stream_of_4_million_tokens_takes_the_memory_of_a_short_one():
    spec = PolicySpec.model_validate("streaming_llm@1024")
    assert build(spec).ends(1024) == (4, 1020)
    assert slot_limit(spec, 1024, 4096, 4_000_000) == 1024
    assert slot_bytes(spec, LLAMA_2_7B, 4096, 4_000_000) == slot_bytes(spec, LLAMA_2_7B, 4096, 100)
    full = PolicySpec()
    assert slot_bytes(full, LLAMA_2_7B, 4096, 4_000_000) > 500 * slot_bytes(full, LLAMA_2_7B, 4096, 100)
