"""The access log: one line per request, written by a thread so that no request waits for a disk."""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path

from warmkv.prefixes.record import RequestRecord

log = logging.getLogger(__name__)


class AccessLog:
    """Appends records to a file that several gateways of one machine may share."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)  # a line is one write, so lines of several writers stay whole
        self._records: queue.SimpleQueue[RequestRecord | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="access-log", daemon=True)
        self._thread.start()

    def write(self, record: RequestRecord) -> None:
        """Queue a record; a disk that fails is reported in the service's log and never fails a request."""
        self._records.put(record)

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._records.put(None)
        self._thread.join()
        self._file.close()

    def _write(self) -> None:
        while (record := self._records.get()) is not None:
            try:
                self._file.write(record.to_json() + "\n")
            except OSError as error:
                log.error("access log: %s", error)
