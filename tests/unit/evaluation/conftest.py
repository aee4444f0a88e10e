"""A model of two layers with random weights that reads the tiny model's tokens, and a small plan for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from warmkv.config import ModelConfig
from warmkv.evaluation.plan import EvalPlan
from warmkv.evaluation.tasks import Texts
from warmkv.replicas.loading.load import LoadedModel, prepare
from warmkv.replicas.loading.tokenizer import load_tokenizer

CONTEXT = 768


def random_llama() -> Any:
    """In float32; the same weights every time."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        initializer_range=0.15,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return prepare(random_llama())


@pytest.fixture(scope="session")
def reference() -> Any:
    """Return the same weights with the attention of transformers."""
    return random_llama()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_tokenizer(ModelConfig())


@pytest.fixture(scope="session")
def texts(tokenizer: Any) -> Texts:
    return Texts(tokenizer)


@pytest.fixture(scope="session")
def small() -> EvalPlan:
    return EvalPlan(
        model="random",
        policies=("window", "h2o", "snapkv", "full+kivi4", "adakv+kivi4"),
        budgets=(0.5, 0.1),
        tasks=("needle", "scratch", "code", "stream"),
        lengths=(256, 320),
        depths=(0.0, 1.0),
        samples=1,
        stream_tokens=512,
    )
