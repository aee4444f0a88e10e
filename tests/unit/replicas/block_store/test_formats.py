import pytest
import torch

from warmkv.policies.slot_sizes import KVShape
from warmkv.policies.tiers import weight
from warmkv.replicas.block_store.formats import pack, repack, unpack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 31, 32, 64, 70])
@pytest.mark.parametrize("storage", ["model", "fp8", "kivi4"])
def test_bytes_are_what_the_rules_say_and_numbers_come_back(storage, tokens, dtype):
    shape = KVShape(layers=2, kv_heads=3, head_dim=48, dtype_bytes=dtype.itemsize)
    block = torch.randn(2, 2, 3, tokens, 48, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    packed = pack(block, tokens, storage)
    assert packed.nbytes == weight(storage, shape)(tokens * shape.token_bytes, tokens)
    back = unpack(packed, dtype)
    assert (back.shape, back.dtype) == (block.shape, dtype)
    bound = {"model": 0.0, "fp8": 0.3, "kivi4": 0.6}[storage]
    assert (back.float() - block.float()).abs().max() <= bound
    if storage == "kivi4":
        assert torch.equal(back[..., tokens // 32 * 32 :, :], block[..., tokens // 32 * 32 :, :])
    assert unpack(repack(packed, "model", dtype), dtype).equal(back)


def test_what_is_no_kv_stays_as_it_is():
    sums = torch.rand(2, 3, 70)
    for storage in ("model", "fp8", "kivi4"):
        assert unpack(pack(sums, 0, storage), torch.bfloat16) is sums
        assert repack(pack(sums, 0, "model"), storage, torch.float32).parts == (sums,)
