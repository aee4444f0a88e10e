"""Step times of a model on a GPU from their sizes: a step takes as long as its arithmetic or its memory traffic.

The roofline model (Williams, Waterman and Patterson, 2009) with an efficiency for each roof and a constant besides.
Operations are two for each weight and token, and four for each query head's dimension and pair of a token with one that
it attends to. Bytes are those of the weights, once a step, and of the KV that is read and written; activations stay in
caches. Of a model with experts all are read in every step, which is so as soon as a few tokens are computed together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from warmkv.gpus import Gpu
from warmkv.model_shape import ModelShape
from warmkv.policies.compression.storage_format import StorageFormat
from warmkv.policy_spec import STORAGES, Storage
from warmkv.simulator.steps.costs import PhaseCosts, Roofline, StepCost, StepKind

OVERHEAD_SECONDS = 0.001  # of each step besides


@dataclass(frozen=True, slots=True)
class RooflineCosts:
    """Step costs of every kind of policy; what of it counts is how it stores entries."""

    by_storage: Mapping[Storage, PhaseCosts]
    described: Mapping[str, Any]  # what they follow from
    overhead: float = 0.0  # outside the replica

    def of(self, kind: StepKind) -> PhaseCosts:
        return self.by_storage[kind.storage]

    def figures(self) -> dict[str, Any]:
        return dict(self.described)


def roofline(model: ModelShape, gpu: Gpu, share: float = 1.0) -> RooflineCosts:
    """Step costs of a whole model on a GPU, or on the share of one that a replica has."""
    parts = {"model": model, "gpu": gpu}
    described = {name: part.model_dump(mode="json") for name, part in parts.items()} | {"gpus_per_replica": share}
    return RooflineCosts({name: _phases(model, gpu, share, storage) for name, storage in STORAGES.items()}, described)


def _phases(model: ModelShape, gpu: Gpu, share: float, storage: StorageFormat) -> PhaseCosts:
    operation = 1 / (gpu.flops * share * gpu.flops_efficiency)  # seconds
    byte = 1 / (gpu.bandwidth * share * gpu.bandwidth_efficiency)  # seconds
    overhead = OVERHEAD_SECONDS
    token, logits = 2 * model.active_weights * operation, 2 * model.head_weights * operation
    pair = 4 * model.layers * model.heads * model.head_dim * operation
    weights = byte * (model.layer_bytes() + model.dtype_bytes * model.head_weights)
    rows = byte * model.layers * model.kv_heads
    kv = rows * STORAGES["model"].entry_bytes(model.head_dim, model.dtype_bytes)
    entry = rows * storage.entry_bytes(model.head_dim, model.dtype_bytes)
    # A chunk has the logits of its last token. Its tokens do not attend to those after them: near half of its square.
    prefill = StepCost(overhead + logits, token + pair / 2, 0.0, pair, -pair / 2)
    # Sequences that decode attend each to its own entries: there are as many pairs as entries.
    decode = StepCost(overhead, token + logits, pair)
    return PhaseCosts(
        prefill=Roofline((prefill, StepCost(overhead + weights, kv, kv))),
        decode=Roofline((decode, StepCost(overhead + weights, entry, entry))),
        hand_off=StepCost(0.0, entry, kv),
    )
