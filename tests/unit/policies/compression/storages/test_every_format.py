"""What holds for every storage format, whatever it does to numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policies.compression.storages.inputs import HEAD_DIMS, noise
from warmkv.policies.compression.packing import pack, unpack
from warmkv.policy_spec import STORAGES

NAMES = list(STORAGES)


@pytest.mark.parametrize("name", NAMES)
def test_a_storage_is_found_by_its_name(name):
    assert STORAGES[name].name == name


def test_an_unknown_storage_is_refused():
    with pytest.raises(KeyError, match="no storage is called 'int7'; there are fp8, int4, kivi2"):
        STORAGES["int7"]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_entry_weighs_what_is_promised(name, head_dim, dtype):
    entries, kept = 64, STORAGES[name]
    x = noise(entries, head_dim).to(dtype)
    parts = (*kept.encode_keys(x), *kept.encode_values(x))
    stored = sum(part.untyped_storage().nbytes() for part in parts) if name != "model" else 2 * x.nbytes
    assert kept.entry_bytes(head_dim, dtype.itemsize) == stored / entries


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3)])
def test_leading_dimensions_stand_alone(name, lead):
    kept, x = STORAGES[name], noise(*lead, 64, 16)
    for encode, decode in ((kept.encode_keys, kept.decode_keys), (kept.encode_values, kept.decode_values)):
        parts = encode(x)
        assert all(part.shape[: len(lead) + 1] == (*lead, 64 // kept.group) for part in parts)
        decoded = decode(parts, torch.float32)
        assert decoded.shape == x.shape
        for index in np.ndindex(*lead):
            alone = decode(encode(x[index]), torch.float32)
            torch.testing.assert_close(decoded[index], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_groups_can_be_put_into_a_slab(name):
    """A slab is allocated from zeros, groups of two slots are overwritten by index, all of it is decoded."""
    kept = STORAGES[name]
    slab = kept.encode_keys(torch.zeros(2, 4 * kept.group, 16))
    assert not kept.decode_keys(slab, torch.float32).any()
    new = noise(2, kept.group, 16)
    slots, groups = torch.tensor([0, 1]), torch.tensor([3, 1])
    for part, piece in zip(slab, kept.encode_keys(new), strict=True):
        part[slots, groups] = piece[:, 0]
    decoded = kept.decode_keys(slab, torch.float32).unflatten(1, (4, kept.group))
    torch.testing.assert_close(decoded[slots, groups], kept.decode_keys(kept.encode_keys(new), torch.float32))
    decoded[slots, groups] = 0
    assert not decoded.any()


@pytest.mark.parametrize("name", [name for name in NAMES if not STORAGES[name].plain])
def test_parts_are_of_types_that_every_device_can_scatter(name):
    kept, x = STORAGES[name], noise(32, 16)
    assert {part.dtype for part in (*kept.encode_keys(x), *kept.encode_values(x))} <= {torch.uint8, torch.float16}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_in_the_basis_of_a_codec_is_attention(name, dtype):
    """Types are kept, and the queries' and the outputs' basis fit that of keys and values."""
    kept = STORAGES[name]
    keys, values, queries = noise(3, 2, 64, 64).to(dtype)
    near = kept.decode_keys(kept.encode_keys(keys), dtype), kept.decode_values(kept.encode_values(values), dtype)
    turned = kept.to_basis(queries)
    assert {turned.dtype, near[0].dtype, near[1].dtype} == {dtype}
    output = kept.from_basis((turned @ near[0].mT / 8).softmax(-1) @ near[1])
    assert output.dtype == dtype
    back = [kept.from_basis(x.float()) for x in near]
    expected = (queries.float() @ back[0].mT / 8).softmax(-1) @ back[1]
    slack = 4 * torch.finfo(dtype).eps + 1e-5
    torch.testing.assert_close(output.float(), expected, rtol=8 * slack, atol=8 * slack)
    plain = (queries.float() @ keys.float().mT / 8).softmax(-1) @ values.float()
    assert (expected - plain).norm() < 0.6 * plain.norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.filterwarnings("error:.*lru_cache")
def test_a_compiler_sees_one_graph(name, head_dim):
    kept = STORAGES[name]

    def roundtrip(x):
        keys = kept.decode_keys(kept.encode_keys(x), x.dtype)
        return kept.to_basis(x) @ keys.mT, kept.from_basis(kept.decode_values(kept.encode_values(x), x.dtype))

    torch._dynamo.reset()
    x = noise(32, head_dim)
    compiled = torch.compile(roundtrip, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, roundtrip(x))


@given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 5), st.sampled_from([-1, -2]), st.integers(0, 2**32 - 1))
def test_codes_are_packed_without_loss_or_waste(bits, eighths, dim, seed):
    shape = [3, 5, 8 * eighths] if dim == -1 else [3, 8 * eighths, 5]
    codes = torch.randint(2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack(codes, bits, dim)
    assert packed.dtype == torch.uint8
    assert packed.numel() == codes.numel() * bits // 8
    assert torch.equal(unpack(packed, bits, dim), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_changes_nothing(dtype):
    x = noise(2, 5, 8).to(dtype)
    (part,) = STORAGES["model"].encode_keys(x)
    assert part.dtype == dtype
    assert torch.equal(STORAGES["model"].decode_keys((part,), dtype), x)
