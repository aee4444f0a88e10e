"""The Triton kernels against a loop in float64 and against `attention.py`: by Triton's interpreter, and on a GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.policies.compression.softmax import Softmax
from warmkv.policies.compression.storage_format import StorageFormat
from warmkv.policies.slot_sizes import KVShape, RowKind
from warmkv.policy_spec import STORAGES
from warmkv.replicas.slots import attention, kernels, row_tables
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.kernels import LaunchProgress
from warmkv.replicas.slots.row_tables import RowBatch, RowTables, split_counts
from warmkv.replicas.slots.rows import Advance
from warmkv.replicas.slots.slabs import Slab
from warmkv.replicas.slots.step_buffer import StepBuffer

pytest.importorskip("triton", reason="triton is not installed")
CUDA = torch.cuda.is_available()
READABLE = [name for name, storage in STORAGES.items() if storage.kernel]
# Of numbers that are of the size of 1. Half types round the result, and on a GPU the weights too.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LAYER = 1


@dataclass(frozen=True)
class Case:
    """A call: shapes, and a seed for what is random. A row's new token is the last of its `lengths`."""

    storage: str
    dtype: torch.dtype
    kv_heads: int
    group: int
    head_dim: int
    capacity: int
    lengths: tuple[int, ...]  # of each row: all KV heads of the first sequence, then of the next
    processors: int = 1
    decode: Any = "append"
    replaces: bool = False
    alike: bool = False
    window: int = 0
    softcap: float | None = None
    sinks: bool = False
    seed: int = 0

    @property
    def format(self) -> StorageFormat:
        return STORAGES[self.storage]

    @property
    def kind(self) -> RowKind:
        tail = self.format.group + 3 if self.format.group > 1 else 0
        return RowKind(
            capacity=self.capacity + tail,
            storage=self.storage,
            tail=tail,
            decode=self.decode,
            replaces=self.replaces,
            alike=self.alike,
            window=self.window,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    storage = draw(st.sampled_from(READABLE))
    kv_heads, sequences = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    group = STORAGES[storage].group
    capacity = -(-draw(st.sampled_from([17, 40, 130])) // group) * group
    decode, replaces = draw(st.sampled_from([("append", False), ("argmin", False), ("argmin", True)]))
    one = st.sampled_from([1, 2, capacity, draw(st.integers(1, capacity))])
    alike = replaces and draw(st.booleans())
    lengths = [[draw(one)] * kv_heads if alike else [draw(one) for _ in range(kv_heads)] for _ in range(sequences)]
    return Case(
        storage=storage,
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        kv_heads=kv_heads,
        group=draw(st.sampled_from([1, 3, 4])),
        head_dim=draw(st.sampled_from([16, 64, 80])),
        capacity=capacity,
        lengths=tuple(length for sequence in lengths for length in sequence),
        processors=draw(st.sampled_from([1, 4])),
        decode=decode,
        replaces=replaces,
        alike=alike,
        window=draw(st.sampled_from([0, 0, 9])),
        softcap=draw(st.sampled_from([None, None, 1.5])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


class Rows:
    """The rows of a case in a slab of two layers, what is not in use full of `garbage`, and the tables of a step."""

    def __init__(self, case: Case, device: torch.device, garbage: float = math.nan) -> None:
        self.case, self.device = case, device
        random = torch.Generator().manual_seed(case.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random).to(case.dtype)

        kind, heads, dim = case.kind, case.kv_heads, case.head_dim
        self.rows, self.sequences = len(case.lengths), len(case.lengths) // heads
        shape = KVShape(2, heads, dim, case.dtype.itemsize, q_heads=heads * case.group)
        self.slab = Slab(kind, range(2), self.rows, shape, case.dtype, device)
        memory = self.slab.memory
        for tensor in memory.tensors():
            tensor.fill_(garbage if tensor.dtype.is_floating_point else 0x7F)
        self.keys, self.values = normal(self.rows, case.capacity, dim), normal(self.rows, case.capacity, dim)
        self.ages = torch.arange(kind.capacity).repeat(self.rows, 1) + 1
        grouped = kind.grouped
        for row, length in enumerate(case.lengths):
            packed = (length - 1) // kind.group * kind.group if grouped else length - 1
            waiting = length - 1 - packed
            state = self.slab.state
            state.owner[row], state.head[row], state.count[row], state.limit[row] = 0, row % heads, length, 1 << 20
            state.packed[row], state.waiting[row], state.tail_limit[row] = packed, waiting + 1, kind.tail
            state.tail_start[row] = kind.tail - 1 if grouped else 0  # so that what waits goes around
            if packed:
                for parts, given, encode in (
                    (memory.keys, self.keys, case.format.encode_keys),
                    (memory.values, self.values, case.format.encode_values),
                ):
                    for part, fresh in zip(parts, encode(given[row : row + 1, :packed]), strict=True):
                        part[LAYER, row, : fresh.shape[1]] = fresh[0]
            at = [(state.tail_start[row] + i) % kind.tail for i in range(waiting)] if grouped else []
            memory.uncompressed_keys[LAYER, row, at] = self.keys[row, packed : length - 1].to(device)[: len(at)]
            memory.uncompressed_values[LAYER, row, at] = self.values[row, packed : length - 1].to(device)[: len(at)]
            if kind.aged:
                memory.ages[LAYER, row] = 0
                memory.ages[LAYER, row, :packed] = self.ages[row, :packed].to(device, torch.int32)
                behind = [kind.packed + int(i) for i in at]
                memory.ages[LAYER, row, behind] = self.ages[row, packed : length - 1].to(device, torch.int32)[: len(at)]
        if kind.decode == "argmin":
            memory.scores[LAYER] = 2.0
        self.query = normal(self.sequences, heads * case.group, dim).to(device)
        self.key, self.value = (
            normal(self.sequences, heads, dim).to(device),
            normal(self.sequences, heads, dim).to(device),
        )
        self.sinks = normal(heads * case.group).to(device) if case.sinks else None
        self.softmax = Softmax(dim**-0.5, case.softcap, self.sinks)
        inv_freq = (10_000.0 ** -torch.arange(0, 1, 2 / dim, dtype=torch.float64)).to(device)
        self.tables = RowTables(shape, StepBuffer(device), device, inv_freq)
        self.tables._processors = case.processors
        self.batch = self.take()

    def take(self) -> RowBatch:
        """Upload the numbers of a step in which the last token of each row is new."""
        state = self.slab.state
        at = np.repeat(np.arange(self.sequences), self.case.kv_heads)
        lengths = np.array(self.case.lengths)
        grouped = state.grouped > 0
        around = (state.tail_start + state.waiting - 1) % np.maximum(state.tail_limit, 1)
        entries = np.where(grouped, around, lengths - 1)
        done = Advance(entries, lengths - 1, lengths, np.zeros(self.rows, dtype=bool))
        slots: Any = [object()] * self.sequences
        batches = self.tables.batches(slots, [self.slab], state, at, self.sequences)
        self.tables.take(state, done, at >= 0, lengths, np.zeros_like(lengths), np.zeros((2, self.rows), np.int64))
        self.tables.buffer.upload()
        (batch,) = batches[LAYER]
        return batch

    def attend(self) -> Tensor:
        out = torch.full_like(self.query, math.nan)
        given = self.query, self.key, self.value
        kernels.attend(self.batch, self.tables, LAYER, *given, self.softmax, out, LaunchProgress())
        return out

    def slow(self) -> tuple[Tensor, Tensor]:
        """Return output [sequences, q_heads, d] and what entries received [rows, length], by float64 loops."""
        case, own = self.case, self.case.format
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        received = torch.zeros(self.rows, max(case.lengths), dtype=torch.float64)

        def stored(x: Tensor, encode: Any, decode: Any) -> Tensor:
            decoded: Tensor = own.from_basis(decode(encode(x[None]), torch.float32))[0]
            return decoded.double()

        for row, length in enumerate(case.lengths):
            sequence, head = divmod(row, case.kv_heads)
            keys, values = self.keys[row, :length].clone(), self.values[row, :length].clone()
            keys[-1], values[-1] = self.key[sequence, head].cpu(), self.value[sequence, head].cpu()
            packed = (length - 1) // own.group * own.group if own.group > 1 else length
            keys, values = (
                torch.cat([stored(x[:packed], *codec), x[packed:].double()]) if packed else x.double()
                for x, codec in (
                    (keys, (own.encode_keys, own.decode_keys)),
                    (values, (own.encode_values, own.decode_values)),
                )
            )
            first = max(0, length - case.window) if case.window else 0
            for one in range(head * case.group, (head + 1) * case.group):
                logits = keys[first:] @ self.query[sequence, one].cpu().double() * self.softmax.scale
                if case.softcap:
                    logits = (logits / case.softcap).tanh() * case.softcap
                weights = logits.exp()
                total = weights.sum() + (self.sinks[one].cpu().double().exp() if self.sinks is not None else 0)
                out[sequence, one] = (weights / total) @ values[first:]
                received[row, first:length] += weights / total
        if case.alike:
            received = received.view(self.sequences, case.kv_heads, -1).sum(1).repeat_interleave(case.kv_heads, 0)
        return out, received

    def scores(self) -> Tensor:
        """Return the scores of entries in use [rows, longest], in their order."""
        kept = torch.zeros(self.rows, max(self.case.lengths))
        for row, length in enumerate(self.case.lengths):
            kept[row, :length] = self.slab.memory.scores[LAYER, row].cpu()[self.entries(row)]
        return kept

    def entries(self, row: int) -> list[int]:
        kind, state = self.case.kind, self.slab.state
        if not kind.grouped:
            return list(range(self.case.lengths[row]))
        start, limit = int(state.tail_start[row]), kind.tail
        tail = [kind.packed + (start + i) % limit for i in range(int(state.waiting[row]))]
        return [*range(int(state.packed[row])), *tail]


def assert_near(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.cpu().double(), wanted.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@given(cases())
@settings(max_examples=12)
def test_rows_attend_to_what_they_see_and_to_nothing_else(device, case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_tables, "SPLIT_ENTRIES", 16)
        rows = Rows(case, device)
        out = rows.attend()
    wanted, received = rows.slow()
    assert out.dtype == case.dtype
    assert_near(out, wanted, case.dtype)
    if case.decode == "argmin":
        seen = torch.arange(received.shape[1]) < torch.tensor(case.lengths)[:, None]
        before = torch.full_like(received, 2.0) * (not case.replaces)
        before[torch.arange(rows.rows), torch.tensor(case.lengths) - 1] = 0.0  # the new token begins with nothing
        assert_near(rows.scores() * seen, (received + before) * seen, case.dtype)


@pytest.mark.parametrize("storage", [name for name in READABLE if STORAGES[name].group == 1])
def test_of_a_single_entry_the_value_comes_out_as_the_codec_keeps_it(device, storage):
    """What the kernel encodes is what the format does: the same bytes, but for codes that lie on a boundary."""
    own = STORAGES[storage]
    rows = Rows(Case(storage, torch.float32, 4, 2, 80, 96, (1,) * 4, seed=7), device)
    out = rows.attend().view(4, 2, 80)
    value = own.decode_values(own.encode_values(rows.value[0][:, None]), torch.float32)
    torch.testing.assert_close(out, own.from_basis(value).expand_as(out), rtol=1e-5, atol=1e-5)
    for parts, x in ((rows.slab.memory.keys, rows.key), (rows.slab.memory.values, rows.value)):
        for part, wanted in zip(parts, own.encode_keys(x[0][:, None]), strict=True):
            assert torch.equal(part[LAYER, :, :1], wanted)


def test_every_number_of_fp8_is_read_and_written_as_the_codec_does(device):
    case = Case("fp8", torch.float32, 16, 1, 16, 2, (1,) * 16)
    rows = Rows(case, device)
    bits = torch.randint(-(2**31), 2**31, (1, 16, 16), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().view(1, 16, 16)
    for numbered in (bits.view(torch.float32), numbers, numbers * 1.0625, numbers * 2**-7):
        rows.value = numbered.to(device)
        rows.attend()
        (wanted,) = case.format.encode_values(numbered[0])
        got = rows.slab.memory.values[0][LAYER, :, 0].cpu()
        nan = numbered[0].isnan()  # of either sign
        assert torch.equal(got[~nan], wanted[~nan])
        assert (got[nan] & 0x7F == 0x7F).all()
    rows.query.zero_()
    rows.value = numbers.to(device)
    torch.testing.assert_close(rows.attend(), rows.value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1e3, 1e-3])
def test_logits_far_from_1_neither_overflow_nor_vanish(device, size):
    """float16 would overflow in the product, before it is scaled."""
    rows = Rows(Case("model", torch.float16, 1, 1, 64, 50, (50,), seed=3), device)
    rows.query.mul_(size)
    rows.softmax = Softmax(1 / size)
    assert_near(rows.attend(), rows.slow()[0], torch.float16)


@given(
    st.sampled_from([16, 80]),
    st.integers(1, 7),
    st.lists(st.integers(1, 60), min_size=2, max_size=2),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**16),
    st.data(),
)
@settings(max_examples=8)
def test_only_chosen_segments_are_read(device, head_dim, segment, lengths, dtype, seed, data):
    count = -(-60 // segment)
    case = Case("model", dtype, 2, 3, head_dim, segment * count, tuple(lengths), seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Case, "kind", RowKind(capacity=segment * count, segment=segment))
        rows = Rows(case, device, garbage=0.0)
    memory, state = rows.slab.memory, rows.slab.state
    state.read_limit[:] = [data.draw(st.integers(1, 62)) for _ in lengths]
    state.channels[:] = [data.draw(st.integers(1, head_dim)) for _ in lengths]
    keys, values = (x.clone().to(device) for x in (rows.keys, rows.values))
    for row, length in enumerate(lengths):
        keys[row, length - 1], values[row, length - 1] = rows.key[0, row], rows.value[0, row]
        for bounds, beyond, widest in ((memory.lowest, math.inf, torch.amin), (memory.highest, -math.inf, torch.amax)):
            old = keys[row, : length - 1]
            whole = torch.nn.functional.pad(old, (0, 0, 0, segment * count - len(old)), value=beyond)
            bounds[LAYER, row] = widest(whole.view(count, segment, head_dim), dim=1)
    used = torch.tensor(lengths, device=device)
    lowest, highest = (
        torch.stack(
            [
                torch.nn.functional.pad(keys[row, :n], (0, 0, 0, segment * count - n), value=beyond)
                for row, n in enumerate(lengths)
            ]
        ).view(2, count, segment, head_dim)
        for beyond in (math.inf, -math.inf)
    )
    bounds = [each.masked_fill(each.isinf(), 0.0) for each in (lowest.amin(2), highest.amax(2))]  # of segments in use
    reads, channels = (torch.from_numpy(x.copy()).to(device) for x in (state.read_limit, state.channels))
    query, most = rows.query.view(2, 3, head_dim), int(reads.max())
    scale = rows.softmax.scale
    chosen = attention.choose_entries(query, *bounds, used, reads, channels, segment * count, most, scale)
    exact = attention.choose_entries(
        query.float(), *(each.float() for each in bounds), used, reads, channels, segment * count, most, scale
    )
    assume(torch.equal(chosen.sort().values, exact.sort().values))  # bfloat16 makes draws of segments nearly as good
    wanted = attention.attend_segments(query, keys, values, *bounds, used, reads, channels, most, Softmax(scale))
    for row, length in enumerate(lengths):  # the entry of the new token is written whether it is read or not
        read = chosen[row][chosen[row] < segment * count]
        assert len(read) == len(set(read.tolist())) == min(int(reads[row]), length)
        unread = torch.ones(segment * count, dtype=torch.bool, device=device).index_fill(0, read, False)
        memory.keys[0][LAYER, row, unread] = memory.values[0][LAYER, row, unread] = math.nan
    rows.tables._slots = ()
    rows.batch = rows.take()
    assert_near(rows.attend().view_as(wanted), wanted.cpu(), dtype)


@given(st.lists(st.integers(1, 1 << 17), min_size=1, max_size=300), st.integers(1, 160))
@example([16_384] * 8, 132)
@example([131_072, *[512] * 255], 132)
def test_long_rows_are_split_so_that_all_processors_work(entries, processors):
    splits = split_counts(np.array(entries), processors)
    assert (splits >= 1).all()
    assert (splits <= row_tables.MOST_SPLITS).all()
    assert splits.sum() <= len(entries) + row_tables.PROGRAMS * processors
    longest = (np.array(entries) / splits)[splits < row_tables.MOST_SPLITS].max(initial=0)
    fair = max(row_tables.SPLIT_ENTRIES, -(-sum(entries) // (row_tables.PROGRAMS * processors)))
    assert longest < 2 * fair


def test_where_there_is_no_gpu_nothing_is_read_by_kernels_unless_they_are_interpreted():
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the kernels were asked for")
    assert not kernels.is_available(torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        assert not kernels.supports(STORAGES["kivi4"], torch.float64, torch.device("cpu"))


MIXES = [
    ("h2o@12", "full+turbo4", "rocketkv@12:window=4,kernel=3"),
    ("streaming_llm@0.5+kivi4", "tova@12", "streaming_llm@12"),
]
LONG = [
    ("full", "full+fp8", "h2o@0.8+kivi4"),
    ("streaming_llm@20+turbo4", "h2o@20+turbo3", "tova@20+fp8"),
    ("adakv@16:window=4", "pyramidkv@20:window=4", "snapkv@16+ring:window=4"),
    ("full+kivi2", "streaming_llm@0.9+kivi4", "h2o@0.9+kivi4"),
]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fill workspace that a launch asks for with what nobody wrote: from a launch before, nothing is read."""
    workspace, asked = RowTables.workspace, list[str]()

    def filled(tables: RowTables, name: str, *given: Any) -> Tensor:
        asked.append(name)
        return workspace(tables, name, *given).fill_(1 << 30)

    monkeypatch.setattr(RowTables, "workspace", filled)
    return asked


@pytest.mark.parametrize(
    ("policies", "new"),
    [
        pytest.param(MIXES[0], 3, marks=pytest.mark.soak),
        *((mix, 3) for mix in MIXES[1:]),
        *(pytest.param(mix, 5, marks=pytest.mark.soak(least=0.5)) for mix in LONG),
    ],
)
def test_slots_decode_through_the_kernels_as_without_them(device, models, policies, new, poisoned):
    """In one batch, so that rows of all slabs and storages are attended beside each other."""
    if device.type == "cuda":
        pytest.skip("the model is on the CPU")
    requests = [
        make_request(prompt(20 + 25 * at, seed=at), new=new + at, policy=policy, name=policy)
        for at, policy in enumerate(policies)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "is_available", lambda device: False)
        expected = Driver(models["llama"], step_tokens=512).run(*requests)
    driver = Driver(models["llama"], step_tokens=512)
    assert driver.run(*requests) == expected
    assert all(slab.is_fused for slab in driver.engine.pool.slabs)
    assert {"taken", "peaks", "totals"} <= set(poisoned)


def test_a_step_that_fails_half_way_goes_on_in_parts_through_the_kernels(device, models, monkeypatch):
    """What was evicted, written and counted in the layers before is not done twice."""
    if device.type == "cuda":
        pytest.skip("the model is on the CPU")
    requests = [
        make_request(prompt(20 + 9 * at, seed=at), new=3, policy=policy, name=policy)
        for at, policy in enumerate(("h2o@12", "tova@12", "streaming_llm@12"))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "is_available", lambda device: False)
        expected = Driver(models["llama"], step_tokens=512).run(*requests)
    attend, failed = DecodeState.attend, list[int]()

    def failing(state: DecodeState, layer: int, *given: Any) -> Tensor:
        out = attend(state, layer, *given)
        if layer == 1 and len(state.slots) > 1:  # behind its attention, whenever there are several
            failed.append(len(state.slots))
            raise ValueError("it fails")
        return out

    monkeypatch.setattr(DecodeState, "attend", failing)
    assert Driver(models["llama"], step_tokens=512).run(*requests) == expected
    assert 3 in failed
    assert 2 in failed


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
run, compiled = JITFunction.run, {}


def only_compile(self, *args, grid, warmup, **given):
    compiled[self.fn.__name__] = run(self, *args, grid=grid, warmup=True, **given)


JITFunction.run = only_compile

from tests.unit.replicas.slots.test_kernels import Case, Rows
from warmkv.policies.slot_sizes import RowKind
from warmkv.replicas.slots import kernels

kernels.is_available = lambda device: True
cpu = torch.device("cpu")
for storage in sys.argv[2:]:
    case = Case(storage, torch.float16, 2, 4, 128, 128, (128, 96), 132, "argmin", window=99, softcap=30.0, sinks=True)
    Rows(case, cpu, 0.0).attend()
    assert "mma.sync" in compiled["attend_split"].asm["ptx"], "no tensor cores"
    print(storage, *(kernel.metadata.shared for kernel in compiled.values()))
if "model" in sys.argv:
    Case.kind = RowKind(128, segment=4)
    Rows(Case("model", torch.float16, 2, 4, 128, 128, (128, 96)), cpu, 0.0).attend()
    assert "v4.b32" in compiled["attend_split"].asm["ptx"], "rows are aligned, so 16 bytes are loaded at once"
    print("segments", *(kernel.metadata.shared for kernel in compiled.values()))
if "fp8" in sys.argv:
    from tests.unit.replicas.slots import test_paged_kernels
    from warmkv.policies.slot_sizes import KVShape
    from warmkv.policy_spec import PolicySpec

    test_paged_kernels.SHAPE = KVShape(layers=2, kv_heads=2, head_dim=128, dtype_bytes=2)
    test_paged_kernels.INV_FREQ = torch.ones(64, dtype=torch.float64)
    test_paged_kernels.attended([PolicySpec()], 1, 64, torch.float16, cpu)
    assert "v4.b32" in compiled["attend_split"].asm["ptx"], "pages are aligned, too"
    print("in-pages", *(compiled[name].metadata.shared for name in ("put", "attend_split")))
segments = {"estimate_segments", "choose_entries"}
wanted = {"put", "attend_split", "combine", "sum_received"} | segments
assert set(compiled) == wanted - (segments if "model" not in sys.argv else set()), compiled
"""


FIRST = ("model", "kivi4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "storages"),
    [
        (90, FIRST),
        pytest.param(80, tuple(READABLE), marks=pytest.mark.soak(least=0.5)),
        pytest.param(90, tuple(name for name in READABLE if name not in FIRST), marks=pytest.mark.soak(least=0.5)),
    ],
)
def test_the_kernels_compile_for_a_gpu_that_is_not_there(tmp_path, capability, storages):
    """What the interpreter takes the compiler may not. The memory of a program stays below what every GPU has."""
    ran = subprocess.run(
        [sys.executable, "-c", COMPILES, str(capability), *storages],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    shared = [int(size) for line in ran.stdout.splitlines() for size in line.split()[1:]]
    assert len(shared) >= 4 * len(storages)
    assert max(shared) <= 99 * 1024


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="there is no CUDA device")
@pytest.mark.parametrize("storage", READABLE)
def test_a_captured_call_follows_what_changes_in_its_tables(storage):
    """No shape, split or grid depends on a value: a CUDA graph reads the numbers of a step anew."""
    device = torch.device("cuda")
    case = Case(storage, torch.float16, 2, 4, 128, 4096, (4096, 96), 132, seed=1)
    rows = Rows(case, device, garbage=0.0)
    rows.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rows.attend()
    for lengths in ((4096, 4096), (64, 33)):
        now = Rows(Case(storage, torch.float16, 2, 4, 128, 4096, lengths, 132, seed=1), device, garbage=0.0)
        for mine, fresh in zip(rows.slab.memory.tensors(), now.slab.memory.tensors(), strict=True):
            mine.copy_(fresh)
        rows.tables.numbers.copy_(now.tables.numbers)
        graph.replay()
        assert_near(out, now.attend().cpu(), case.dtype)
