"""The jobs of a replay: each is made when it arrives, and when it is over its outcome is kept as a row of numbers.

So a replay has as many `Job` objects as there are requests on their way, and 74 bytes for each that is over.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warmkv.prefixes.record import Mark
from warmkv.prefixes.record_columns import RecordColumns
from warmkv.simulator.cache.layout import Layout, numbers_of
from warmkv.simulator.cache.replica_cache import Found, Name
from warmkv.simulator.cluster.replica import ONE_GROUP, Job

FOLLOWS_NONE: Mapping[int, tuple[int, float]] = {}

FIELDS = {
    "is_over": "?",
    "failed": "?",
    "replica": "i",  # its place in `Jobs.replicas`: 0 if it was refused
    "gateway": "i",
    "retries": "i",
    "resumptions": "i",
    "num_preemptions": "i",
    "hit": "i",
    "blocks": "i",
    "reused": "i",
    "written": "i",
    "read": "i",
    "arrival": "d",
    "started": "d",
    "first": "d",
    "finished": "d",
}
"""An outcome, as `Job` has it; `hit` and `blocks` are those of its match."""

ROW = struct.Struct("=" + "".join(FIELDS.values()))


class Jobs:
    """Jobs by number, in the order of the records, made anew whenever one is asked for: as it is before it arrives, or
    once it is over.

    `sizes` has for each the fields of `Job` from `kind` on, `marks` may be empty if there are none. `following` names,
    by the number of a job, the one that arrives a time after that is over; of several the last.
    """

    def __init__(
        self,
        records: RecordColumns,
        sizes: Sequence[tuple[Any, ...]],
        marks: Sequence[tuple[Mark, ...]],
        marked: NDArray[np.bool_],
        shares: NDArray[np.bool_],
        groups: Sequence[tuple[str, ...]] = (),
        following: Mapping[int, tuple[int, float]] = FOLLOWS_NONE,
    ) -> None:
        self.records, self.sizes, self.marked, self.following = records, sizes, marked, following
        self.block_size = int(records.block_size[0]) if len(records) else 1
        self.replicas = [""]  # names
        self._places = {"": 0}
        self._rows = bytearray(len(records) * ROW.size)
        self._marks, self._groups, self._later = marks, groups, {number for number, _ in following.values()}
        self._layout: Layout | None = None
        self._names: Mapping[bytes, Name] = {}
        self._tenants, self._block_sizes = numbers_of(records.tenant), numbers_of(records.block_size)
        self._prompts, self._outputs = numbers_of(records.input_tokens), numbers_of(records.output_tokens)
        self._allowed = numbers_of(np.maximum(records.output_tokens, records.max_tokens))
        self._arrivals = numbers_of(records.arrival - records.arrival[:1])
        self._marked, self._shares = numbers_of(marked), numbers_of(shares)

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Job]:
        for number in range(len(self)):
            yield self[number]

    def __getitem__(self, number: int) -> Job:
        number, records = range(len(self))[number], self.records
        kind, kept, capacity, recomputed, slot_bytes, workspace_bytes, sum_bytes, endless = self.sizes[number]
        job = Job(
            number, records, records.names[self._tenants[number]], self._block_sizes[number], self._allowed[number],
            self._arrivals[number], self._marks[number] if self._marks else (), self._prompts[number],
            self._outputs[number], kind, kept, capacity, recomputed, slot_bytes, workspace_bytes, sum_bytes, endless,
            self._marked[number], self._shares[number], self._groups[number] if self._groups else ONE_GROUP,
        )  # fmt: skip
        if self._layout is not None:
            job.blocks = self._layout.prompts[number]
        if self._names:
            own = records.keys_of(*records.generated.of(number))
            job.generated = tuple([self._names[key] for key in own if key in self._names])
        if self._rows[number * ROW.size]:
            job.match = Found()
            (
                _, job.failed, replica, job.gateway, job.retries, job.resumptions, job.num_preemptions, job.match.hit,
                job.match.blocks, job.reused, job.written, job.read, job.arrival, job.started, job.first, job.finished,
            ) = ROW.unpack_from(self._rows, number * ROW.size)  # fmt: skip
            job.replica = self.replicas[replica]
        return job

    @property
    def outcomes(self) -> NDArray[Any]:
        """Return a row for every job, with `FIELDS`; one of zeros for a job that is not over."""
        return np.frombuffer(self._rows, dtype=np.dtype(list(FIELDS.items())))

    def coming(self) -> Iterator[Job]:
        """Make the jobs that wait for no other, one by one."""
        for number in range(len(self)):
            if number not in self._later:
                yield self[number]

    def lay_out(self, layout: Layout, names: Mapping[bytes, Name]) -> None:
        """Give all jobs the blocks of their prompts, and the `names` of those that end within their answers."""
        self._layout, self._names = layout, names

    def keep(self, job: Job) -> None:
        """Keep what became of a job."""
        place = self._places.setdefault(job.replica, len(self.replicas))
        if place == len(self.replicas):
            self.replicas.append(job.replica)
        ROW.pack_into(
            self._rows, job.number * ROW.size, True, job.failed, place, job.gateway, job.retries, job.resumptions,
            job.num_preemptions, job.match.hit, job.match.blocks, job.reused, job.written, job.read, job.arrival,
            job.started, job.first, job.finished,
        )  # fmt: skip
