"""Reading an access log: the requests that can be replayed, and an account of the lines that cannot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from warmkv.prefixes.record import RecordError, RequestRecord
from warmkv.simulator.traces import KEPT_FAULTS, TraceError
from warmkv.simulator.traces.reader import files_of, text_of


@dataclass(frozen=True, slots=True)
class Log:
    """Requests in the order of arrival, and what was left out."""

    requests: tuple[RequestRecord, ...]
    broken: int = 0  # lines that are no records
    skipped: int = 0  # records of requests that failed or were cancelled
    faults: tuple[str, ...] = ()  # FILE:LINE: reason, of the first broken lines


def read(path: Path, *, strict: bool = False) -> Log:
    """Read a file of JSON lines as the gateway writes it, also as .gz, or a folder of them. Blank lines are ignored.

    Raises TraceError if a file cannot be read, or at the first broken line if `strict`.
    """
    requests: list[RequestRecord] = []
    faults: list[str] = []
    broken = skipped = 0
    for file in files_of(path):
        with text_of(file) as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    record = RequestRecord.from_json(line)
                except RecordError as error:
                    fault = f"{file}:{number}: {error}"
                    if strict:
                        raise TraceError(fault) from None
                    broken += 1
                    if len(faults) < KEPT_FAULTS:
                        faults.append(fault)
                    continue
                if record.status == "ok":
                    requests.append(record)
                else:
                    skipped += 1
    requests.sort(key=lambda record: record.arrival)
    return Log(tuple(requests), broken, skipped, tuple(faults))
