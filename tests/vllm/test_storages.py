"""Check the formats of vLLM's cache: what plans and replays count for them, and how exact they are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from warmkv.config.engine import VLLM_STORAGES
from warmkv.policies.compression.storages.int4 import Int4
from warmkv.policy_spec import STORAGES

pytest.importorskip("vllm", reason="make test-vllm")

BLOCK, KV_HEADS = 32, 3


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("storage", VLLM_STORAGES)
def test_an_entry_takes_what_is_counted_for_it(storage, head_dim):
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    name = VLLM_STORAGES[storage]
    dtype = torch.bfloat16 if name == "auto" else STR_DTYPE_TO_TORCH_DTYPE[name]
    spec = FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=KV_HEADS,
        head_size=head_dim,
        dtype=dtype,
        kv_quant_mode=get_kv_quant_mode(name),
    )
    page = TritonAttentionBackend.customize_spec(spec).page_size_bytes
    assert page == BLOCK * KV_HEADS * STORAGES[storage].entry_bytes(head_dim, 2)


WRITES = """
import sys
import torch, triton, triton.language, vllm.triton_utils as by_vllm

by_vllm.triton, by_vllm.tl, by_vllm.HAS_TRITON = triton, triton.language, True  # Triton's interpreter, without a GPU

from vllm.v1.attention.ops import int4_per_token_head as int4

keys = torch.load(sys.argv[1])
tokens, heads, head_dim = keys.shape
codes = [torch.zeros(1, tokens, heads, head_dim // 2, dtype=torch.uint8) for _ in range(2)]
scales = [torch.zeros(1, tokens, heads) for _ in range(2)]
int4.reshape_and_cache_int4(
    keys, -keys, *codes, torch.arange(tokens), k_scale_cache=scales[0], v_scale_cache=scales[1]
)
bits = scales[0].view(torch.int32)  # the lowest four are the zero point
pairs = torch.stack([codes[0] & 15, codes[0] >> 4], -1).flatten(-2)
turned = (pairs.float() - (bits & 15)[..., None]) * (bits & -16).view(torch.float32)[..., None]
torch.save(int4.single_rht(turned, inverse=True)[0] / head_dim, sys.argv[2])
"""


def test_int4_is_as_exact_as_what_vllms_kernel_writes(tmp_path):
    keys = torch.randn(24, 2, 64, generator=torch.Generator().manual_seed(0))
    keys[..., 3] = 10 * keys[..., 3] + 20  # as keys of models have it
    torch.save(keys, tmp_path / "keys.pt")
    ran = subprocess.run(
        [sys.executable, "-c", WRITES, str(tmp_path / "keys.pt"), str(tmp_path / "kept.pt")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    own = Int4()
    of_vllm, of_ours = (
        torch.load(tmp_path / "kept.pt"),
        own.from_basis(own.decode_keys(own.encode_keys(keys), keys.dtype)),
    )
    errors = [float((kept - keys).square().sum() / keys.square().sum()) for kept in (of_ours, of_vllm)]
    assert errors[1] == pytest.approx(errors[0], rel=0.2)
    assert errors[1] < 0.01
