"""Storage formats against loops over single numbers, written from the papers' formulas."""

from __future__ import annotations

from itertools import pairwise
from math import erf, exp, gcd, inf, pi, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from warmkv.policies.compression.packing import pack, unpack
from warmkv.policies.compression.storages.kivi import Kivi
from warmkv.policies.compression.storages.turboquant import POSITIVE_LEVELS, TurboQuant
from warmkv.policy_spec import STORAGES

NAMES = list(STORAGES)
KIVI = [Kivi(4), Kivi(2)]
TURBO = [TurboQuant(4), TurboQuant(3)]
HEAD_DIMS = [8, 32, 64, 80, 128]
MSE = {4: 0.0095, 3: 0.0345}  # of a unit vector, theorem 1 of TurboQuant; `lloyd_max` computes them again


def by_name(codecs):
    return pytest.mark.parametrize("codec", codecs, ids=lambda codec: codec.name)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outliers(*shape, seed=0):
    """Keys as models have them: a few channels far larger than the rest, and off zero."""
    x = noise(*shape, seed=seed)
    x[..., 1] = 20 * x[..., 1] + 50
    x[..., -2] = 15 * x[..., -2] - 30
    return x


def entries(elements, head_dims=(1, 3, 8, 48)):
    """float32 [32, head_dim] of the given elements."""
    return st.sampled_from(head_dims).flatmap(lambda d: arrays(np.float32, (32, d), elements=elements))


# From 1e-6 to 6e4, and zero.
signed = st.floats(2.0**-20, 6e4, width=32) | st.floats(-6e4, -(2.0**-20), width=32) | st.just(0.0)
# The range of a group is small in most caches, unlike that of numbers drawn over all magnitudes.
numbers = entries(signed) | entries(st.floats(-4, 4, width=32)) | entries(st.floats(1000, 1001, width=32))
halves = entries(st.floats(-6e4, 6e4, width=16)) | entries(st.floats(-4, 4, width=16))


# --- all codecs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_storage_is_found_by_its_name(name):
    assert STORAGES[name].name == name


def test_an_unknown_storage_is_refused():
    with pytest.raises(KeyError, match="no storage is called 'int7'; there are fp8, kivi2"):
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
    plain = ((queries @ keys.mT / 8).softmax(-1) @ values).float()
    allowed = {"model": 0.02, "fp8": 0.05, "kivi4": 0.15, "turbo4": 0.15, "turbo3": 0.3, "kivi2": 0.6}[name]
    assert (output.float() - plain).norm() < allowed * plain.norm()


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


# --- KIVI ------------------------------------------------------------------------------------------------------------


def slow_group(numbers, bits):
    """Codes, zero point and step of one group (section 3): Q(x) = round((x - z) / s), s = (max - z) / (2^b - 1)."""
    least, greatest = min(numbers), max(numbers)
    zero = np.float16(least)
    if zero < least:
        zero = np.nextafter(zero, np.float16(inf))
    step = np.float16((greatest - np.float32(zero)) / np.float32(2**bits - 1)) if greatest > zero else np.float16(0)
    if step < 2.0**-20:
        return [0] * len(numbers), float(zero), 0.0
    codes = [np.rint((x - np.float32(zero)) / np.float32(step)) for x in numbers]
    return [int(min(max(code, 0), 2**bits - 1)) for code in codes], float(zero), float(step)


def groups_of(x, kind):
    """Index arrays into x [32, head_dim], one a group."""
    rows, columns = np.indices(x.shape)
    if kind == "keys":
        return [(rows[:, c], columns[:, c]) for c in range(x.shape[1])]
    width = gcd(32, x.shape[1])
    return [(rows[t, c : c + width], columns[t, c : c + width]) for t in range(32) for c in range(0, x.shape[1], width)]


def both(codec, kind):
    return (codec.encode_keys, codec.decode_keys) if kind == "keys" else (codec.encode_values, codec.decode_values)


kinds = pytest.mark.parametrize("kind", ["keys", "values"])


@by_name(KIVI)
@kinds
@given(x=numbers)
def test_kivi_is_the_formula_of_the_paper(codec, kind, x):
    encode, decode = both(codec, kind)
    bits = codec.bits
    parts = encode(torch.from_numpy(x))
    codes = unpack(parts[0], bits, -2)[0].numpy()
    decoded = decode(parts, torch.float32).numpy()
    for group in groups_of(x, kind):
        expected, zero, step = slow_group(x[group], bits)
        assert codes[group].tolist() == expected
        np.testing.assert_allclose(decoded[group], [zero + step * code for code in expected], rtol=1e-6, atol=1e-7)


@by_name(KIVI)
@kinds
@given(x=numbers)
def test_kivi_errs_by_half_a_step(codec, kind, x):
    encode, decode = both(codec, kind)
    highest = 2**codec.bits - 1
    decoded = decode(encode(torch.from_numpy(x)), torch.float32).numpy()
    for group in groups_of(x, kind):
        exact = x[group].astype(float)
        step = (exact.max() - exact.min()) / highest
        half_precision = np.abs(exact).max() * 2.0**-10 + step * 2.0**-10  # of the zero point and of the step
        smallest = highest * 2.0**-20  # a range that float16 cannot divide counts as none
        assert np.abs(decoded[group] - exact).max() <= step / 2 + half_precision + smallest


@by_name(KIVI)
@kinds
@given(x=halves)
def test_kivi_encodes_what_it_decoded_to_the_same(codec, kind, x):
    encode, decode = both(codec, kind)
    once = encode(torch.from_numpy(x))
    twice = encode(decode(once, torch.float32))
    for first, second in zip(once, twice, strict=True):
        assert torch.equal(first, second)


@by_name(KIVI)
@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kivi_encodes_what_it_decoded_to_the_same_in_the_types_of_models(codec, kind, dtype):
    encode, decode = both(codec, kind)
    once = encode((noise(4, 64, 64) + 3).to(dtype))
    twice = encode(decode(once, dtype))
    assert torch.equal(once[0], twice[0])


@by_name(KIVI)
def test_kivi_keeps_integers_exactly(codec):
    """Codes that can be seen: token t has the number t modulo the levels, so zero point and step are whole."""
    levels = 2**codec.bits
    tokens = torch.arange(32.0)[:, None] % levels
    keys = torch.cat([tokens, 3 * tokens - 7], dim=1)
    codes, zero, step = codec.encode_keys(keys)
    assert zero.tolist() == [[0, -7]]
    assert step.tolist() == [[1, 3]]
    stretch = 32 * (levels.bit_length() - 1) // 8  # a byte has the codes of tokens that are a stretch apart
    for i, byte in enumerate(codes[0, :, 0].tolist()):
        assert byte == sum((i + k * stretch) % levels * levels**k for k in range(32 // stretch))
    assert torch.equal(codec.decode_keys((codes, zero, step), torch.float32), keys)


@by_name(KIVI)
@kinds
@pytest.mark.parametrize("constant", [0.0, 1e-6, -0.3, 7.25, -6e4, 6e4])
def test_kivi_keeps_constant_groups(codec, kind, constant):
    encode, decode = both(codec, kind)
    decoded = decode(encode(torch.full((32, 5), constant)), torch.float32)
    torch.testing.assert_close(decoded, torch.full((32, 5), constant), rtol=2.0**-10, atol=2.0**-24)


@by_name(KIVI)
@kinds
def test_kivi_clamps_what_half_precision_cannot_hold(codec, kind):
    encode, decode = both(codec, kind)
    x = torch.tensor([-inf, -1e9, -65_504.0, 65_504.0, 1e9, inf, 0, 1]).repeat(4)[:, None].repeat(1, 32)
    for dtype in (torch.float16, torch.float32):
        decoded = decode(encode(x if kind == "keys" else x.T), dtype)
        assert decoded.isfinite().all()
        assert decoded.min() == pytest.approx(-65_000, rel=1e-3)
        assert decoded.max() == pytest.approx(65_000, rel=1e-3)


@pytest.mark.parametrize("tokens", [1, 31, 33])
def test_kivi_refuses_an_incomplete_group(tokens):
    with pytest.raises(ValueError, match=f"groups of 32 entries, not {tokens}"):
        Kivi(4).encode_keys(torch.zeros(tokens, 8))


# --- TurboQuant ------------------------------------------------------------------------------------------------------


def lloyd_max(levels):
    """Levels of least MSE for N(0, 1) and that MSE, by Lloyd's iteration with the closed form of the centroids."""

    def density(x):
        return exp(-x * x / 2) / sqrt(2 * pi)

    def below(x):
        return (1 + erf(x / sqrt(2))) / 2

    centroids = [6 * (i + 0.5) / levels - 3 for i in range(levels)]
    for _ in range(2000):
        edges = [-inf, *((a + b) / 2 for a, b in pairwise(centroids)), inf]
        cells = list(pairwise(edges))
        centroids = [(density(a) - density(b)) / (below(b) - below(a)) for a, b in cells]
    return centroids, 1 - sum((below(b) - below(a)) * c * c for (a, b), c in zip(cells, centroids, strict=True))


@pytest.mark.parametrize("bits", [3, 4])
def test_the_codebook_is_that_of_lloyd_and_max(bits):
    levels, mse = lloyd_max(2**bits)
    assert [-level for level in reversed(POSITIVE_LEVELS[bits])] == pytest.approx(levels[: 2 ** (bits - 1)], abs=1e-6)
    assert list(POSITIVE_LEVELS[bits]) == pytest.approx(levels[2 ** (bits - 1) :], abs=1e-6)
    assert mse == pytest.approx(MSE[bits], rel=0.01)


def exact_mse(levels, head_dim):
    """MSE of levels for a coordinate of a random unit vector times sqrt(head_dim), and the levels of the least MSE.

    The density is that of lemma 1, in proportion to (1 - x^2 / head_dim)^((head_dim - 3) / 2); Lloyd's iteration.
    """
    x = np.linspace(-sqrt(head_dim), sqrt(head_dim), 20_001)
    density = np.maximum(1 - x * x / head_dim, 0) ** ((head_dim - 3) / 2)
    density /= density.sum()

    def cells(levels):
        return np.searchsorted((levels[1:] + levels[:-1]) / 2, x)

    best = levels
    for _ in range(300):
        of = cells(best)
        best = np.bincount(of, density * x) / np.bincount(of, density)
    return [float((density * (x - each[cells(each)]) ** 2).sum()) for each in (levels, best)]


@pytest.mark.parametrize(
    ("bits", "head_dim", "excess"), [(3, 64, 0.0016), (3, 128, 0.0004), (4, 64, 0.0043), (4, 128, 0.0011)]
)
def test_levels_of_the_normal_limit_cost_next_to_nothing(bits, head_dim, excess):
    positive = np.array(POSITIVE_LEVELS[bits])
    limit, least = exact_mse(np.concatenate([-positive[::-1], positive]), head_dim)
    assert limit / least - 1 == pytest.approx(excess, abs=0.0003)


def rotation(codec, head_dim):
    return codec.to_basis(torch.eye(head_dim))


@by_name(TURBO)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 96])
def test_the_rotation_is_orthogonal(codec, head_dim):
    matrix = rotation(codec, head_dim)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim), rtol=0, atol=1e-5)
    x = outliers(5, head_dim)
    torch.testing.assert_close(codec.from_basis(codec.to_basis(x)), x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_the_rotation_is_a_hadamard_matrix_after_random_signs(head_dim):
    matrix = rotation(TurboQuant(4), head_dim) * sqrt(head_dim)
    signs = matrix[:, 0].round().tolist()
    assert 0.2 < signs.count(1) / head_dim < 0.8
    for i in range(head_dim):
        expected = [signs[i] * (-1) ** (i & j).bit_count() for j in range(head_dim)]
        assert matrix[i].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("head_dim", [64, 80])
def test_the_rotation_is_that_of_its_seed(head_dim):
    x = noise(4, head_dim)
    assert all(
        torch.equal(a, b) for a, b in zip(TurboQuant(4, 7).encode_keys(x), TurboQuant(4, 7).encode_keys(x), strict=True)
    )
    matrices = [rotation(TurboQuant(4, seed), head_dim) for seed in range(8)]
    for i, matrix in enumerate(matrices):
        assert torch.equal(matrix, rotation(TurboQuant(3, i), head_dim))
        # Of two independent rotations no row is the other's: inner products are of the size of 1 / sqrt(head_dim).
        others = torch.stack(matrices[:i] + matrices[i + 1 :])
        assert ((others * matrix).sum(-1).mean(-1).abs() < 0.5).all()


@by_name(TURBO)
@given(x=arrays(np.float32, (3, 8), elements=st.floats(-4, 4, width=16)))
def test_turbo_is_the_algorithm_of_the_paper(codec, x):
    """Rotate, choose the nearest level of each coordinate, give the whole its norm (algorithm 1)."""
    matrix = rotation(codec, 8).double().numpy()
    positive = POSITIVE_LEVELS[codec.bits]
    levels = [*(-level for level in reversed(positive)), *positive]
    packed, scale = codec.encode_keys(torch.from_numpy(x))
    codes = unpack(packed, codec.bits, -1)
    for row in range(3):
        norm = sqrt(sum(float(number) ** 2 for number in x[row]))
        if norm < 1e-3:
            continue
        chosen = []
        for j in range(8):
            coordinate = sum(float(x[row, i]) * matrix[i, j] for i in range(8)) / norm * sqrt(8)
            chosen.append(levels[codes[row, j]])
            nearest = min(abs(coordinate - level) for level in levels)
            assert abs(coordinate - chosen[-1]) <= nearest + 1e-5  # either of two that are equally near
        assert float(scale[row]) == pytest.approx(norm / sqrt(sum(level**2 for level in chosen)), rel=2.0**-10)
        decoded = codec.decode_keys((packed, scale), torch.float32)[row]
        assert decoded.tolist() == pytest.approx([level * float(scale[row]) for level in chosen], rel=1e-5)


@by_name(TURBO)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("draw", [noise, outliers])
def test_turbo_errs_as_the_paper_says_whatever_the_vectors(codec, head_dim, draw):
    promised = MSE[codec.bits]
    keys, queries = draw(2000, head_dim), noise(200, head_dim, seed=1)
    decoded = codec.decode_keys(codec.encode_keys(keys), torch.float32)
    mse = ((codec.from_basis(decoded) - keys).square().sum(-1) / keys.square().sum(-1)).mean().item()
    # Few large channels are easier: rotated, they are sums of few numbers and have shorter tails than normal ones.
    assert (0.9 if draw is noise else 0.5) * promised < mse < 1.05 * promised
    near, exact = codec.to_basis(queries) @ decoded.T, queries @ keys.T
    error = (near - exact).square().mean() / exact.square().mean()
    assert error.item() == pytest.approx(mse, rel=0.15)
    slope = (near * exact).sum() / exact.square().sum()
    assert slope.item() == pytest.approx(sqrt(1 - mse), abs=0.002)  # 1 - mse, were the norm not corrected


@by_name(TURBO)
@given(x=arrays(np.float32, (2, 16), elements=signed))
def test_turbo_keeps_norms(codec, x):
    decoded = codec.decode_keys(codec.encode_keys(torch.from_numpy(x)), torch.float32).numpy()
    for kept, exact in zip(decoded, x.astype(float), strict=True):
        norm = np.linalg.norm(exact)
        if norm / 4 < 20_000:  # float16 cannot hold the largest level of vectors much longer
            assert np.linalg.norm(kept) == pytest.approx(norm, rel=2.0**-10, abs=11 * 2.0**-25)


@by_name(TURBO)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 6e4, 1e9])
def test_turbo_gives_no_infinity(codec, magnitude):
    x = magnitude * outliers(20, 64)
    assert codec.decode_keys(codec.encode_keys(x), torch.float16).isfinite().all()


def test_turbo_refuses_codes_that_do_not_fill_bytes():
    with pytest.raises(ValueError, match="multiple of 8, not 20"):
        TurboQuant(3).encode_keys(torch.zeros(1, 20))
    with pytest.raises(ValueError, match="multiple of 2, not 7"):
        TurboQuant(4).encode_keys(torch.zeros(1, 7))


def test_a_rotation_first_used_in_inference_mode_serves_autograd():
    codec = TurboQuant(4, seed=12345)
    with torch.inference_mode():
        codec.to_basis(noise(1, 16))
    queries = noise(1, 16).requires_grad_()
    codec.to_basis(queries).sum().backward()
    assert queries.grad is not None


# --- FP8 -------------------------------------------------------------------------------------------------------------


def e4m3(byte):
    """The number of an E4M3 byte (arXiv 2209.05433, table 1), nan for the two that are none."""
    sign, exponent, mantissa = (-1) ** (byte >> 7), byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = [e4m3(byte) for byte in range(256) if byte & 127 != 127]


def test_fp8_keeps_its_own_numbers():
    x = torch.tensor(E4M3).view(2, -1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(STORAGES["fp8"].decode_keys(STORAGES["fp8"].encode_keys(x.to(dtype)), dtype), x.to(dtype))


@given(arrays(np.float32, (2, 4), elements=signed | st.floats(-500, 500, width=32) | st.just(inf)))
def test_fp8_takes_the_nearest_of_its_numbers(x):
    decoded = STORAGES["fp8"].decode_values(STORAGES["fp8"].encode_values(torch.from_numpy(x)), torch.float32)
    for number, kept in zip(x.ravel(), decoded.ravel().tolist(), strict=True):
        clamped = min(max(float(number), -448.0), 448.0)
        assert abs(clamped - kept) == min(abs(clamped - other) for other in E4M3)


# --- the model's own type --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_changes_nothing(dtype):
    x = noise(2, 5, 8).to(dtype)
    (part,) = STORAGES["model"].encode_keys(x)
    assert part.dtype == dtype
    assert torch.equal(STORAGES["model"].decode_keys((part,), dtype), x)
