"""What the kernels do with rows in pages, as loops over addresses: quick, where Triton's interpreter is slow."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from warmkv.policies.compression.softmax import Softmax
from warmkv.replicas.slots import kernels
from warmkv.replicas.slots.kernels import LaunchProgress
from warmkv.replicas.slots.row_facts import FACTS, PARTS
from warmkv.replicas.slots.row_tables import NUMBERS, RowBatch, RowTables


def at_address(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the elements that lie at an address, as a view."""
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


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
    """Do what `kernels.attend` says, for rows in pages."""
    heads, dim = key.shape[1:]
    queries = query.reshape(len(query) * heads, -1, dim)
    for row, place in zip(batch.rows.tolist(), batch.places.tolist(), strict=True):
        if row < 0:
            out.view(-1, *queries.shape[1:])[place] = 0
            continue
        numbers = dict(zip(NUMBERS, tables.numbers[:, row].tolist(), strict=True))
        facts = dict(zip(FACTS, tables.facts[2 * len(PARTS) :, row].tolist(), strict=True))
        size, length, page = facts["page_size"], numbers["packed"], numbers["entry"] // facts["page_size"]
        assert 0 < length <= facts["capacity"]
        held = []
        for name, fresh in (("keys", key), ("values", value)):
            at = PARTS.index(name)
            listed = at_address(int(tables.facts[at, row]), -(-length // size), torch.int64)
            listed[page] = numbers[f"page_{name}"]
            further = layer * int(tables.facts[len(PARTS) + at, row])
            at_address(int(listed[page]) + further, size * dim, key.dtype).view(size, dim)[numbers["entry"] % size] = (
                fresh[place // heads, place % heads]
            )
            pages = [
                at_address(address + further, min(size, length - first * size) * dim, key.dtype)
                for first, address in enumerate(listed.tolist())
            ]
            held.append(torch.cat(pages).view(-1, dim).float())
        weights = (queries[place].float() @ held[0].T * softmax.scale).softmax(dim=-1)
        out[place] = (weights @ held[1]).to(query.dtype)


def use(patch: pytest.MonkeyPatch) -> None:
    """Let slots lie in pages on a CPU without kernels, and all others in slabs as they do there."""
    patch.setattr(kernels, "supports_pages", lambda dtype, device: True)
    patch.setattr(kernels, "attend", attend)
