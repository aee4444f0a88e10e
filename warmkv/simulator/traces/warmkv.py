"""warmkv's own access log, one record a line; see `prefixes/record.py`.

A block is known by the first 64 bits of its hash. Breakpoints and tails have no place in the columns: what a cache of
full blocks would find is all that they tell.
"""

from __future__ import annotations

from collections.abc import Iterable

from warmkv.prefixes.record import Known, RecordError, RequestRecord
from warmkv.simulator.traces.columns import Builder, Row, RowError, Trace
from warmkv.simulator.traces.rows import Format, Parse, Reading, has_keys, lines

KEYS = ("v", "arrival", "tenant", "block_size")


def parser(reading: Reading) -> Parse:
    known = Known()

    def parse(line: str) -> Iterable[RequestRecord | None]:
        try:
            record = RequestRecord.from_json(line, known)
        except RecordError as error:
            raise RowError(str(error)) from None
        return (record if record.status == "ok" else None,)

    return parse


def trace_of(records: Iterable[RequestRecord]) -> Trace:
    """Convert records, in the order of arrival, to columns. Raises RowError if their block sizes differ."""
    builder = Builder("warmkv")
    for record in records:
        builder.add(row_of(record))
    return builder.build()


def row_of(record: RequestRecord) -> Row:
    """Return what the columns hold of a record."""
    return Row(
        arrival=record.arrival,
        input_tokens=record.input_tokens,
        output_tokens=record.output_tokens,
        blocks=[int.from_bytes(key[:8], "little", signed=True) for key in record.hashes],
        block_size=record.block_size,
        session=record.session or None,
        tenant=record.tenant,
    )


WARMKV = Format("warmkv", lambda line: has_keys(line, KEYS), parser, lines, records=True)
