"""What the kernels do with rows in pages, as loops over addresses: quick, where Triton's interpreter is slow."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from warmkv.replicas.slots import kernels


def at_address(address: int, start: int, count: int, like: Tensor) -> Tensor:
    """Return the `count` elements that lie `start` elements behind an address, as a view."""
    size = like.element_size()
    memory = (ctypes.c_char * (count * size)).from_address(address + start * size)
    return torch.frombuffer(memory, dtype=like.dtype)


def attend(query: Tensor, table: Tensor, offsets: Tensor, lengths: Tensor, size: int, scale: float) -> Tensor:
    """Do what `kernels.attend_in_pages` says."""
    out, dim = torch.zeros_like(query), query.shape[-1]
    for row, length in enumerate(lengths.tolist()):
        if not length:
            continue
        entries = [
            torch.cat(
                [
                    at_address(address, offset, min(size, length - at * size) * dim, query)
                    for at, address in enumerate(table[row, : -(-length // size)].tolist())
                ]
            ).view(-1, dim)
            for offset in offsets.tolist()
        ]
        weights = (query[row].float() @ entries[0].float().T * scale).softmax(dim=-1)
        out[row] = (weights @ entries[1].float()).to(query.dtype)
    return out


def write(keys: Tensor, values: Tensor, table: Tensor, offsets: Tensor, entries: Tensor, size: int) -> None:
    """Do what `kernels.write_pages` says."""
    dim = keys.shape[1]
    for row, entry in enumerate(entries.tolist()):
        if entry >= 0:
            for fresh, offset in zip((keys, values), offsets.tolist(), strict=True):
                start = offset + entry % size * dim
                at_address(int(table[row, entry // size]), start, dim, keys)[:] = fresh[row]


def use(patch: pytest.MonkeyPatch) -> None:
    """Let slots lie in pages on a CPU without kernels."""
    patch.setattr(kernels, "reads_pages", lambda dtype, device: True)
    patch.setattr(kernels, "attend_in_pages", attend)
    patch.setattr(kernels, "write_pages", write)
