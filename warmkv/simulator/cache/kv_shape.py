"""Size of the KV cache of the model that a simulation stands for."""

from __future__ import annotations

from warmkv.config import Config
from warmkv.policies.slot_sizes import KVShape


def kv_shape(config: Config) -> KVShape:
    """Return the configured size of the model's KV cache."""
    model = config.simulator.model
    return KVShape(model.layers, model.kv_heads, model.head_dim, model.dtype_bytes)
