"""One line of the access log: a request and its outcome.

The gateway writes it, the simulator replays it. Block hashes are salted by tenant, so a log shows which prefixes were
equal but not what they said.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

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
    hashes: tuple[bytes, ...]  # of the prompt's full blocks
    marks: tuple[Mark, ...] = ()
    reads: tuple[Candidate, ...] = ()  # highest position first
    usage: Usage = field(default_factory=Usage)
    replica: str = ""
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
    session: str = ""  # a hash of the conversation that it names
    bytes_per_token: float = 0.0  # of the prompt's text, where its tokens were counted by that; 0: by a tokenizer

    def to_json(self) -> str:
        """Return the record as one line without a line break."""
        line: dict[str, Any] = {"v": VERSION, **{name: getattr(self, name) for name in _FIELDS}}
        line["usage"] = {name: getattr(self.usage, name) for name in Usage.__match_args__}
        line["hashes"] = [key.hex() for key in self.hashes]
        line["marks"] = [[mark.position, mark.ttl, mark.key.hex()] for mark in self.marks]
        line["reads"] = [[read.position, read.key.hex()] for read in self.reads]
        return json.dumps(line, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, known: dict[Any, Any] | None = None) -> RequestRecord:
        """Read one line. Raises RecordError with the reason.

        Names and keys that are `known` from other lines are the same objects as there, which takes half the memory.
        """
        same = ({} if known is None else known).setdefault
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise RecordError(f"not JSON: {error.msg}") from None
        if not isinstance(line, dict) or line.get("v") != VERSION:
            raise RecordError(f"not an access-log record of version {VERSION}")
        try:
            values = {name: line[name] for name in _FIELDS if name in line}
            values["hashes"] = tuple([same(key, key) for key in map(bytes.fromhex, line["hashes"])])
            marks = [(int(at), str(ttl), bytes.fromhex(key)) for at, ttl, key in line.get("marks", ())]
            values["marks"] = tuple([Mark(at, same(ttl, ttl), same(key, key)) for at, ttl, key in marks])
            reads = [(int(at), bytes.fromhex(key)) for at, key in line.get("reads", ())]
            values["reads"] = tuple([Candidate(at, same(key, key)) for at, key in reads])
            values["usage"] = Usage(**line.get("usage", {}))
            for name, kinds in _FIELDS.items():
                if kinds and name in values:
                    value = values[name]
                    if type(value) not in kinds:  # so that a boolean is no integer
                        raise TypeError(f"{name} must be {kinds[-1].__name__}, not {type(value).__name__}")
                    if type(value) is float and not math.isfinite(value):
                        raise ValueError(f"{name} must be finite")
                    if name in _NAMES:
                        values[name] = same(value, value)
            record = cls(**values)
            if record.input_tokens < 0 or record.output_tokens < 0 or record.block_size < 1:
                raise ValueError("token counts must not be negative and block_size must be positive")
            if record.input_tokens // record.block_size != len(record.hashes):
                raise ValueError(
                    f"{record.input_tokens} tokens have {record.input_tokens // record.block_size} full "
                    f"blocks of {record.block_size}, but {len(record.hashes)} hashes are given"
                )
            places = [mark.position for mark in record.marks] + [read.position for read in record.reads]
            if places and not 0 < min(places) <= max(places) <= record.input_tokens:
                raise ValueError(f"marks and reads must lie within the prompt's {record.input_tokens} tokens")
            if any(upper.position <= lower.position for upper, lower in itertools.pairwise(record.reads)):
                raise ValueError("reads must come highest position first")
            return record
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"bad record: {type(error).__name__}: {error}") from None


_FIELDS = {item.name: _KINDS.get(str(item.type), ()) for item in fields(RequestRecord)}
"""The fields of a line, and the types that its plain values may have."""

_NAMES = {name for name, kinds in _FIELDS.items() if kinds == (str,)} - {"id", "client_id", "trace_id"}
"""Fields whose values many lines share."""
