"""Small models with random weights, in float32, and an engine that a test steps by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from warmkv.config import EngineConfig, PrefixCacheConfig
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes import hashing
from warmkv.prefixes.record import Candidate, Mark
from warmkv.replicas.constraints.compiler import Compiler
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.loading.load import LoadedModel, prepare
from warmkv.replicas.protocol import Finished, GenerateRequest, SamplingParams, Started, TokenLogprobs

VOCABULARY = 97
ROOT = hashing.chain_root(b"test", "model")
BLOCK = 8
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.15,  # wide enough that attention and argmax are far from uniform
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE)),
    "llama-mha": lambda: LlamaForCausalLM(LlamaConfig(**{**_SHAPE, "num_key_value_heads": 4})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=8)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=None)),
}


def random_model(family: str) -> Any:
    """Return a transformers model in float32 whose weights depend on the family alone."""
    torch.manual_seed(sum(map(ord, family)))
    return FAMILIES[family]().eval()


@pytest.fixture(scope="session")
def models() -> dict[str, LoadedModel]:
    """Return the families with warmkv's attention; `reference` makes the same weights with transformers' own."""
    return {family: prepare(random_model(family)) for family in FAMILIES}


def replace_eos(model: LoadedModel, token: int) -> LoadedModel:
    """The same model, whose answers end with a token."""
    return replace(model, eos_ids=frozenset([token]))


@pytest.fixture(scope="session")
def references() -> dict[str, Any]:
    return {family: random_model(family) for family in FAMILIES}


def make_request(
    tokens: list[int],
    *,
    new: int = 8,
    policy: str | PolicySpec = "full",
    marks: dict[int, str] | None = None,
    reads: list[int] | None = None,
    name: str = "request",
    block: int = BLOCK,
    **sampling: Any,
) -> GenerateRequest:
    """Return a request as the gateway makes it: hashes, keys of marks and of the positions to read."""
    hashes = hashing.block_hashes(tokens, block, ROOT)

    def key(position: int) -> bytes:
        return hashing.prefix_key(tokens, position, block, hashes, ROOT)

    return GenerateRequest(
        id=name,
        token_ids=tuple(tokens),
        hashes=tuple(hashes),
        sampling=SamplingParams(max_tokens=new, **{"temperature": 0.0, **sampling}),
        policy=PolicySpec.model_validate(policy),
        marks=tuple(Mark(at, ttl, key(at)) for at, ttl in (marks or {}).items()),
        reads=tuple(Candidate(at, key(at)) for at in sorted(reads or [], reverse=True)),
    )


class Driver:
    """Steps an engine until all requests have ended, and keeps what each was told."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        clock: Callable[[], float] = lambda: 0.0,
        compiler: Compiler | None = None,
        keys_per_token: float = math.inf,  # of models as small as these it is a few dozen: no step would be as another
        **settings: Any,
    ) -> None:
        self.compiler = compiler
        cache = {"block_size": BLOCK, "min_tokens": 1, **settings.pop("prefix_cache", {})}
        settings = {"step_tokens": 16, "kv_bytes": 1 << 26, **settings}
        self.events: list[tuple[list[bytes], list[bytes]]] = []
        self.engine = Engine(
            model,
            EngineConfig(**settings),
            PrefixCacheConfig(**cache),
            clock=clock,
            publish=lambda stored, evicted, tier: self.events.append((list(stored), list(evicted))),
        )
        self.engine.scheduler.keys_per_token = keys_per_token
        self.told: dict[str, list[Any]] = {}

    def submit(self, *requests: GenerateRequest) -> None:
        for request in requests:
            constraint = request.sampling.constraint
            matcher = self.compiler.matcher(constraint) if self.compiler and constraint else None
            self.engine.submit(request, self.told.setdefault(request.id, []).append, matcher)

    def run(self, *requests: GenerateRequest) -> list[list[int]]:
        """Submit, step until nothing is left, return the tokens of each request."""
        self.submit(*requests)
        while self.engine.step():
            pass
        return [self.tokens(request.id) for request in requests]

    def tokens(self, name: str) -> list[int]:
        told = (event.token if isinstance(event, TokenLogprobs) else event for event in self.told[name])
        return [event for event in told if isinstance(event, int)]

    def logprobs(self, name: str) -> list[TokenLogprobs]:
        return [event for event in self.told[name] if isinstance(event, TokenLogprobs)]

    def started(self, name: str) -> Started:
        return next(event for event in self.told[name] if isinstance(event, Started))

    def finished(self, name: str) -> Finished:
        last = self.told[name][-1]
        assert isinstance(last, Finished)
        return last


@pytest.fixture
def driver(models: dict[str, LoadedModel]) -> Callable[..., Driver]:
    return lambda family="llama", **settings: Driver(models[family], **settings)
