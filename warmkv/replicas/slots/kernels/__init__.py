"""Decode attention on a GPU: what `attention.py` means, in a few launches over rows as they are stored.

`supports` tells whether the kernels take what a slab stores; `attention.py` computes where they do not. Triton is
imported by the first call that runs a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warmkv.policies.compression.softmax import Softmax
from warmkv.policies.compression.storage_format import StorageFormat
from warmkv.policies.compression.triton_support import is_available
from warmkv.policy_spec import STORAGES

if TYPE_CHECKING:
    from warmkv.replicas.slots.row_tables import RowBatch, RowTables

_TYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(slots=True)
class LaunchProgress:
    """Record what a step has done with some rows in a layer, which a retry skips."""

    put: bool = False  # the new tokens have their places
    counted: bool = False  # what entries received is counted


def supports(storage: StorageFormat, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if kernels read and write a storage format on a device, for a model's dtype."""
    return storage.kernel is not None and dtype in _TYPES and is_available(device) and _writes(storage)


def supports_pages(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if kernels read rows in pages."""
    return supports(STORAGES["model"], dtype, device)


@lru_cache(maxsize=64)
def _writes(storage: StorageFormat) -> bool:
    """Return True if the format's kernels can encode one entry, or new entries wait until a group is packed."""
    return storage.group > 1 or import_module(storage.kernel or "").READER.put is not None


def attend(
    batch: RowBatch,
    tables: RowTables,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax: Softmax,
    out: Tensor,
    progress: LaunchProgress,
) -> None:
    """Put the new token of each row of a batch in and attend.

    q [sequences, q_heads, d], k and v [sequences, kv_heads, d] as they lie; the places of the rows in `out`
    [sequences, q_heads, d], contiguous, are written, with zeros where a row sees nothing. May be called again with the
    same step if it failed here or in a later layer, and gives the same.

    Source: Flash-Decoding (Dao et al., 2023) for the splits, FlashAttention (arXiv 2205.14135) for the online softmax.
    """
    from warmkv.replicas.slots.kernels import launch

    launch.attend(batch, tables, layer, query, key, value, softmax, out, progress)
