"""Encode the messages between a gateway and a replica, in which each request has a number, its stream.

Events of many requests are one message to the gateway: a line of JSON, [[stream, kind, *fields], ...]. Orders go to the
replica: a request, pickled as Ray would, or nothing, which cancels it, behind its stream and its length.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable
from functools import partial
from typing import Any

import orjson

from warmkv.replicas.protocol import (
    Admitted,
    Alive,
    Delta,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    PromptLogprobs,
    Refused,
    Started,
    TokenLogprobs,
)

LONGEST_LINE = 1 << 26  # bytes
LONGEST_ORDER = 1 << 28  # bytes

_HEAD = struct.Struct(">QI")  # of an order: stream, bytes that follow

_CLASSES: dict[str, type[Any]] = {
    "admitted": Admitted,
    "refused": Refused,
    "started": Started,
    "delta": Delta,
    "finished": Finished,
    "failed": Failed,
    "alive": Alive,
}
_KINDS = {made: kind for kind, made in _CLASSES.items()}


def encode(events: Iterable[tuple[int, Event]]) -> bytes:
    """Encode events, each with its stream, as one line."""
    rows: list[Any] = []
    for stream, event in events:
        if isinstance(event, Delta):
            rows.append((stream, "delta", event.text, event.output_tokens, event.tokens))
            if event.logprobs:
                rows[-1] += (_rows(event.logprobs),)
        elif isinstance(event, Finished):
            rows.append((stream, "finished", event.reason, event.output_tokens, event.stop_sequence))
            if event.logprobs:
                rows[-1] += (_rows(event.logprobs),)
        elif isinstance(event, PromptLogprobs):
            rows.append((stream, "prompt", _rows(event.logprobs)))
        else:
            kind = type(event)
            rows.append((stream, _KINDS[kind], *map(partial(getattr, event), kind.__slots__)))
    return orjson.dumps(rows, option=orjson.OPT_APPEND_NEWLINE)


def decode(line: bytes) -> list[tuple[int, Event]]:
    """Decode the events of a line, in order. Raises ValueError, TypeError or KeyError if it is malformed."""
    events: list[tuple[int, Event]] = []
    for stream, kind, *fields in orjson.loads(line):
        if kind == "delta":
            text, output_tokens, tokens, *logprobs = fields
            events.append((stream, Delta(text, output_tokens, tuple(tokens), *map(_logprobs, logprobs))))
        elif kind == "finished":
            reason, output_tokens, stop, *logprobs = fields
            events.append((stream, Finished(reason, output_tokens, stop, *map(_logprobs, logprobs))))
        elif kind == "prompt":
            events.append((stream, PromptLogprobs(*map(_logprobs, fields))))
        else:
            events.append((stream, _CLASSES[kind](*fields)))
    return events


def _rows(logprobs: Iterable[TokenLogprobs]) -> list[Any]:
    return [(one.token, one.logprob, one.top) for one in logprobs]


def _logprobs(rows: Iterable[Any]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(token, logprob, tuple((other, its) for other, its in top)) for token, logprob, top in rows
    )


class Lines:
    """Split a stream of bytes into lines of at most `longest` bytes."""

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self.longest = longest
        self._rest: list[bytes] = []  # pieces of the line that has no end yet
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the complete lines. Raises ValueError if one becomes too long."""
        first, *others = data.split(b"\n")
        self._rest.append(first)
        self._size += len(first)
        if self._size > self.longest:
            raise ValueError(f"a line has more than {self.longest} bytes")
        if not others:
            return []
        whole = [b"".join(self._rest), *others[:-1]]
        self._rest, self._size = [others[-1]], len(others[-1])
        return whole


def encode_order(stream: int, request: GenerateRequest | None) -> bytes:
    """Encode a request under its stream; None cancels it."""
    body = b"" if request is None else pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(stream, len(body)) + body


class Orders:
    """Split a stream of bytes into orders."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, GenerateRequest | None]]:
        """Add bytes and return the complete orders. Raises ValueError if one is too long."""
        rest, at, orders = self._rest, 0, list[tuple[int, GenerateRequest | None]]()
        rest += data
        while len(rest) - at >= _HEAD.size:
            stream, length = _HEAD.unpack_from(rest, at)
            if length > LONGEST_ORDER:
                raise ValueError(f"an order has {length} bytes, more than {LONGEST_ORDER}")
            end = at + _HEAD.size + length
            if len(rest) < end:
                break
            orders.append((stream, pickle.loads(rest[at + _HEAD.size : end]) if length else None))
            at = end
        del rest[:at]
        return orders
