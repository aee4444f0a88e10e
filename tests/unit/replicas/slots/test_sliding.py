"""Every policy in layers with a sliding window, through the engine, against a slow reference that masks by position."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.unit.replicas import slow_methods
from tests.unit.replicas.conftest import _SHAPE, VOCABULARY, Driver, make_request
from tests.unit.replicas.engine.test_matrix import driven
from tests.unit.replicas.engine.test_preemption import busy, crowd, of, undisturbed
from tests.unit.replicas.reference import Reference
from tests.unit.replicas.slow_methods import LayerView, SlowCache
from warmkv.policies import budgets
from warmkv.policies.sliding import in_layer, row_limit
from warmkv.policies.slot_sizes import size_class, slot_bytes
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.loading.load import LoadedModel, prepare

WINDOW = 12
LENGTH, NEW = 50, 20

POLICIES = [
    "full",
    "window@8",
    "window@30",
    "streaming_llm@9:sinks=2",
    "streaming_llm@30",
    "h2o@8",
    "h2o@30",
    "h2o@8+append",
    "snapkv@8:window=3",
    "snapkv@30:window=3",
    "snapkv@8+ring:window=3,sinks=2",
    "snapkv@30+ring:window=3,sinks=2",
    "snapkv@8+argmin:window=3",
    "pyramidkv@16:window=4",
    "adakv@8:window=3",
    "adakv@8+argmin:window=3",
    "tova@8:per_head=true",
    "tova@8+append",
    "keydiff@8+argmin",
    "expected_attention@9:window=6,sinks=2",
    "fastgen:recovery=0.6",
    "cake@14:window=4",
    "adaptive@0.5:window=4,target=0.6",
    "full+fp8",
    "full+turbo4",
    "snapkv@8+fp8:window=3",
    "h2o@8+turbo3",
]


def sliding_model(window: int) -> Any:
    """Return layers with a window before and behind one without."""
    torch.manual_seed(7)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Qwen3Config(**_SHAPE, head_dim=8, layer_types=kinds, use_sliding_window=True, sliding_window=window)
    return Qwen3ForCausalLM(config).eval()


@dataclass
class WindowView(LayerView):
    """A layer of a prompt of which `tokens` positions may be kept, each query seeing `window` keys of the whole."""

    whole: LayerView
    window: int

    @property
    def first(self) -> int:
        return self.whole.tokens - self.tokens


def windowed_row(layer: LayerView, member: int, query: int) -> list[float]:
    """Return `slow_methods.attention_row` where queries see a window."""
    if not isinstance(layer, WindowView):
        return plain_row(layer, member, query)
    at = query + layer.first
    low = max(0, at + 1 - layer.window)
    keys = layer.whole.keys[member // layer.group, low : at + 1].double()
    weights = (keys @ layer.whole.queries[member, at].double() / math.sqrt(keys.shape[1])).softmax(0).tolist()
    seen = dict(zip(range(low, at + 1), weights, strict=True))
    return [seen.get(position + layer.first, 0.0) for position in range(layer.tokens)]


plain_row = slow_methods.attention_row


def view(whole: LayerView, window: int, tokens: int) -> WindowView:
    parts = (part[:, whole.tokens - tokens :] for part in (whole.queries, whole.keys, whole.values))
    return WindowView(*parts, whole, window)


class SlidingReference(Reference):
    """Plain decoding in which a layer with a window sees what is newer than its oldest position."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        config = model.config
        self.windows = [config.sliding_window if kind == "sliding_attention" else 0 for kind in config.layer_types]

    @torch.no_grad()
    def generate(self, prompt: list[int], new: int, spec: PolicySpec, **_: Any) -> tuple[list[int], list[Tensor]]:
        tokens, hidden = len(prompt), self.model.model.embed_tokens(torch.tensor(prompt))
        wholes, unrotated, distance = [], [], torch.arange(tokens)[:, None] - torch.arange(tokens)
        for layer, window in zip(self.layers, self.windows, strict=True):
            q, k, v = self.project(layer, layer.input_layernorm(hidden))
            wholes.append(LayerView(self.rotate(q, torch.arange(tokens)), self.rotate(k, torch.arange(tokens)), v))
            unrotated.append(k)
            hidden_from = (distance < 0) | (distance >= (window or tokens))
            heads = []
            for member in range(q.shape[0]):
                head = member // wholes[-1].group
                logits = wholes[-1].queries[member] @ wholes[-1].keys[head].T / math.sqrt(self.head_dim)
                heads.append(logits.masked_fill(hidden_from, float("-inf")).softmax(-1) @ v[head])
            hidden = self.block(layer, hidden, torch.stack(heads, dim=1).flatten(1))
        caches = self.caches(spec, wholes, unrotated)
        logits = [self.model.lm_head(self.model.model.norm(hidden[-1]))]
        drawn = [int(logits[-1].argmax())]
        for step in range(new - 1):
            logits.append(self.decode(drawn[-1], tokens + step, caches, spec))
            drawn.append(int(logits[-1].argmax()))
        return drawn, logits

    def caches(self, spec: PolicySpec, wholes: list[LayerView], unrotated: list[Tensor]) -> list[list[SlowCache]]:
        tokens, inv_freq = wholes[0].tokens, self.model.model.rotary_emb.inv_freq.double()
        asked = [view(whole, w, tokens) if w else whole for whole, w in zip(wholes, self.windows, strict=True)]
        whole_kept = slow_methods.kept(spec, asked, inv_freq=inv_freq)
        compressed = budgets.is_compressed(spec, tokens)
        shares = [tokens] * len(wholes)
        if compressed and spec.name != "fastgen":
            shares = slow_methods.layer_budgets(spec, asked, min(slow_methods.resolve(spec, tokens), tokens))
        out = []
        for at, (whole, window) in enumerate(zip(wholes, self.windows, strict=True)):
            heads = range(whole.kv_heads)
            if not window:
                out.append([self.cache(spec, whole, unrotated[at], head, whole_kept[at][head]) for head in heads])
                continue
            seen = view(whole, window, min(window, tokens))
            inner = spec.model_copy(update={"sinks": 0}) if spec.sinks else spec
            if spec.name in ("window", "streaming_llm", "full") or not compressed:
                count = min(shares[at], seen.tokens)
                chosen = [list(range(seen.tokens - count, seen.tokens))] * whole.kv_heads
            elif spec.name == "fastgen":
                chosen = [self.recovered(spec, seen, head) for head in heads]
            else:
                chosen = slow_methods.kept_in_layer(inner, seen, min(shares[at], seen.tokens), inv_freq, set())
            out.append([self.sliding_cache(inner, seen, unrotated[at], head, chosen[head]) for head in heads])
        return out

    @staticmethod
    def recovered(spec: PolicySpec, seen: WindowView, head: int) -> list[int]:
        """Return fastGen's choice, which must recover a share of the attention inside the window."""
        inside = sum(slow_methods.received(seen, head, seen.tokens)) / (seen.group * seen.tokens)
        assert spec.recovery is not None
        part = spec.model_copy(update={"recovery": spec.recovery * inside})
        return slow_methods.definition("fastgen").kept_by_head(part, seen, head, set(), set())

    def sliding_cache(
        self, spec: PolicySpec, seen: WindowView, unrotated: Tensor, head: int, positions: list[int]
    ) -> SlowCache:
        """Return a cache that may hold more than the window, of which `decode` shows what is inside."""
        budget = slow_methods.resolve(spec, seen.whole.tokens) if spec.name not in ("full", "fastgen") else 10**9
        if spec.decode == "append" or budget >= seen.window:
            group = spec.storage_format.group
            held = seen.window + group - 1 if group > 1 else 10**9
            spec = PolicySpec(name="window", budget=held, storage=spec.storage, residual=spec.residual)
        cache = self.cache(spec, seen, unrotated[:, seen.first :], head, positions)
        if spec.name == "window" and isinstance(spec.budget, int) and spec.budget > seen.window:
            cache.limit = spec.budget  # also where less than the window was kept
        for entry in cache.entries:
            entry.position += seen.first
        cache.prompt = [position + seen.first for position in cache.prompt]
        return cache

    def decode(self, token: int, position: int, caches: list[list[SlowCache]], spec: PolicySpec) -> Tensor:
        hidden = self.model.model.embed_tokens(torch.tensor([token]))
        for layer, window, heads in zip(self.layers, self.windows, caches, strict=True):
            q, k, v = self.project(layer, layer.input_layernorm(hidden))
            rotated, at = self.rotate(k, torch.tensor([position])), position
            for head, cache in enumerate(heads):
                for entry in cache.entries:
                    if window and entry.position <= position - window:
                        entry.score = float("-inf")  # what has left goes first
                cache.add(k[head, 0], rotated[head, 0], v[head, 0], position)
            if spec.name == "streaming_llm" and not window:
                for cache in heads:
                    cache.rotate_at_index(self.rotate_one)
                at = len(heads[0].entries) - 1
            queries = self.rotate(q, torch.tensor([at]))[:, 0]
            shown = [self.shown(cache, position, window) for cache in heads]
            hidden = self.block(layer, hidden, slow_methods.attend(shown, queries).flatten()[None])
        logits: Tensor = self.model.lm_head(self.model.model.norm(hidden[-1]))
        return logits

    @staticmethod
    def shown(cache: SlowCache, position: int, window: int) -> SlowCache:
        shown = SlowCache()
        shown.__dict__.update(cache.__dict__)
        shown.entries = [entry for entry in cache.entries if not window or entry.position > position - window]
        return shown


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return prepare(sliding_model(WINDOW))


def equals_slow_reference(model: LoadedModel, policy: str, length: int, new: int) -> None:
    spec, tokens = PolicySpec.model_validate(policy), random.Random(3).sample(range(VOCABULARY), length)
    reference = SlidingReference(sliding_model(WINDOW))
    expected, expected_logits = reference.generate(tokens, new, budgets.in_force(spec, length, new))
    got, logits = driven(Driver(model), make_request(tokens, new=new, policy=spec))
    slack = 2e-4 if spec.storage == "model" else 0.05
    torch.testing.assert_close(logits, torch.stack(expected_logits), rtol=slack, atol=slack)
    assert got == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_and_logits_equal_the_slow_reference(model, policy, monkeypatch):
    monkeypatch.setattr(slow_methods, "attention_row", windowed_row)
    equals_slow_reference(model, policy, LENGTH, NEW)


@pytest.mark.parametrize("policy", ["full", "window@8", "h2o@8", "snapkv@8:window=3", "tova@8+append"])
@pytest.mark.parametrize(
    ("length", "new"),
    [(WINDOW - 1, 2), (WINDOW - 1, 3), (WINDOW, 2), (WINDOW + 1, 2), (WINDOW - 1, 14), (WINDOW, 14), (WINDOW + 1, 14)],
)
def test_prompts_about_as_long_as_the_window(model, policy, length, new, monkeypatch):
    """The first answer leaves nothing behind, the others cross the window when they begin or on their way."""
    monkeypatch.setattr(slow_methods, "attention_row", windowed_row)
    equals_slow_reference(model, policy, length, new)


@pytest.mark.parametrize("policy", ["full", "h2o@8", "tova@8", "full+kivi4:residual=32"])
def test_slots_with_a_window_are_set_aside_and_resume(policy):
    sliding = prepare(sliding_model(40))
    greedy = [of("greedy", seed, policy=policy, new=60) for seed in range(5)]
    modest = of("modest", 9, policy=policy, new=6)
    expected = undisturbed(sliding, [*greedy, modest])
    together = busy(sliding)
    crowd(together, greedy)
    assert together.run(modest) == expected[5:]
    assert [together.tokens(request.id) for request in greedy] == expected[:5]
    assert together.engine.stats().preempted > 0


@pytest.mark.parametrize("policy", ["full+kivi4:residual=32", "full+kivi2:residual=32"])
def test_groups_leave_a_window_one_by_one(policy, monkeypatch):
    monkeypatch.setattr(slow_methods, "attention_row", windowed_row)
    window, new, tokens = 70, 80, [random.Random(5).randrange(VOCABULARY) for _ in range(100)]
    spec = PolicySpec.model_validate(policy)
    expected, expected_logits = SlidingReference(sliding_model(window)).generate(tokens, new, spec)
    got, logits = driven(Driver(prepare(sliding_model(window))), make_request(tokens, new=new, policy=spec))
    torch.testing.assert_close(logits, torch.stack(expected_logits), rtol=0.05, atol=0.05)
    assert got == expected


@pytest.mark.parametrize("policy", [*POLICIES, "rocketkv@20:window=4,kernel=5", "full+kivi4"])
@pytest.mark.parametrize("length", [12, 40, *(pytest.param(n, marks=pytest.mark.soak(least=0.5)) for n in (5, 11, 13))])
def test_many_requests_at_once_draw_what_each_draws_alone_within_the_bytes_set_aside(model, policy, length):
    spec, requests = PolicySpec.model_validate(policy), []
    for number in range(3):
        tokens = random.Random(number).sample(range(VOCABULARY), length + number)
        requests.append(make_request(tokens, new=16, policy=spec, name=f"request {number}"))
    alone = [Driver(model).run(request)[0] for request in requests]
    together = Driver(model)
    assert together.run(*requests) == alone
    for request in requests:
        in_force = budgets.in_force(spec, len(request.token_ids), 16)
        most = slot_bytes(in_force, model.kv_shape, len(request.token_ids), 16)
        assert together.started(request.id).resident_bytes <= most


def test_a_sliding_layer_never_holds_more_than_its_window(model):
    long, short = (slot_bytes(PolicySpec(), model.kv_shape, tokens, 16) for tokens in (400, 200))
    full = 2 * model.kv_shape.kv_heads * model.kv_shape.head_dim * 4
    assert long - short == full * (size_class(415) - size_class(215))  # of the one layer without a window
    assert row_limit(PolicySpec(), WINDOW, 400, 16, WINDOW) == WINDOW
    assert in_layer(PolicySpec(), WINDOW, 400, 16).label == f"window@{WINDOW}"
    assert in_layer(PolicySpec(), WINDOW, 4, 9) == PolicySpec()  # 12 entries at most: nothing leaves
