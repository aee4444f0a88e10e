"""Column sums by kernels against those by torch, which have a matrix of logits for some queries."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warmkv.policies.compression import prefill_state
from warmkv.policies.compression.prefill_state import add_column_sums
from warmkv.policies.compression.softmax import Softmax

pytest.importorskip("triton", reason="triton is not installed")


@given(
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([8, 80]),
    start=st.sampled_from([0, 5, 70]),
    count=st.sampled_from([1, 40, 130]),
    window=st.sampled_from([0, 0, 20]),
    softcap=st.sampled_from([None, 1.5]),
    learned=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=8)
def test_keys_receive_what_torch_says(
    device, kv_heads, group, head_dim, start, count, window, softcap, learned, dtype, seed
):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    end = start + count
    queries = normal(count, kv_heads * group, head_dim).transpose(0, 1)  # as a model gives them
    keys = normal(kv_heads, end + 9, head_dim)[:, :end]  # as they lie in a prompt's workspace
    softmax = Softmax(head_dim**-0.5, softcap, normal(kv_heads * group) if learned else None, window)
    got, wanted = (torch.full((kv_heads, end + 4), 0.5, device=device) for _ in range(2))
    add_column_sums(got, queries, keys, start, softmax)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_state, "is_available", lambda device: False)
        add_column_sums(wanted, queries, keys, start, softmax)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert (got[:, end:] == 0.5).all()


COMPILES = """
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

capability = int(sys.argv[1])


class NoDriver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", capability, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


driver.set_active(NoDriver())
run, compiled = JITFunction.run, []
JITFunction.run = lambda self, *args, grid, warmup, **given: compiled.append(
    run(self, *args, grid=grid, warmup=True, **given)
)

from warmkv.policies.compression.column_kernels import add_column_sums
from warmkv.policies.compression.softmax import Softmax

half = {"dtype": torch.float16}
add_column_sums(torch.zeros(2, 128), torch.zeros(8, 128, 128, **half), torch.zeros(2, 128, 128, **half), 0, Softmax())
assert len(compiled) == 2, compiled
assert all("mma.sync" in kernel.asm["ptx"] or "wgmma" in kernel.asm["ptx"] for kernel in compiled), "no tensor cores"
print(*(kernel.metadata.shared for kernel in compiled))
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.soak)])
def test_they_compile_for_a_gpu_that_is_not_there(tmp_path, capability):
    ran = subprocess.run(
        [sys.executable, "-c", COMPILES, str(capability)],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert max(int(size) for size in ran.stdout.split()) <= 99 * 1024
