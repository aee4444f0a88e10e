"""Attend a chunk causally behind its prefix on CPUs with AVX-512, by a kernel of ours in C++ (cpu_attention.cpp).

torch's kernel for CPUs multiplies by MKL, which on AMD runs code for AVX2; oneDNN's products, which this one calls, are
twice as fast there. It also makes no mask, and computes little beyond the diagonal.
"""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=512", "-ffp-contract=fast", "-fopenmp")
LIBRARY = ("-std=c++17", "-fPIC", "-shared")
COMPILE_SECONDS = 120.0
LEAST_QUERIES = 16
"""Fewer do not pay for the keys before them, which are transposed."""
LEAST_ALONE = 48
"""Nor do fewer with no keys before them: a product is of 64 keys at least."""
CLOSE = 1e-5  # to what torch computes, of values around 1

_kernel: Any = None  # of this process, once it has been loaded


def load() -> bool:
    """Compile the kernel for this machine, in about a second, and use it from now on; return False if there is none.

    It is left out, with a line in the log, where there is no C++ compiler, no AVX-512, or it does not compute what
    torch does.
    """
    global _kernel
    if _kernel is None and "AVX512" in torch.backends.cpu.get_cpu_capability():
        try:
            kernel = _compile()
            _check(kernel)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            says = getattr(error, "stderr", None) or error
            log.warning("prompts are attended by torch's kernel, since that of warmkv does not run here: %s", says)
        else:
            _kernel = kernel
    return _kernel is not None


def takes(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return True if the kernel attends q [1, q_heads, n, d] to k and v [1, kv_heads, m, d], faster than torch."""
    least = LEAST_QUERIES if keys.shape[2] > query.shape[2] else LEAST_ALONE
    return (
        _kernel is not None
        and query.shape[2] >= least
        and all(
            each.device.type == "cpu" and each.dtype == torch.float32 and each.stride(-1) == 1
            for each in (query, keys, values)
        )
    )


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int) -> Tensor:
    """Attend q [1, q_heads, n, d], the last n of m positions, to keys and values [1, kv_heads, m, d].

    Each query sees the keys up to its own, the newest `window` of these, or all if that is 0. Returns the shape of q.
    Raises RuntimeError if oneDNN has no kernel, or there is no memory for blocks.
    """
    return _attend(_kernel, query, keys, values, scale, window)


def _attend(kernel: Any, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int) -> Tensor:
    (_, q_heads, n, d), (_, kv_heads, m, _) = query.shape, keys.shape
    out = query.new_empty(1, n, q_heads, d).transpose(1, 2)
    tensors = query, keys, values, out
    strides = [stride for each in tensors for stride in each.stride()[1:3]]
    failed = kernel(
        *(each.data_ptr() for each in tensors), kv_heads, q_heads // kv_heads, n, m, d, *strides,
        scale, window, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise RuntimeError("oneDNN has no kernel for this attention, or there is no memory")
    return out


def _compile() -> Any:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("there is no C++ compiler (g++)")
    libraries = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory() as folder:  # of this process alone: nobody else can put a library there
        made = Path(folder) / "cpu_attention.so"
        link = [f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
        command = [compiler, *FLAGS, *LIBRARY, str(SOURCE), "-o", str(made), *link]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        kernel = ctypes.CDLL(str(made)).warmkv_attend
    kernel.argtypes = [
        *[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 13, ctypes.c_double, ctypes.c_int64, ctypes.c_int,
    ]  # fmt: skip
    kernel.restype = ctypes.c_int
    return kernel


def _check(kernel: Any) -> None:
    """Raise RuntimeError unless a kernel computes what torch does."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, heads, 40, 16, generator=generator) for heads in (4, 2, 2))
    expected = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=0.25, enable_gqa=True)
    if not torch.allclose(_attend(kernel, query, keys, values, 0.25, 0), expected, atol=CLOSE):
        raise RuntimeError("it computes something else than torch")
