"""What is raced: the model's shape, the lengths, the repeats."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from warmkv.replicas.loading.load import LoadedModel, prepare
from warmkv.replicas.loading.malloc import grow_segments

COMMON: dict[str, Any] = {
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "sdpa",
}
SHAPES: dict[str, dict[str, float]] = {
    "tiny": {
        "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16_384,
        "initializer_range": 0.1,
    },
    "27M": {
        "vocab_size": 8_192, "hidden_size": 512, "intermediate_size": 1_408, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 65_536,
        "initializer_range": 0.05,
    },
    "8B": {
        "vocab_size": 128_256, "hidden_size": 4_096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Llama shapes by name: one for checking the script, one of 26.7 M parameters for CPUs, that of Llama 3 8B for GPUs.

Weights are spread so far that what a model draws depends on its context."""


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of the serving race: lengths in tokens, taken in turn."""

    requests: int
    prompts: tuple[int, ...]
    new_tokens: tuple[int, ...]
    budget: int  # of snapkv, in tokens
    limit: int  # of KV memory, in tokens of a full cache
    chunk: int  # prompt tokens computed at a time


@dataclass(frozen=True, slots=True)
class Setting:
    """One run of the race. Lengths in tokens."""

    shape: str
    device: str
    dtype: str
    load: Load
    context: int = 16_384  # before decoding
    sequences: int = 8  # that decode together
    new_tokens: int = 128
    budget: int = 512  # of snapkv in the decode race
    memory_budget: int = 1_024  # of snapkv where memory and the hand-off are measured
    prompt: int = 8_192  # where prompts are computed
    repeats: int = 5
    seconds: float = 20.0  # of decoding that one contestant is timed for in a repeat, at most
    copy_bytes: int = 1 << 28  # copied to measure the bandwidth
    seed: int = 0
    compile: bool = True  # the peer with the static cache
    engine: tuple[tuple[str, str], ...] = ()  # settings of warmkv's engine other than its defaults
    minutes: float | None = None  # within which the repeats begin
    quick: bool = False

    def document(self) -> dict[str, Any]:
        return asdict(self)


ON_CPU = Setting(
    "27M",
    "cpu",
    "float32",
    Load(16, (256, 512, 1_024, 2_048), (384, 128, 256, 512), budget=256, limit=8_192, chunk=512),
)
ON_CUDA = Setting(
    "8B",
    "cuda",
    "bfloat16",
    Load(32, (1_024, 2_048, 4_096, 8_192), (192, 64, 128, 256), budget=512, limit=65_536, chunk=2_048),
    sequences=32,
    repeats=3,
    seconds=4.0,
    copy_bytes=1 << 32,
)


def quick(setting: Setting) -> Setting:
    """Return the same with a model and lengths that take seconds: for checking, not for figures."""
    return replace(
        setting,
        shape="tiny",
        context=512,
        sequences=2,
        new_tokens=8,
        budget=48,
        memory_budget=64,
        prompt=512,
        repeats=2,
        seconds=0.5,
        copy_bytes=1 << 24,
        compile=False,
        quick=True,
        load=Load(4, (32, 64, 128), (4, 8), budget=48, limit=512, chunk=64),
    )


def fitted(setting: Setting, token_bytes: int, free: int) -> Setting:
    """Return the same with as many sequences, at most, as have their full caches and a quarter more in `free` bytes."""
    each = (setting.context + setting.new_tokens) * token_bytes
    return replace(setting, sequences=max(1, min(setting.sequences, 4 * free // (5 * each))))


@dataclass(frozen=True, slots=True)
class Models:
    """One set of random weights behind both attentions."""

    peer: Any  # a transformers model that attends by sdpa
    warm: LoadedModel

    @property
    def device(self) -> torch.device:
        return self.warm.device

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads: of an embedding that is not the output layer too, only rows."""
        module = self.peer
        embedding = module.get_input_embeddings().weight
        unread = embedding.nbytes if module.get_output_embeddings().weight is not embedding else 0
        return int(sum(parameter.nbytes for parameter in module.parameters()) - unread)


def build(setting: Setting) -> Models:
    """Return both models of a setting; their parameters are the same tensors."""
    torch.manual_seed(setting.seed)
    if setting.device.startswith("cuda"):
        grow_segments()
    config = LlamaConfig(**{**COMMON, **SHAPES[setting.shape]})
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, setting.dtype))
    try:
        with torch.device(setting.device):
            peer = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    peer.eval().requires_grad_(False)
    twin = copy.deepcopy(peer, {id(parameter): parameter for parameter in peer.parameters()})
    return Models(peer, prepare(twin))
