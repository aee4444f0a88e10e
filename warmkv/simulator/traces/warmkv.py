"""warmkv's own access log, one record a line; see `prefixes/record.py`.

Lines are read many at a time. In a trace a block is known by the first 64 bits of its hash. Breakpoints and tails have
no place in its columns: what a cache of full blocks would find is all that they tell.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.record_builder import chunks_of
from warmkv.prefixes.record_chunk import Chunk, UnusualError
from warmkv.prefixes.record_text import chunk_of_text
from warmkv.simulator.traces.columns import Builder, Row, Trace
from warmkv.simulator.traces.rows import LONGEST, Format, Items, TooLongError, has_keys, objects

KEYS = ("v", "arrival", "tenant", "block_size")
BLOCK = 1 << 20  # bytes that are read at a time
MANY = 1024  # lines that are parsed at a time: what they become fits into a core's cache

_SPREAD = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[|\{\s*\n\s*\")")


class LogLines(NamedTuple):
    """Hold records in columns, those to skip as well, and the lines where they stand."""

    chunk: Chunk
    lines: Sequence[int]

    @property
    def skipped(self) -> int:
        """Count the records of requests that failed, were cancelled, or have a prompt of which nothing is known."""
        status, prompts = self.chunk.words["status"], self.chunk.numbers["input_tokens"]
        if prompts.all():
            return len(status) - status.count("ok")
        return sum(each != "ok" or not tokens for each, tokens in zip(status, prompts.tolist(), strict=True))


def read(file: io.TextIOWrapper, refuse: Callable[[int, str], None]) -> Iterator[LogLines]:
    """Read a log, many lines at a time. Those that are no records are refused with their number and the reason.

    Raises TooLongError at a line that is longer than a row may be.
    """
    if _is_spread(file.buffer):
        yield from _read_items(objects(file), refuse)
        return
    number, encoding = 1, file.encoding
    for block in _blocks(file.buffer):
        try:
            if len(block) > LONGEST:
                raise UnusualError
            chunk = chunk_of_text(block)
        except UnusualError:
            lines = list(io.TextIOWrapper(io.BytesIO(block), encoding, file.errors))
            yield from _read_lines(lines, number, refuse)
            number += len(lines)
        else:
            yield LogLines(chunk, range(number, number + len(chunk)))
            number += len(chunk)
        encoding = "utf-8"  # a byte order mark stands at the beginning


def _is_spread(file: Any) -> bool:
    """Return True if a binary file begins with a record over many lines, or an array."""
    return _SPREAD.match(file.peek(BLOCK)) is not None


def _read_lines(lines: Sequence[str], first: int, refuse: Callable[[int, str], None]) -> Iterator[LogLines]:
    """Read lines that are numbered from `first` on. Raises TooLongError."""
    length = next((at for at, line in enumerate(lines) if len(line) > LONGEST), len(lines))
    numbered = ((first + at, lines[at]) for at in range(length) if not lines[at].isspace())
    yield from _read_items(numbered, refuse)
    if length < len(lines):
        raise TooLongError(first + length)


def _read_items(items: Items, refuse: Callable[[int, str], None]) -> Iterator[LogLines]:
    """Read records with the number of their first line."""
    while batch := list(islice(items, MANY)):

        def refused(at: int, reason: str, batch: Sequence[tuple[int, str]] = batch) -> None:
            refuse(batch[at][0], reason)

        for at, chunk in chunks_of([text for _, text in batch], refused):
            yield LogLines(chunk, [number for number, _ in batch[at : at + len(chunk)]])


def _blocks(file: Any) -> Iterator[bytes]:
    """Yield whole lines of a binary file, many together; those before what cannot be read come before the reason.

    A line that is longer than a row may be is the end.
    """
    pieces: list[bytes] = []
    size = 0
    try:
        while size <= LONGEST + BLOCK and (piece := file.read1(BLOCK)):
            end = piece.rfind(b"\n") + 1
            if size + len(piece) >= BLOCK and end:
                yield b"".join([*pieces, piece[:end]])
                pieces, size = [], 0
                piece = piece[end:]
            pieces.append(piece)
            size += len(piece)
    except Exception:
        rest = b"".join(pieces)
        if end := rest.rfind(b"\n") + 1:
            yield rest[:end]
        raise
    if size:
        yield b"".join(pieces)


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
    """Yield `row_of` each record of a chunk; None for those that are skipped."""
    numbers, words, counts = chunk.numbers, chunk.words, chunk.counts["hashes"].tolist()
    plain = [numbers[name].tolist() for name in ("arrival", "input_tokens", "output_tokens", "block_size")]
    blocks, at = chunk.keys[: sum(counts), 0].view("int64").tolist(), 0
    others = zip(*plain, words["session"], words["tenant"], words["status"], counts, strict=True)
    for arrival, prompt, output, size, session, tenant, status, count in others:
        if status == "ok" and prompt:
            yield Row(arrival, prompt, output, blocks[at : at + count], size, session or None, tenant)
        else:
            yield None
        at += count


WARMKV = Format("warmkv", lambda line: has_keys(line, KEYS), None, objects, records=True)
