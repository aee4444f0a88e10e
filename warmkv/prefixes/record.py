"""One line of the access log: a request and its outcome.

The gateway writes it, the simulator replays it. Block hashes are salted by tenant, so a log shows which prefixes were
equal but not what they said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import inf
from operator import itemgetter, le
from typing import Any, NamedTuple

import pydantic_core

from warmkv.prefixes.hashing import DIGEST_BYTES
from warmkv.prefixes.packed_keys import Page
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


@dataclass(slots=True)
class Known:
    """Hold values of the lines read so far: equal ones of later lines are the same objects, block hashes are packed."""

    values: dict[str, str] = field(default_factory=dict)
    page: Page = field(default_factory=Page)
    marks: dict[bytes, Mark] = field(default_factory=dict)  # by their keys
    reads: dict[bytes, Candidate] = field(default_factory=dict)
    types: set[tuple[type, ...]] = field(default_factory=set)  # of plain values, found to be right

    def hashes(self, keys: Sequence[str]) -> Sequence[bytes]:
        """Read block hashes. Raises TypeError and ValueError, as the others do."""
        count = len(keys) if type(keys) is list else 0
        try:
            if count and max(map(len, keys)) == 2 * DIGEST_BYTES:
                packed = bytes.fromhex("".join(keys))  # which skips blanks
                if len(packed) == count * DIGEST_BYTES:
                    if self.page.is_full:
                        self.page.close()
                        self.page = Page()
                    return self.page.add(packed)
        except (TypeError, ValueError):
            pass  # one by one, for the reason
        return tuple(map(bytes.fromhex, keys))

    def breakpoints(self, marks: Iterable[tuple[Any, Any, str]]) -> tuple[Mark, ...]:
        """Read breakpoints."""
        same, known, found = self.values.setdefault, self.marks, []
        for position, ttl, text in marks:
            key = bytes.fromhex(text)
            mark = known.get(key)
            if mark is None or mark.position != position or mark.ttl != ttl:
                name, read = str(ttl), self.reads.get(key)
                mark = known[key] = Mark(int(position), same(name, name), key if read is None else read.key)
            found.append(mark)
        return tuple(found)

    def candidates(self, reads: Iterable[tuple[Any, str]]) -> tuple[Candidate, ...]:
        """Read candidates."""
        known, found = self.reads, []
        for position, text in reads:
            key = bytes.fromhex(text)
            read = known.get(key)
            if read is None or read.position != position:
                mark = self.marks.get(key)
                read = known[key] = Candidate(int(position), key if mark is None else mark.key)
            found.append(read)
        return tuple(found)

    def plain(self, values: Sequence[Any]) -> list[Any]:
        """Check the plain values of a line, in the order of `_PLAIN`."""
        types = tuple(map(type, values))
        if types not in self.types:
            for (name, kinds), found in zip(_PLAIN.items(), types, strict=True):
                if found not in kinds:  # so that a boolean is no integer
                    raise TypeError(f"{name} must be {kinds[-1].__name__}, not {found.__name__}")
            self.types.add(types)
        for at in _FLOATS:
            if not -inf < values[at] < inf:
                raise ValueError(f"{list(_PLAIN)[at]} must be finite")
        checked, same = list(values), self.values.setdefault
        for at in _NAMES:
            checked[at] = same(checked[at], checked[at])
        return checked


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
        line["generated"] = [key.hex() for key in self.generated]
        line["marks"] = [[mark.position, mark.ttl, mark.key.hex()] for mark in self.marks]
        line["reads"] = [[read.position, read.key.hex()] for read in self.reads]
        return json.dumps(line, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, known: Known | None = None) -> RequestRecord:
        """Read one line, sharing values with the lines that are `known`. Raises RecordError with the reason."""
        known = Known() if known is None else known
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
            if not line.keys() >= _DEFAULTS.keys():
                line = {**_DEFAULTS, **line}
            hashes = known.hashes(line["hashes"])
            marks = known.breakpoints(line["marks"])
            reads = known.candidates(line["reads"])
            values = known.plain(_plain(line))
            generated = tuple(map(bytes.fromhex, line["generated"]))
            values[_FIRST:_FIRST] = hashes, marks, reads, Usage(**line["usage"]), generated
            record = cls(*values)
            if record.input_tokens < 0 or record.output_tokens < 0 or record.block_size < 1:
                raise ValueError("token counts must not be negative and block_size must be positive")
            if record.input_tokens // record.block_size != len(hashes):
                raise ValueError(
                    f"{record.input_tokens} tokens have {record.input_tokens // record.block_size} full "
                    f"blocks of {record.block_size}, but {len(hashes)} hashes are given"
                )
            places = [position for position, _ in reads]
            if any(map(le, places, places[1:])):
                raise ValueError("reads must come highest position first")
            places += [mark.position for mark in marks]
            if places and not 0 < min(places) <= max(places) <= record.input_tokens:
                raise ValueError(f"marks and reads must lie within the prompt's {record.input_tokens} tokens")
            return record
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise RecordError(f"bad record: {type(error).__name__}: {error}") from None


_FIELDS = [item.name for item in fields(RequestRecord)]
_DEFAULTS: dict[str, Any] = {
    **{item.name: item.default for item in fields(RequestRecord) if item.default is not MISSING},
    "usage": {},
}
_PLAIN = {item.name: kinds for item in fields(RequestRecord) if (kinds := _KINDS.get(str(item.type)))}
"""The plain fields of a line, and the types that they may have."""

_plain = itemgetter(*_PLAIN)
_FIRST = _FIELDS.index("hashes")  # of the fields that are not plain, which stand together
_FLOATS = [at for at, kinds in enumerate(_PLAIN.values()) if float in kinds]
_NAMES = [
    at
    for at, (name, kinds) in enumerate(_PLAIN.items())
    if str in kinds and name not in ("id", "client_id", "trace_id")
]
"""Places of plain fields whose values many lines share."""
