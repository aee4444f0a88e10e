"""Attend on CPUs with AVX-512 by kernels of ours in C++ (cpu/): a chunk behind its prefix, and one query per row.

torch's kernel for chunks multiplies by MKL, which on AMD runs code for AVX2; oneDNN's products, which ours calls, are
twice as fast there. It also makes no mask, and computes little beyond the diagonal. Rows are read once each, as far as
they are in use, where torch multiplies matrices of as many rows as a group has query heads.
"""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

SOURCES = tuple(Path(__file__).parent / "cpu" / name for name in ("prompts.cpp", "rows.cpp"))
FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=512", "-ffp-contract=fast", "-fopenmp")
LIBRARY = ("-std=c++17", "-fPIC", "-shared")
COMPILE_SECONDS = 120.0
LEAST_QUERIES = 16
"""Fewer do not pay for the keys before them, which are transposed."""
LEAST_ALONE = 48
"""Nor do fewer with no keys before them: a product is of 32 keys at least."""
CHANNELS = 16
"""Heads of rows have a multiple of so many."""
CLOSE = 1e-5  # to what torch computes, of values around 1


class Kernels(NamedTuple):
    """The functions of the library."""

    chunk: Any
    rows: Any


_kernels: Kernels | None = None  # of this process, once they have been loaded


def load() -> bool:
    """Compile the kernels for this machine, in two seconds, and use them from now on; return False if there are none.

    They are left out, with a line in the log, where there is no C++ compiler, no AVX-512, or they do not compute what
    torch does.
    """
    global _kernels
    if _kernels is None and "AVX512" in torch.backends.cpu.get_cpu_capability():
        try:
            _kernels = _compile()
            _check()
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            _kernels = None
            says = getattr(error, "stderr", None) or error
            log.warning("torch's kernels attend, since those of warmkv do not run here: %s", says)
    return _kernels is not None


def is_loaded() -> bool:
    """Return True if there are kernels to be used."""
    return _kernels is not None


def takes(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return True if `attend` takes q [1, q_heads, n, d] and k and v [1, kv_heads, m, d], and is faster than torch."""
    least = LEAST_QUERIES if keys.shape[2] > query.shape[2] else LEAST_ALONE
    return query.shape[2] >= least and _reads(query, keys, values)


def takes_rows(query: Tensor, *others: Tensor) -> bool:
    """Return True if `attend_rows` takes q [places, group, d], and a key and a value [places, d]."""
    return query.shape[2] % CHANNELS == 0 and _reads(query, *others)


def _reads(*tensors: Tensor) -> bool:
    return _kernels is not None and all(
        each.device.type == "cpu" and each.dtype == torch.float32 and each.stride(-1) == 1 for each in tensors
    )


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int) -> Tensor:
    """Attend q [1, q_heads, n, d], the last n of m positions, to keys and values [1, kv_heads, m, d].

    Each query sees the keys up to its own, the newest `window` of these, or all if that is 0. Returns the shape of q.
    Raises RuntimeError if oneDNN has no kernel, or there is no memory for blocks.
    """
    assert _kernels is not None
    (_, q_heads, n, d), (_, kv_heads, m, _) = query.shape, keys.shape
    out = query.new_empty(1, n, q_heads, d).transpose(1, 2)
    tensors = query, keys, values, out
    strides = [stride for each in tensors for stride in each.stride()[1:3]]
    failed = _kernels.chunk(
        *(each.data_ptr() for each in tensors), kv_heads, q_heads // kv_heads, n, m, d, *strides,
        scale, window, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise RuntimeError("oneDNN has no kernel for this attention, or there is no memory")
    return out


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    entries: Tensor,
    lengths: Tensor,
    places: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Attend rows anywhere in memory, each with the query at its place in q [places, group, d].

    keys, values int64 [n] are the addresses of rows [capacity, d] without gaps. What is at the row's place of key and
    value [places, d] is put to its entry of int64 [n]; then it sees its first `lengths` int64 [n] entries. `out`
    [places, group, d], without gaps, takes what each gets at its place, zeros in rows without entries. Raises
    RuntimeError if there is no memory; nothing has changed then.
    """
    assert _kernels is not None
    _, group, d = query.shape
    failed = _kernels.rows(
        *(each.data_ptr() for each in (query, key, value, keys, values, out, entries, lengths, places)), len(places),
        group, d, *query.stride()[:2], key.stride(0), value.stride(0), scale, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise RuntimeError("there is no memory to attend in")


def _compile() -> Kernels:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("there is no C++ compiler (g++)")
    libraries = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory() as folder:  # of this process alone: nobody else can put a library there
        made = Path(folder) / "cpu_attention.so"
        link = [f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
        command = [compiler, *FLAGS, *LIBRARY, *map(str, SOURCES), "-o", str(made), *link]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        library = ctypes.CDLL(str(made))
    chunk, rows = library.warmkv_attend, library.warmkv_attend_rows
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    chunk.argtypes = [*[pointer] * 4, *[number] * 13, ctypes.c_double, number, ctypes.c_int]
    rows.argtypes = [*[pointer] * 9, *[number] * 7, ctypes.c_double, ctypes.c_int]
    chunk.restype = rows.restype = ctypes.c_int
    return Kernels(chunk, rows)


def _check() -> None:
    """Raise RuntimeError unless the kernels compute what torch does."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, heads, 40, 16, generator=generator) for heads in (4, 2, 2))
    expected = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=0.25, enable_gqa=True)
    found = attend(query, keys, values, 0.25, 0)
    rows, at, last = query[0, :, -1].view(2, 2, 16), torch.full((2,), 39), torch.empty(2, 2, 16)
    new = keys[0, :, -1].clone(), values[0, :, -1].clone()
    of_keys, of_values = (torch.tensor([head.data_ptr() for head in each[0]]) for each in (keys, values))
    attend_rows(rows, *new, of_keys, of_values, at, at + 1, torch.arange(2), 0.25, last)
    both = (found, expected), (last.view(4, 16), expected[0, :, -1])
    if not all(torch.allclose(*each, atol=CLOSE) for each in both):
        raise RuntimeError("they compute something else than torch")
