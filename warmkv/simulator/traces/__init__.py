"""Traces of requests in their public formats, all read into one columnar form.

One file a format; `reader.FORMATS` lists them.
"""

from warmkv.simulator.traces.columns import Row, RowError, Trace, TraceError
from warmkv.simulator.traces.reader import FORMATS, KEPT_FAULTS, read, stream
from warmkv.simulator.traces.rows import Reading

__all__ = ["FORMATS", "KEPT_FAULTS", "Reading", "Row", "RowError", "Trace", "TraceError", "read", "stream"]
