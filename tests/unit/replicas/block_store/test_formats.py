from typing import get_args

import pytest
import torch

from warmkv.config import BlockStorage
from warmkv.policies.slot_sizes import KVShape
from warmkv.policies.tiers import weight
from warmkv.policy_spec import STORAGES
from warmkv.replicas.block_store.formats import pack, repack, unpack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 31, 32, 64, 70])
@pytest.mark.parametrize("storage", get_args(BlockStorage))
def test_bytes_are_what_the_rules_say_and_numbers_come_back(storage, tokens, dtype):
    shape = KVShape(layers=2, kv_heads=3, head_dim=48, dtype_bytes=dtype.itemsize)
    block = torch.randn(2, 2, 3, tokens, 48, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    packed = pack(block, tokens, storage)
    assert packed.nbytes == weight(storage, shape)(tokens * shape.token_bytes, tokens)
    back = unpack(packed, dtype)
    assert (back.shape, back.dtype) == (block.shape, dtype)
    kept = STORAGES[storage]
    assert (back.float() - block.float()).abs().max() <= (0 if kept.plain else 0.6)
    whole = tokens // kept.group * kept.group
    assert torch.equal(back[..., whole:, :], block[..., whole:, :])
    assert unpack(repack(packed, "model", dtype), dtype).equal(back)


def test_what_is_no_kv_stays_as_it_is():
    sums = torch.rand(2, 3, 70)
    for storage in get_args(BlockStorage):
        assert unpack(pack(sums, 0, storage), torch.bfloat16) is sums
        assert repack(pack(sums, 0, "model"), storage, torch.float32).parts == (sums,)
