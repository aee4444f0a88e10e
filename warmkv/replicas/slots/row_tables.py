"""Rows as kernels find them: by address, so that one launch attends rows of all slabs, wherever they lie.

Two tables of int64 have a column for every row of the pool. Facts stay while no slab is allocated, moved or given back;
numbers are those of a step. A launch names its rows by their columns, in the order of the batch, which is padded to a
bucket: -1 stands for rows that are none. All of it lies in the buffer of the step, and is uploaded at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from warmkv.policies.compression.storage_format import StorageFormat
from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import STORAGES
from warmkv.replicas.slots.row_facts import NOT_FUSED, PARTS, VECTORS, line
from warmkv.replicas.slots.rows import ARGMIN, Advance, Bools, Ints, RowTable
from warmkv.replicas.slots.slabs import Slab
from warmkv.replicas.slots.step_buffer import StepBuffer

if TYPE_CHECKING:
    from warmkv.replicas.slots.slot import Slot

NUMBERS = (
    "entry",  # where the new token goes (of front and tail, where there are any)
    "before",  # entries in use before it
    "packed",  # packed entries in use with it
    "age",  # position of the new token
    "oldest",  # age above which entries are recent
    "early",  # age below which entries are protected
    "rerotated",  # positions by which sinks are rotated on
    "read_limit",  # entries that may be read, where segments are chosen
    "channels",  # channels by which they are chosen
    "evicts",  # whether the new token takes the place of the entry with the lowest score
    "in_front",  # entries of the front in use
    "tail_start",  # the oldest entry that waits
    "tail_limit",  # entries that may wait
    "waiting",  # how many do
    "page_keys",  # of rows in pages: addresses of the page that the new token goes to, in the first layer
    "page_values",
)


SPLIT_ENTRIES = 256
"""Entries of a row below which a split is not worth the partial result that it leaves."""
PROGRAMS = 8
"""Programs for a multiprocessor: a few run beside each other, and the last to start are a small part of all."""
MOST_SPLITS = 64
LEAST_ROWS = 64
"""Columns of the tables; there are twice as many whenever rows lack some."""


@dataclass(frozen=True, slots=True)
class RowBatch:
    """List the rows of one storage that a layer attends, n of them with padding; reused until the batch changes.

    Rows that pad the batch come last, and get zeros.
    """

    rows: Tensor  # [n] their columns in the tables; -1: none
    places: Tensor  # [n] (sequence, KV head) counted through
    first_splits: Tensor  # [n + 1] where the splits of each begin among `tasks`
    tasks: Tensor  # [programs] the row of each split
    logits_at: Tensor  # [n] where the logits of scored rows begin, in entries; -1: not scored
    storage: StorageFormat
    logits: int  # entries of all scored rows
    first_type: torch.dtype  # of the first part of keys and values
    aligned: bool  # whether parts begin at multiples of 16 bytes
    most_entries: int  # of scored rows
    most_read: int  # of rows whose segments are chosen
    most_segments: int
    scored: bool
    segmented: bool
    rebased: bool
    windowed: bool
    sequence: int | None  # of the batch, where each has launches of its own


@dataclass(frozen=True, slots=True)
class _Layout:
    """Hold a `RowBatch` on the host: its index tensors as arrays, other fields by name."""

    index: tuple[Ints, ...]
    facts: dict[str, Any]


class RowTables:
    """Keep a pool's tables and workspace in the step's buffer; they move only to grow."""

    def __init__(
        self, shape: KVShape, buffer: StepBuffer, device: torch.device, inv_freq: Tensor, page_size: int = 0
    ) -> None:
        self.buffer, self.inv_freq, self.page_size = buffer, inv_freq, page_size
        self._shape, self._device = shape, device
        self._workspace: dict[str, Tensor] = {}
        self._state: RowTable | None = None  # a pool makes another whenever rows move
        self._moves = 0  # of the buffer when its facts were written
        self.facts = self.numbers = torch.empty(0, 0, dtype=torch.int64, device=device)
        self.taken = torch.empty(shape.layers, 0, dtype=torch.int64, device=device)
        self._known: Ints = np.empty((0, 0), dtype=np.int64)
        self._rows, self._dtype = 0, torch.float32
        self.is_static = False  # whether launches are the same for all batches of a size, as recordings need
        self.by_sequence = False  # whether every sequence has launches of its own, which nothing else decides on
        self.key: Hashable = ()  # of the layout: all that launches take, but for what they read from the buffer
        self._grown = 0  # how often workspace has moved
        self._slots: tuple[Slot, ...] = ()
        self._batches: list[list[RowBatch]] = [[] for _ in range(shape.layers)]
        cuda = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1

    def _follow(self, slabs: Sequence[Slab], state: RowTable) -> bool:
        """Update the facts if slabs, or the rows in `state`, have changed; return True if so."""
        if self._state is state and self._moves == self.buffer.moves:
            return False
        self._state = None
        known = np.concatenate([slab.facts() for slab in slabs], axis=1)
        rows = self._rows = known.shape[1]
        room = max(LEAST_ROWS, 1 << (rows - 1).bit_length())  # so that tables stay where they are while few rows come
        self._known = np.pad(known, [(0, 0), (0, room - rows)])
        self._dtype = slabs[0].dtype
        self.buffer.reserve(numbers=len(NUMBERS) * room, facts=self._known.size)
        self._write_facts()
        self.taken = self.workspace("taken", (self._shape.layers, room), torch.int64)
        self._state = state
        return True

    def _write_facts(self) -> None:
        room = self._known.shape[1]
        self.buffer.write("facts")[: self._known.size] = self._known.ravel()
        self.facts = self.buffer.on_device("facts")[: self._known.size].view(-1, room)
        self.numbers = self.buffer.on_device("numbers")[: len(NUMBERS) * room].view(-1, room)
        self._moves = self.buffer.moves

    def take(self, state: RowTable, done: Advance, active: Bools, ages: Ints, shifts: Ints, pages: Ints) -> None:
        """Write the numbers of a step, for the next upload.

        `ages` are positions of new tokens, of which the model sees `shifts` less; `pages` [2, rows] are the addresses
        of the pages that they go to, where rows lie in pages.
        """
        lengths = np.where(active, done.lengths, 1)
        room = self._known.shape[1]
        for numbers, column in zip(
            self.buffer.write("numbers")[: len(NUMBERS) * room].reshape(-1, room),
            (
                np.where(active, done.entries, 0),
                done.before,
                np.where(state.grouped > 0, state.packed, lengths),
                ages,
                ages - state.recent,
                state.protected,
                np.where(active, ages - shifts + 1 - lengths, 0),
                np.maximum(state.read_limit, 1),
                np.maximum(state.channels, 1),
                active & done.full & (state.decode == ARGMIN) & (state.grouped == 0),
                np.minimum(state.count, state.front),
                state.tail_start,
                state.tail_limit,
                state.waiting,
                *pages,
            ),
            strict=True,
        ):
            numbers[: self._rows] = column

    def batches(
        self, slots: Sequence[Slot], slabs: Sequence[Slab], state: RowTable, at: Ints, padded: int
    ) -> list[list[RowBatch]]:
        """Return the launches of each layer for slots, whose rows have batch indices `at` (-1: not in the batch).

        They are laid out anew, for `padded` sequences, when the batch has changed or rows have moved.
        """
        moved = self._follow(slabs, state)
        if moved or self._slots != tuple(slots):
            self._slots = ()
            self._batches = self._lay_out(state, at, len(slots), padded)
            self._slots = tuple(slots)
        return self._batches

    def _lay_out(self, state: RowTable, at: Ints, sequences: int, padded: int) -> list[list[RowBatch]]:
        heads = self._shape.kv_heads
        facts = self._known[:, : self._rows]
        storage, first, layers = (facts[line(name)] for name in ("storage", "first_layer", "layers"))
        mine = np.flatnonzero((at >= 0) & (storage != NOT_FUSED))
        of = np.repeat(mine, layers[mine])  # each as often as it has layers
        layer = first[of] + np.arange(len(of)) - np.repeat(np.cumsum(layers[mine]) - layers[mine], layers[mine])
        rows = np.full((self._shape.layers, sequences * heads), -1, dtype=np.int64)
        rows[layer, at[of] * heads + state.head[of]] = of
        batches: list[list[_Layout]] = []
        for number, there in enumerate(rows):
            if number and (there == rows[number - 1]).all():
                batches.append(batches[-1])
                continue
            places = np.flatnonzero(there >= 0)
            batches.append([])
            pads = np.arange(sequences * heads, padded * heads)
            sequence = places // heads if self.by_sequence else np.zeros_like(places)
            for name, of_one in dict.fromkeys(zip(storage[there[places]].tolist(), sequence.tolist(), strict=True)):
                these = places[(storage[there[places]] == name) & (sequence == of_one)]
                found = self._layout(name, there[these], these, state.read_limit[there[these]], pads)
                found.facts["sequence"] = of_one if self.by_sequence else None
                batches[-1].append(found)
                pads = pads[:0]
        distinct = list({id(each): each for layer in batches for each in layer}.values())
        parts = [part for each in distinct for part in each.index]
        # All begin at multiples of 16 bytes: Triton compiles a kernel anew for pointers that do not.
        aligned = [np.pad(part, (0, len(part) % 2)) for part in parts]
        index = np.concatenate([np.zeros(0, dtype=np.int64), *aligned])
        if self.buffer.reserve(index=len(index)):
            self._write_facts()
        self.buffer.write("index")[: len(index)] = index
        split = torch.split(self.buffer.on_device("index")[: len(index)], [len(part) for part in aligned])
        on_device = iter([at[: len(part)] for at, part in zip(split, parts, strict=True)])
        made = {}
        for each in distinct:
            rows_of, places_of, first_splits, tasks, logits_at = islice(on_device, len(each.index))
            made[id(each)] = RowBatch(rows_of, places_of, first_splits, tasks, logits_at, **each.facts)
        numbers = {each: number for number, each in enumerate(made)}
        self.key = (
            tuple(tuple(numbers[id(each)] for each in layer) for layer in batches),
            tuple((*map(len, each.index), *each.facts.values()) for each in distinct),
        )
        return [[made[id(each)] for each in layer] for layer in batches]

    @property
    def places(self) -> Hashable:
        """Return a key that changes whenever memory that launches use moves."""
        return self.buffer.moves, self.facts.shape[1], self._grown

    def _layout(self, number: int, rows: Ints, places: Ints, read_limits: Ints, pads: Ints) -> _Layout:
        """Lay out a launch over rows of a storage at their places in the batch; `read_limits` are those of the rows.

        They are followed by rows that are none, at the places `pads`.
        """
        storage = list(STORAGES.values())[number]

        def fact(name: str) -> Ints:
            known: Ints = self._known[line(name), rows]
            return known

        segment, scored = fact("segment"), fact("scored") > 0
        segments = -(-fact("capacity") // np.maximum(segment, 1))
        entries = fact("capacity") + fact("uncompressed")
        reach = np.where(segment > 0, np.minimum(read_limits, entries), entries)
        splits = np.concatenate([split_counts(reach, self._processors), np.ones_like(pads)])
        ends = np.cumsum(splits)
        logits = np.where(scored, entries, 0)
        vectors = [PARTS.index(name) for name in VECTORS]
        nothing = np.full_like(pads, -1)
        tasks = np.repeat(np.arange(len(splits)), splits)
        if self.is_static:
            tasks = np.pad(tasks, (0, len(splits) + PROGRAMS * self._processors - len(tasks)), constant_values=-1)
        index = (
            np.concatenate([rows, nothing]),
            np.concatenate([places, pads]),
            np.concatenate([[0], ends]),
            tasks,
            np.concatenate([np.where(scored, np.cumsum(logits) - logits, -1), nothing]),
        )
        facts = {
            "storage": storage,
            "logits": self._at_most(logits.sum()),
            "first_type": self._dtype if storage.plain else torch.uint8,
            "aligned": bool((self._known[[*vectors, *(len(PARTS) + at for at in vectors)]][:, rows] % 16 == 0).all()),
            "most_entries": self._at_most(entries[scored].max(initial=0)),
            "most_read": self._at_most(reach[segment > 0].max(initial=0)),
            "most_segments": self._at_most(segments[segment > 0].max(initial=0)),
            "scored": bool(scored.any()),
            "segmented": bool(segment.any()),
            "rebased": bool((fact("rebased") * fact("sinks")).any()),
            "windowed": bool(fact("window").any()),
        }
        return _Layout(index, facts)

    def _at_most(self, number: int) -> int:
        """Round a bound up, so that few launches differ, where they are recorded."""
        return 1 << (int(number) - 1).bit_length() if self.is_static and number else int(number)

    @property
    def workspace_bytes(self) -> int:
        return sum(held.nbytes for held in self._workspace.values())

    def workspace(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialised workspace, which stays where it is until a larger one is asked for."""
        size = int(np.prod(shape))
        held = self._workspace.get(name)
        if held is None or len(held) < size:
            self._grown += 1
            room = max(size, 2 * len(held) if held is not None else 0)
            self._workspace[name] = held = torch.empty(room, dtype=dtype, device=self._device)
        return held[:size].view(shape)


def split_counts(entries: Ints, processors: int) -> Ints:
    """Return the programs for each row: all get about as many entries, and few long rows keep all processors busy."""
    each = max(SPLIT_ENTRIES, -(-int(entries.sum()) // (PROGRAMS * processors)))
    counts: Ints = np.clip(entries // each, 1, MOST_SPLITS)
    return counts


def padded_batch(sequences: int) -> int:
    """Return the sequences that a batch is padded to: 1, 2, 4, 8, then multiples of 8, as of 256 of 16 (cf. vLLM)."""
    if sequences <= 8:
        return 1 << (sequences - 1).bit_length()
    step = 8 if sequences <= 256 else 16
    return -(-sequences // step) * step
