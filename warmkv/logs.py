"""Log lines that name their request: key=value behind the message, and fields of the record for JSON formatters."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from warmkv.request_context import RequestContext

_current: ContextVar[RequestContext | None] = ContextVar("request", default=None)


@contextmanager
def about(context: RequestContext | None) -> Iterator[None]:
    """Name a request in every line that is logged inside, in this task or thread."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def begin(context: RequestContext | None) -> None:
    """Name a request in every line that this task logs from now on: for tasks that serve one request each."""
    _current.set(context)


class RequestFields(logging.Filter):
    """Adds `request`, `client`, `trace` and `span` to records that are logged while a request is served."""

    def filter(self, record: logging.LogRecord) -> bool:
        context = _current.get()
        if context is None or hasattr(record, "request"):
            return True
        fields = {"request": context.id}
        if context.client_id:
            fields["client"] = context.client_id
        if context.trace is not None:
            fields |= {"trace": context.trace.trace_id, "span": context.trace.span_id}
        record.__dict__.update(fields)
        pairs = " ".join(f"{key}={value}" for key, value in fields.items())
        record.msg, record.args = f"{record.getMessage()} {pairs}", ()
        return True


class ForwardingHandler(logging.Handler):
    """Hands records to another logger, whatever handlers that has by then."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target = target
        self.addFilter(RequestFields())

    def emit(self, record: logging.LogRecord) -> None:
        target = logging.getLogger(self._target)
        if target.isEnabledFor(record.levelno):
            target.handle(record)


def forward(target: str) -> None:
    """Log what the package logs through `target`: in an actor of Ray Serve its logger, "ray.serve".

    Only Serve's own logger has handlers there, which write the actor's file in Serve's format, text or JSON.
    """
    package = logging.getLogger("warmkv")
    package.handlers = [ForwardingHandler(target)]
    package.propagate = False
    package.setLevel(logging.INFO)


class LineLimit:
    """At most `limit` lines a minute, in bursts of as many; those left out are counted. Threads may share it."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit, self._clock = limit, clock
        self._left, self._then = float(limit), clock()
        self._suppressed = 0
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """Return how many lines were left out since the last one; None where this one must be left out, too."""
        with self._lock:
            now = self._clock()
            self._left = min(self._limit, self._left + (now - self._then) * self._limit / 60)
            self._then = now
            if self._left < 1:
                self._suppressed += 1
                return None
            self._left -= 1
            suppressed, self._suppressed = self._suppressed, 0
            return suppressed
