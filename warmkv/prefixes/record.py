"""One line of the access log: a request and its outcome.

The gateway writes it, the simulator replays it. Block hashes are salted by tenant, so a log shows which prefixes were
equal but not what they said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import inf
from operator import le
from typing import Any, NamedTuple

import pydantic_core

from warmkv.prefixes.usage import Usage

VERSION = 1
_KINDS: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}


class RecordError(ValueError):
    """A line that is not an access-log record."""


class Mark(NamedTuple):
    """A breakpoint: the exact prefix of `position` tokens is written under `key` for the TTL of that name."""

    position: int
    ttl: str
    key: bytes


class Candidate(NamedTuple):
    """A position at which an earlier write may be read, and the name of that exact prefix."""

    position: int
    key: bytes


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times are seconds; `arrival` is Unix time. `ttft` and `e2e` run from the arrival at the gateway."""

    id: str  # as in the `request-id` header
    arrival: float
    tenant: str  # a hash, never the name or the key
    model: str
    api: str  # messages, chat, completions, responses
    policy: str  # short form, as in snapkv@0.2
    block_size: int
    input_tokens: int
    output_tokens: int
    hashes: Sequence[bytes]  # of the prompt's full blocks
    marks: tuple[Mark, ...] = ()
    reads: tuple[Candidate, ...] = ()  # highest position first
    usage: Usage = field(default_factory=Usage)
    generated: tuple[bytes, ...] = ()  # full blocks behind, of its answer, if the engine keeps them
    replica: str = ""
    group: str = ""  # of `cluster.groups`, which the replica is of
    cached_tokens: int = 0  # prompt tokens whose KV was reused, whatever was billed
    resident_bytes: int = 0  # of the decode slot
    queue: float = 0.0
    prefill: float = 0.0  # from its turn to its first token, in the replica; 0 if unknown
    ttft: float = 0.0
    e2e: float = 0.0
    max_tokens: int = 0  # what the request allowed, and its slot was sized for; 0 if unknown
    status: str = "ok"  # ok, error, cancelled
    stop_reason: str = ""
    error: str = ""  # type of the error that the client got
    client_id: str = ""  # its x-request-id
    trace_id: str = ""  # of its traceparent
    session: str = ""  # a hash of the one that it names, or that its log tells
    bytes_per_token: float = 0.0  # of the prompt's text, where its tokens were counted by that; 0: by a tokenizer

    def to_json(self) -> str:
        """Return the record as one line without a line break."""
        line: dict[str, Any] = {"v": VERSION, **{name: getattr(self, name) for name in _FIELDS}}
        line["usage"] = {name: getattr(self.usage, name) for name in Usage.__match_args__}
        line["hashes"] = [key.hex() for key in self.hashes]
        line["generated"] = [key.hex() for key in self.generated]
        line["marks"] = [[mark.position, mark.ttl, mark.key.hex()] for mark in self.marks]
        line["reads"] = [[read.position, read.key.hex()] for read in self.reads]
        return json.dumps(line, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RequestRecord:
        """Read one line. Raises RecordError with the reason."""
        try:
            line = pydantic_core.from_json(text, cache_strings="keys")
        except ValueError:  # half a surrogate pair, too, which Python's parser takes
            try:
                line = json.loads(text)
            except (json.JSONDecodeError, RecursionError) as error:
                raise RecordError(f"not JSON: {getattr(error, 'msg', error)}") from None
        if not isinstance(line, dict) or line.get("v") != VERSION:
            raise RecordError(f"not an access-log record of version {VERSION}")
        try:
            record = cls(**_values({**DEFAULTS, **line}))
            if record.input_tokens < 0 or record.output_tokens < 0 or record.block_size < 1:
                raise ValueError("token counts must not be negative and block_size must be positive")
            if record.input_tokens // record.block_size != len(record.hashes):
                raise ValueError(
                    f"{record.input_tokens} tokens have {record.input_tokens // record.block_size} full "
                    f"blocks of {record.block_size}, but {len(record.hashes)} hashes are given"
                )
            places = [position for position, _ in record.reads]
            if any(map(le, places, places[1:])):
                raise ValueError("reads must come highest position first")
            places += [mark.position for mark in record.marks]
            if places and not 0 < min(places) <= max(places) <= record.input_tokens:
                raise ValueError(f"marks and reads must lie within the prompt's {record.input_tokens} tokens")
            return record
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise RecordError(f"bad record: {type(error).__name__}: {error}") from None


def _values(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a line as a record has them. Raises as conversions do."""
    values: dict[str, Any] = {
        "hashes": tuple(map(bytes.fromhex, line["hashes"])),
        "marks": tuple(Mark(int(position), str(ttl), bytes.fromhex(key)) for position, ttl, key in line["marks"]),
        "reads": tuple(Candidate(int(position), bytes.fromhex(key)) for position, key in line["reads"]),
        "usage": Usage(**line["usage"]),
        "generated": tuple(map(bytes.fromhex, line["generated"])),
    }
    for name, kinds in KINDS.items():
        values[name] = value = line[name]
        _check(name, value, kinds)
        if type(value) is float and not -inf < value < inf:
            raise ValueError(f"{name} must be finite")
    usage = values["usage"]
    _check("usage.written", usage.written, (dict,))
    for name, count in (*((name, getattr(usage, name)) for name in COUNTS), *usage.written.items()):
        _check(f"usage.{name}", count, (int,))
    return values


def _check(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    if type(value) not in kinds:  # so that a boolean is no integer
        raise TypeError(f"{name} must be {kinds[-1].__name__}, not {type(value).__name__}")


COUNTS = ("input", "read", "output")
"""Counts of a `Usage` beside those of what was written."""

DEFAULTS: Mapping[str, Any] = {
    **{item.name: item.default for item in fields(RequestRecord) if item.default is not MISSING},
    "usage": {},
}
KINDS: Mapping[str, tuple[type, ...]] = {
    item.name: kinds for item in fields(RequestRecord) if (kinds := _KINDS.get(str(item.type)))
}
"""The plain fields of a line, and the types that they may have."""

_FIELDS = [item.name for item in fields(RequestRecord)]
