"""The jobs of a replay by number: made when they arrive, and what became of each stays as a row of columns.

As objects a million of them take half a gigabyte.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from warmkv.prefixes.record import Mark
from warmkv.prefixes.record_columns import RecordColumns
from warmkv.simulator.cache.layout import NONE, Layout
from warmkv.simulator.cache.replica_cache import Name
from warmkv.simulator.cluster.replica import Job
from warmkv.simulator.engine.formation import NEVER

if TYPE_CHECKING:
    from warmkv.simulator.workload.job_sizes import JobSizes
    from warmkv.simulator.workload.requests import FollowUp

Ints = NDArray[np.int64]
AT_ONCE = 256  # jobs that are made together


class Jobs:
    """Hold the jobs of records, ordered by arrival: `sizes` and `marks` of each, and who waits for whom as `turns`.

    `shares` tells which read or write prefixes that are billed by breakpoint. `arriving` makes those that are to run,
    `keep` takes what became of one. `jobs[number]` is a job with its outcome, made anew each time; the columns that are
    public have those of all.
    """

    def __init__(
        self,
        records: RecordColumns,
        sizes: Sequence[JobSizes],
        marks: Sequence[tuple[Mark, ...]],
        shares: NDArray[np.bool_],
        turns: Mapping[int, FollowUp],
    ) -> None:
        count = len(records)
        self.records, self.sizes, self._marks, self._shares, self._turns = records, sizes, marks, shares, turns
        self._following = {turn.previous: number for number, turn in turns.items()}
        self._waiting: dict[int, Job] = {}  # for the turn before them
        self.groups: Sequence[tuple[str, ...]] = ()  # of replicas that can serve each job, where there are several
        self.layout: Layout | None = None
        self.generated: dict[int, tuple[Name, ...]] = {}  # blocks within answers that are part of other prompts

        self.arrival = array("d", (records.arrival - records.arrival[:1]).astype(np.float64).tobytes())
        self.submitted, self.started, self.first, self.finished = (array("d", [NEVER]) * count for _ in range(4))
        self.replica = array("i", [0]) * count  # places in `replicas`
        self.replicas = [""]
        self._places = {"": 0}
        self.hit, self.blocks_found, self.reused, self.written, self.read = (array("i", [0]) * count for _ in range(5))
        self.retries, self.resumptions, self.preemptions, self.gateway = (array("i", [0]) * count for _ in range(4))
        self.failed, self.too_large = (array("b", [0]) * count for _ in range(2))

    def __len__(self) -> int:
        return len(self.arrival)

    def __iter__(self) -> Iterator[Job]:
        for start in range(0, len(self), AT_ONCE):
            for job in self._made(start, start + AT_ONCE):
                yield self._with_outcome(job)

    @overload
    def __getitem__(self, at: int) -> Job: ...
    @overload
    def __getitem__(self, at: slice) -> list[Job]: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        number = range(len(self))[at]
        (job,) = self._made(number, number + 1)
        return self._with_outcome(job)

    def arriving(self) -> Iterator[Job]:
        """Make jobs in the order of arrival, those that wait for no other."""
        if self._turns:  # any of them may end before the next has arrived
            made = self._made(0, len(self))
            self._waiting = {job.number: job for job in made if job.number in self._turns}
            yield from [job for job in made if job.number not in self._turns]
            return
        for start in range(0, len(self), AT_ONCE):
            yield from self._made(start, start + AT_ONCE)

    def following(self, number: int) -> Job | None:
        """Return the job that waits for this one, if one does."""
        return self._waiting.pop(self._following.get(number, NONE), None)

    def think(self, number: int) -> float:
        """Return the seconds from the end of the job that this one waits for to its arrival."""
        return self._turns[number].think

    def keep(self, job: Job) -> None:
        """Keep what became of a job; the object is needed no more."""
        number, place = job.number, self._places.get(job.replica)
        if place is None:
            place = self._places[job.replica] = len(self.replicas)
            self.replicas.append(job.replica)
        self.arrival[number], self.gateway[number], self.replica[number] = job.arrival, job.gateway, place
        self.submitted[number], self.started[number] = job.submitted, job.started
        self.first[number], self.finished[number] = job.first, job.finished
        self.hit[number], self.blocks_found[number] = job.hit, job.blocks_found
        self.reused[number], self.written[number], self.read[number] = job.reused, job.written, job.read
        self.retries[number], self.resumptions[number] = job.retries, job.resumptions
        self.preemptions[number] = job.num_preemptions
        self.failed[number], self.too_large[number] = job.failed, job.too_large

    @property
    def block_size(self) -> int:
        """Return that of the first job, which is that of all."""
        return int(self.records.block_size[0]) if len(self) else 1

    def column(self, name: str, since: int = 0) -> NDArray[Any]:
        """Return one of the public columns, from a job on."""
        values: array[Any] = getattr(self, name)
        return np.frombuffer(values, dtype=values.typecode)[since:]

    @property
    def slot_bytes(self) -> Ints:
        """Return the bytes of each job's slot."""
        return np.array([sizes.slot_bytes for sizes in self.sizes], dtype=np.int64)

    def served(self, since: int = 0) -> Ints:
        """Return the numbers of the jobs, from one on, that a replica has served."""
        found: Ints = np.flatnonzero(self.column("replica", since)) + since
        return found

    def _made(self, start: int, stop: int) -> list[Job]:
        """Make jobs that are to run: many at once take half the time."""
        part, records = slice(start, stop), self.records
        names, numbers = records.names, range(start, stop)
        columns = zip(
            numbers, records.tenant[part].tolist(), records.block_size[part].tolist(),
            self.arrival[start:stop], self._marks[start:stop],
            records.input_tokens[part].tolist(), records.output_tokens[part].tolist(),
            records.is_named("api", "messages", part).tolist(), self._shares[part].tolist(), self.sizes[start:stop],
            strict=False,
        )  # fmt: skip
        made = [
            Job(
                number, records, names[tenant], block_size, arrival, marks, prompt, drawn, marked, shares, *sizes,
            )
            for number, tenant, block_size, arrival, marks, prompt, drawn, marked, shares, sizes in columns
        ]  # fmt: skip
        if self.layout is not None:
            for job, prompt in zip(made, self.layout.prompts[start:stop], strict=False):
                job.blocks = prompt
        if self.groups:
            for job, groups in zip(made, self.groups[start:stop], strict=True):
                job.groups = groups
        if self.generated:
            for job in made:
                job.generated = self.generated.get(job.number, ())
        return made

    def _with_outcome(self, job: Job) -> Job:
        number = job.number
        job.submitted, job.started = self.submitted[number], self.started[number]
        job.first, job.finished = self.first[number], self.finished[number]
        job.gateway, job.replica = self.gateway[number], self.replicas[self.replica[number]]
        job.hit, job.blocks_found = self.hit[number], self.blocks_found[number]
        job.reused, job.written, job.read = self.reused[number], self.written[number], self.read[number]
        job.retries, job.resumptions = self.retries[number], self.resumptions[number]
        job.num_preemptions = self.preemptions[number]
        job.failed, job.too_large = bool(self.failed[number]), bool(self.too_large[number])
        return job
