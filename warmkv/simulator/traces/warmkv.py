"""warmkv's own access log, one record a line; see `prefixes/record.py`.

Lines are read many at a time. In a trace a block is known by the first 64 bits of its hash. Breakpoints and tails have
no place in its columns: what a cache of full blocks would find is all that they tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.record_builder import Chunk, chunks_of
from warmkv.simulator.traces.columns import Builder, Row, Trace
from warmkv.simulator.traces.rows import Format, Items, has_keys, lines

KEYS = ("v", "arrival", "tenant", "block_size")
MANY = 1024  # lines that are read at a time: what they become fits into a core's cache
MOST = 1 << 22  # characters of them


class LogLines(NamedTuple):
    """Hold records in columns, those of failed requests as well, and the lines where they stand."""

    chunk: Chunk
    lines: Sequence[int]

    @property
    def skipped(self) -> int:
        """Count the records of requests that failed or were cancelled."""
        status = self.chunk.words["status"]
        return len(status) - status.count("ok")


def read(items: Items, refuse: Callable[[int, str], None]) -> Iterator[LogLines]:
    """Read numbered lines. Those that are no records are refused with their number and the reason."""
    for batch in _batches(items):
        numbers = [number for number, _ in batch]

        def refused(at: int, reason: str, numbers: Sequence[int] = numbers) -> None:
            refuse(numbers[at], reason)

        for first, chunk in chunks_of([text for _, text in batch], refused):
            yield LogLines(chunk, numbers[first : first + len(chunk)])


def _batches(items: Items) -> Iterator[list[tuple[int, str]]]:
    """Yield many lines at a time; those that came before one that cannot be read come before the reason."""
    batch: list[tuple[int, str]] = []
    size = 0
    try:
        for item in items:
            batch.append(item)
            size += len(item[1])
            if len(batch) == MANY or size > MOST:
                yield batch
                batch, size = [], 0
    except Exception:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def trace_of(records: Iterable[RequestRecord]) -> Trace:
    """Convert records, in the order of arrival, to columns. Raises RowError if their block sizes differ."""
    builder = Builder("warmkv")
    for record in records:
        builder.add(row_of(record))
    return builder.build()


def row_of(record: RequestRecord) -> Row:
    """Return what the columns of a trace hold of a record."""
    return Row(
        arrival=record.arrival,
        input_tokens=record.input_tokens,
        output_tokens=record.output_tokens,
        blocks=[int.from_bytes(key[:8], "little", signed=True) for key in record.hashes],
        block_size=record.block_size,
        session=record.session or None,
        tenant=record.tenant,
    )


def rows_of(chunk: Chunk) -> Iterator[Row | None]:
    """Yield `row_of` each record of a chunk; None for requests that failed or were cancelled."""
    numbers, words, counts = chunk.numbers, chunk.words, chunk.counts["hashes"].tolist()
    plain = [numbers[name].tolist() for name in ("arrival", "input_tokens", "output_tokens", "block_size")]
    blocks, at = chunk.keys[: sum(counts), 0].view("int64").tolist(), 0
    others = zip(*plain, words["session"], words["tenant"], words["status"], counts, strict=True)
    for arrival, prompt, output, size, session, tenant, status, count in others:
        if status == "ok":
            yield Row(arrival, prompt, output, blocks[at : at + count], size, session or None, tenant)
        else:
            yield None
        at += count


WARMKV = Format("warmkv", lambda line: has_keys(line, KEYS), None, lines, records=True)
