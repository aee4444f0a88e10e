"""The Triton kernels against a loop in float64 and against `attention.py`: by Triton's interpreter, and on a GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.engine.test_engine import prompt
from tests.unit.replicas.slots.conftest import CUDA
from warmkv.policies.compression.softmax import Softmax
from warmkv.policies.compression.storage_format import StorageFormat
from warmkv.policy_spec import STORAGES
from warmkv.replicas.slots import attention, kernels

pytest.importorskip("triton", reason="triton is not installed")
READABLE = [name for name, storage in STORAGES.items() if storage.kernel]
# Of numbers that are of the size of 1. Half types round the result, and on a GPU the weights too.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """A call: shapes, and a seed for what is random."""

    storage: str
    dtype: torch.dtype
    rows: int
    group: int
    head_dim: int
    capacity: int
    lengths: tuple[int, ...]
    uncompressed_tail: int
    splits: int
    seed: int

    @property
    def format(self) -> StorageFormat:
        return STORAGES[self.storage]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    storage = draw(st.sampled_from(READABLE))
    rows = draw(st.integers(1, 3))
    group = STORAGES[storage].group
    capacity = draw(st.integers(1, -(-draw(st.sampled_from([40, 130, 700])) // group))) * group
    return Case(
        storage=storage,
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        rows=rows,
        group=draw(st.sampled_from([1, 2, 3, 4, 8])),
        head_dim=draw(st.sampled_from([16, 32, 64, 80, 128])),
        capacity=capacity,
        lengths=tuple(draw(st.sampled_from([0, 1, capacity, draw(st.integers(0, capacity))])) for _ in range(rows)),
        uncompressed_tail=draw(st.sampled_from([0, 0, 1, 5, 40])),
        splits=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**16)),
    )


@dataclass(frozen=True)
class Inputs:
    query: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    lengths: Tensor
    uncompressed_tail: tuple[Tensor, Tensor, Tensor] | None
    scale: float

    def attend(self, case: Case, **given: Any) -> Tensor:
        from warmkv.replicas.slots.kernels import launch

        parts = self.query, case.format, self.keys, self.values, self.lengths, self.uncompressed_tail, self.scale
        return launch.attend(*parts, splits=case.splits, **given)


def make(case: Case, device: torch.device, garbage: float) -> Inputs:
    """Return rows of a slab of two layers and more rows and entries than are used; what is not seen holds `garbage`."""
    random = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(case.dtype)

    n, group = case.rows, case.format.group

    def stored(encoded: tuple[Tensor, ...], spare: int) -> tuple[Tensor, ...]:
        views = []
        for part in encoded:
            slab = torch.zeros(2, n + 1, part.shape[1] + spare, *part.shape[2:], dtype=part.dtype, device=device)
            view = slab[1, :n, : part.shape[1]]
            view.copy_(part)
            for row, length in enumerate(case.lengths):
                unseen = view[row, -(-length // group) :]
                unseen.fill_(garbage if part.dtype.is_floating_point else 0x7F * math.isnan(garbage))
            views.append(view)
        return tuple(views)

    shape = n, case.capacity, case.head_dim
    keys, values = case.format.encode_keys(normal(*shape)), case.format.encode_values(normal(*shape))
    uncompressed_tail = None
    if case.uncompressed_tail:
        mask = torch.rand(n, case.uncompressed_tail, generator=random) < 0.6
        fresh = [
            normal(n, case.uncompressed_tail, case.head_dim).masked_fill(~mask[..., None], garbage) for _ in range(2)
        ]
        uncompressed_tail = fresh[0].to(device), fresh[1].to(device), mask.to(device)
    query = normal(n, case.group, case.head_dim).to(device)
    lengths = torch.tensor(case.lengths, device=device)
    return Inputs(query, stored(keys, 2), stored(values, 3), lengths, uncompressed_tail, case.head_dim**-0.5)


def slow(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return output [n, group, d] and the attention received [n, capacity + beside], entry by entry in float64."""
    own = case.format
    keys = own.from_basis(own.decode_keys(tuple(part.cpu() for part in inputs.keys), torch.float32)).double()
    values = own.from_basis(own.decode_values(tuple(part.cpu() for part in inputs.values), torch.float32)).double()
    out = torch.zeros(case.rows, case.group, case.head_dim, dtype=torch.float64)
    received = torch.zeros(case.rows, case.capacity + case.uncompressed_tail, dtype=torch.float64)
    for row, length in enumerate(case.lengths):
        seen = [(i, keys[row, i], values[row, i]) for i in range(length)]
        if inputs.uncompressed_tail:
            more_keys, more_values, mask = (tensor[row].cpu() for tensor in inputs.uncompressed_tail)
            waiting = [i for i in range(case.uncompressed_tail) if mask[i]]
            seen += [(case.capacity + i, more_keys[i].double(), more_values[i].double()) for i in waiting]
        for head in range(case.group if seen else 0):
            query = inputs.query[row, head].cpu().double()
            powers = [math.exp(float(query @ key) * inputs.scale) for _, key, _ in seen]
            for power, (entry, _, value) in zip(powers, seen, strict=True):
                out[row, head] += power / sum(powers) * value
                received[row, entry] += power / sum(powers)
    return out, received


def assert_near(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.cpu().double(), wanted.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@given(cases())
@settings(max_examples=40)
def test_rows_attend_to_what_they_see_and_to_nothing_else(device, case):
    inputs = make(case, device, garbage=math.nan)
    wanted, _ = slow(case, inputs)
    out = inputs.attend(case)
    assert out.dtype == case.dtype
    assert_near(out, wanted, case.dtype)


@given(cases(), st.booleans())
@settings(max_examples=30)
def test_the_attention_received_comes_out_of_the_same_pass(device, case, adds):
    inputs = make(case, device, garbage=math.nan)
    wanted, shares = slow(case, inputs)
    scores = torch.full((case.rows, case.capacity + case.uncompressed_tail + 3), 2.0, device=device)
    received = scores[:, : case.capacity + case.uncompressed_tail]
    assert_near(inputs.attend(case, received=received, adds=adds), wanted, case.dtype)
    assert_near(received, shares + 2.0 * adds, case.dtype)
    assert (scores[:, received.shape[1] :] == 2).all()


@given(cases())
@settings(max_examples=30)
def test_the_result_is_that_of_the_path_without_kernels(device, case):
    inputs = make(case, device, garbage=0.0)
    n, entries = case.rows, case.capacity + case.uncompressed_tail
    got, wanted = torch.ones(n, entries, device=device), torch.ones(n, entries, device=device)
    out = inputs.attend(case, received=got, adds=True)
    seen = torch.arange(case.capacity, device=device) < inputs.lengths[:, None]
    if inputs.uncompressed_tail:
        seen = torch.cat([seen, inputs.uncompressed_tail[2]], dim=1)
    some = seen.any(dim=1)  # attention.py has no rows that see nothing
    bias = torch.zeros(seen.shape, dtype=case.dtype, device=device).masked_fill_(~seen, -math.inf)
    given = (
        inputs.query,
        case.format,
        inputs.keys,
        inputs.values,
        inputs.uncompressed_tail and inputs.uncompressed_tail[:2],
    )
    plain, shares = attention.attend_packed(*given, bias, Softmax(inputs.scale))
    assert_near(out[some], plain[some], case.dtype)
    assert_near(got[some], (wanted + shares.sum(dim=1))[some].cpu(), case.dtype)
    if case.storage == "model" and not inputs.uncompressed_tail:
        rows = attention.attend_rows(inputs.query, inputs.keys[0], inputs.values[0], bias, Softmax(inputs.scale))
        assert_near(out[some], rows[some], case.dtype)


@pytest.mark.parametrize("storage", READABLE)
def test_of_a_single_entry_the_value_comes_out_exactly(device, storage):
    own, case = STORAGES[storage], Case(storage, torch.float32, 4, 2, 80, 96, (1,) * 4, 0, 2, 7)
    inputs = make(case, device, garbage=0.0)
    out = inputs.attend(case)
    value = own.decode_values(inputs.values, torch.float32)[:, :1]
    assert torch.equal(out, own.from_basis(value.expand_as(out).contiguous()))


def test_every_byte_of_fp8_is_read_as_the_codec_reads_it(device):
    numbers = torch.arange(256, dtype=torch.uint8, device=device).view(16, 1, 16)
    case = Case("fp8", torch.float32, 16, 1, 16, 1, (1,) * 16, 0, 1, 0)
    query, lengths = torch.zeros(16, 1, 16, device=device), torch.ones(16, dtype=torch.long, device=device)
    zeros = torch.zeros_like(numbers)
    out = Inputs(query, (zeros,), (numbers,), lengths, None, 1.0).attend(case)
    torch.testing.assert_close(out, numbers.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1e3, 1e-3])
def test_logits_far_from_1_neither_overflow_nor_vanish(device, size):
    """float16 would overflow in the product, before it is scaled."""
    case = Case("model", torch.float16, 1, 1, 64, 50, (50,), 0, 3, 3)
    inputs = make(case, device, garbage=0.0)
    inputs.query.mul_(size)
    inputs = Inputs(inputs.query, inputs.keys, inputs.values, inputs.lengths, None, 1 / size)
    assert_near(inputs.attend(case), slow(case, inputs)[0], case.dtype)


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([16, 80]),
    st.integers(1, 7),
    st.integers(1, 40),
    st.sampled_from(list(TOLERANCE)),
    st.data(),
)
@settings(max_examples=30)
def test_only_chosen_pages_are_read(device, rows, group, head_dim, page, count, dtype, data):
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    keys, values = (torch.randn(rows, page * count, head_dim, generator=random).to(dtype) for _ in range(2))
    query = torch.randn(rows, group, head_dim, generator=random).to(dtype)
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, page * count), min_size=rows, max_size=rows)))
    reads = torch.tensor(data.draw(st.lists(st.integers(1, page * count + 2), min_size=rows, max_size=rows)))
    channels = torch.tensor(data.draw(st.lists(st.integers(1, head_dim), min_size=rows, max_size=rows)))
    by_page, most = keys.view(rows, count, page, head_dim), int(reads.max())
    given = query, keys, values, by_page.amin(dim=2), by_page.amax(dim=2), lengths, reads, channels
    moved = [tensor.to(device) for tensor in given]
    wanted = attention.attend_pages(*moved, most, Softmax(0.25)).cpu()
    chosen = attention.choose_entries(*(moved[i] for i in (0, 3, 4, 5, 6, 7)), page * count, most, 0.25)
    for row in range(rows):
        read = chosen[row][chosen[row] < page * count]
        assert len(read) == len(set(read.tolist())) == min(int(reads[row]), int(lengths[row]))
        assert int(read.max()) < lengths[row]
        unread = torch.ones(page * count, dtype=torch.bool, device=device).index_fill(0, read, False)
        moved[1][row, unread] = moved[2][row, unread] = math.nan
    assert_near(kernels.attend_pages(*moved, most, 0.25), wanted, dtype)


def test_what_cannot_be_read_is_refused(device):
    case = Case("model", torch.float32, 2, 2, 16, 8, (8, 3), 0, 1, 0)
    inputs = make(case, device, garbage=0.0)
    across = Inputs(inputs.query, (inputs.keys[0].mT,), inputs.values, inputs.lengths, None, 1.0)
    with pytest.raises(ValueError, match="each row must be contiguous"):
        across.attend(case)
    with pytest.raises(ValueError, match="the attention received"):
        inputs.attend(case, received=torch.zeros(8, 2, device=device).T)


@given(st.integers(1, 4096), st.integers(1, 1 << 17), st.integers(1, 160))
@example(8, 16_384, 132)
@example(256, 16_384, 132)
def test_few_long_rows_are_split_so_that_all_processors_work(rows, entries, processors):
    from warmkv.replicas.slots.kernels.launch import MOST_SPLITS, split_count

    splits = split_count(rows, entries, processors)
    assert 1 <= splits <= MOST_SPLITS
    assert splits == 1 or entries // splits >= 256
    assert splits <= split_count(1, entries, processors)
    if splits < MOST_SPLITS and (splits + 1) * 256 <= entries:
        assert (splits + 1) * rows > 8 * processors


def test_where_there_is_no_gpu_nothing_is_read_by_kernels_unless_they_are_interpreted():
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the kernels were asked for")
    assert not kernels.is_available(torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        assert kernels.reads(STORAGES["kivi4"], torch.float32, torch.device("cpu"))
        assert not kernels.reads(STORAGES["kivi4"], torch.float64, torch.device("cpu"))


@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "h2o@12",
        "tova@12",
        "streaming_llm@0.5+kivi4",
        "h2o@0.8+kivi4",
        "rocketkv@12:window=4,kernel=3",
        "full+fp8",
    ],
)
def test_slots_decode_through_the_kernels_as_without_them(device, models, policy):
    if device.type == "cuda":
        pytest.skip("the model is on the CPU")
    requests = [make_request(prompt(length), new=4, policy=policy, name=str(length)) for length in (20, 70)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "is_available", lambda device: False)
        expected = Driver(models["llama"]).run(*requests)
    driver = Driver(models["llama"])
    assert driver.run(*requests) == expected
    assert all(slab._fused for slab in driver.engine.pool.slabs)


COMPILES = """
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class NoDriver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


driver.set_active(NoDriver())
run, compiled = JITFunction.run, []
JITFunction.run = lambda self, *args, grid, warmup, **given: compiled.append(
    run(self, *args, grid=grid, warmup=True, **given)
)

from tests.unit.replicas.slots.test_kernels import Case, make

for storage in sys.argv[1:]:
    case = Case(storage, torch.float16, 2, 4, 128, 128, (128, 96), 5, 2, 0)
    make(case, torch.device("cpu"), 0.0).attend(case, received=torch.zeros(2, 133), adds=True)
    assert len(compiled) == 3, compiled
    assert "mma.sync" in compiled[0].asm["ptx"], "no tensor cores"
    if storage == "model":
        alone = Case(storage, torch.float16, 2, 4, 128, 128, (128, 96), 0, 1, 0)
        inputs = make(alone, torch.device("cpu"), 0.0)
        inputs.attend(alone, received=torch.zeros(2, 128))
        inputs.attend(alone, pages=(torch.zeros(2, 3).long(), torch.ones(2).long(), 5))
        assert len(compiled) == 6, compiled
    print(storage, *(kernel.metadata.shared for kernel in compiled))
    compiled.clear()
"""


FIRST = ("model", "kivi4")


@pytest.mark.slow
@pytest.mark.parametrize(
    "storages",
    [FIRST, pytest.param(tuple(name for name in READABLE if name not in FIRST), marks=pytest.mark.soak)],
    ids=["some", "others"],
)
def test_the_kernels_compile_for_a_gpu_that_is_not_there(tmp_path, storages):
    """What the interpreter takes the compiler may not. The memory of a program stays below what every GPU has."""
    ran = subprocess.run(
        [sys.executable, "-c", COMPILES, *storages],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    shared = [int(size) for line in ran.stdout.splitlines() for size in line.split()[1:]]
    assert len(shared) >= 3 * len(storages)
    assert max(shared) <= 99 * 1024


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="there is no CUDA device")
@pytest.mark.parametrize("storage", READABLE)
def test_a_captured_call_follows_what_changes_in_its_inputs(storage):
    """No shape, split or grid depends on a value: a CUDA graph reads lengths and masks anew."""
    device = torch.device("cuda")
    case = Case(storage, torch.float16, 3, 4, 128, 4096, (4096, 0, 96), 40, 4, 1)
    inputs = make(case, device, garbage=0.0)
    received = torch.zeros(3, case.capacity + case.uncompressed_tail, device=device)
    inputs.attend(case, received=received)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = inputs.attend(case, received=received)
    assert inputs.uncompressed_tail is not None
    for lengths in ((32, 4096, 0), (4064, 64, 1024)):
        inputs.lengths.copy_(torch.tensor(lengths))
        inputs.uncompressed_tail[2].logical_not_()
        graph.replay()
        now = Case(storage, torch.float16, 3, 4, 128, 4096, lengths, 40, 1, 1)
        fresh = torch.zeros_like(received)
        assert_near(out, inputs.attend(now, received=fresh).cpu(), case.dtype)
        assert_near(received, fresh.cpu(), case.dtype)
