"""Read lines of the access log from their bytes, as `RequestRecord.to_json` writes them: a thousand at a time.

Quotes tell where strings are, and a colon behind one that it names a field. So where every value lies is known for all
lines at once, and few become Python objects. Each byte is accounted for: what stands between strings and numbers is
compared with what `to_json` writes there, integers are digits alone, and a JSON parser reads other numbers. All lines
have the fields of the first, in its order. Those in another form, with blanks or escapes for instance, and those that
are wrong are left to the parser of `record_builder.py`.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warmkv.prefixes.hashing import DIGEST_BYTES
from warmkv.prefixes.packed_keys import packed
from warmkv.prefixes.record import COUNTS, DEFAULTS, KINDS, VERSION
from warmkv.prefixes.record_chunk import FLOATS, LISTS, TYPES, Chunk, UnusualError, check, loads
from warmkv.prefixes.record_columns import NAMES, NUMBERS, PARTS, TEXTS, Floats

Places = NDArray[np.int64]
Span = tuple[Places, Places]

LINE_BREAK, QUOTE, COLON, COMMA = b'\n":,'
HEX = 2 * DIGEST_BYTES  # characters of a key
DIGITS = 18  # of an integer
OF_USAGE = ("input", "read", "written", "output")
NEEDED = {"v", *LISTS, "usage"}
WORDS = (*NAMES, *TEXTS)


def chunk_of_text(text: bytes) -> Chunk:
    """Read whole lines. Raises UnusualError where not all are records as `to_json` writes them."""
    try:
        found = _chunk(_Text.of(text))
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise UnusualError from error
    check(found)
    return found


def _chunk(text: _Text) -> Chunk:
    """Return what lines hold, checked but for what `check` does."""
    finds, count = _Finds(text), len(text.ends)
    for name, value in text.values():
        if name in ("hashes", "generated"):
            finds.list_of_keys(name, value)
        elif name in ("marks", "reads"):
            finds.list_of_positions(name, value)
        elif name == "usage.written":
            finds.mapping("written", value)
        elif name in WORDS:
            finds.word(name, value)
        else:
            finds.number(name, value)
    integers, floats, words = text.integers(finds.integers), text.floats(finds.floats), text.words(finds.words)
    _require((integers.pop("v") == VERSION).all())
    for name in KINDS.keys() - set(text.fields):  # of older logs
        if name in WORDS:
            words[name] = [DEFAULTS[name]] * count
        else:
            (floats if name in FLOATS else integers)[name] = np.full(count, DEFAULTS[name])
    numbers = {name: floats[name] if name in FLOATS else _narrow(integers[name], TYPES[name]) for name in NUMBERS}
    owners = np.repeat(np.arange(count), finds.counts["written"]).tolist()
    _require(len(set(zip(owners, words["written"], strict=True))) == len(owners))
    return Chunk(
        numbers | {f"usage_{name}": _narrow(integers[f"usage.{name}"], np.int32) for name in COUNTS},
        words,
        {name: finds.counts[name].astype(np.int32) for name in PARTS},
        {name: _narrow(integers[name], np.int32) for name in ("written", "marks", "reads")},
        packed(text.keys(np.concatenate([finds.keys[name] for name in LISTS]))),
    )


def _narrow(values: Places, dtype: type) -> NDArray[Any]:
    """Return values in fewer bytes. Raises UnusualError where they do not fit."""
    _require(values.max(initial=0) <= np.iinfo(dtype).max)
    return values.astype(dtype)


def _require(holds: Any) -> None:
    if not holds:
        raise UnusualError


class _Value(NamedTuple):
    """Locate the value of a field in each line: `counts` strings from number `first` on, its beginning and end."""

    first: Places
    counts: Places
    begin: Places
    end: Places


@dataclass(frozen=True, slots=True)
class _Text:
    """Hold lines as one text, and where its strings are."""

    raw: bytes
    data: NDArray[np.uint8]
    starts: Places  # of lines
    ends: Places  # their line breaks
    opens: Places  # opening quotes of strings
    closes: Places
    fields: Sequence[str]  # of each line, those of its usage behind it, as usage.input

    @classmethod
    def of(cls, raw: bytes) -> _Text:
        _require(raw.isascii() and b"\\" not in raw)
        data = np.frombuffer(raw, dtype=np.uint8)
        ends = np.flatnonzero(data == LINE_BREAK)
        _require(np.count_nonzero(data < ord(" ")) == len(ends))
        if not raw.endswith(b"\n"):
            ends = np.append(ends, len(raw))
        quotes = np.flatnonzero(data == QUOTE)
        _require(len(quotes) % 2 == 0)
        starts = np.append(0, ends[:-1] + 1)
        fields = _fields(loads(raw[: ends[0]]))
        return cls(raw, data, starts, ends, quotes[::2], quotes[1::2], fields)

    def values(self) -> Iterator[tuple[str, _Value]]:
        """Yield the place of each value, from left to right. What stands between them is checked."""
        named = np.flatnonzero(self.data[self.closes + 1] == COLON)  # strings that name a field, or a TTL in `written`
        first = np.searchsorted(self.opens[named], self.starts)
        ttls = np.diff(first, append=len(named)) - len(self.fields)
        _require((ttls >= 0).all())
        written = self.fields.index("usage.written")
        names = [named[first + at + (ttls if at > written else 0)] for at in range(len(self.fields))]
        names.append(np.append(names[0][1:], len(self.opens)))
        at = self.starts
        for name, (string, following) in zip(self.fields, pairwise(names), strict=True):
            opening = name in (self.fields[0], "usage.input")
            self.require(b'%s"%s":' % (b"{" if opening else b",", name.rpartition(".")[2].encode()), at)
            _require((self.opens[string] == at + 1).all())
            begin = self.closes[string] + 2
            at = self.ends - 1 if name == self.fields[-1] else self.opens[following] - 1
            counts = following - string - 1
            if name == "usage":
                _require((begin == at).all())
                continue
            if name == "usage.written":
                _require((counts == ttls).all())
            if name == "usage.output":
                self.require(b"}", at - 1)
            yield name, _Value(string + 1, counts, begin, at - (name == "usage.output"))
        self.require(b"}", at)

    def require(self, word: bytes, places: Places) -> None:
        """Raise UnusualError where the text is another one."""
        _require((self._windows(f"S{len(word)}")[places] == word).all())

    def keys(self, strings: Places) -> bytes:
        """Return the keys that strings are. Raises ValueError where some are none."""
        _require((self.closes[strings] - self.opens[strings] == HEX + 1).all())
        return binascii.unhexlify(self._windows(f"V{HEX}")[self.opens[strings] + 1].tobytes())

    def words(self, strings: Mapping[str, Places]) -> dict[str, list[str]]:
        """Return strings, by their numbers. Those of one name are often all the same."""
        found, others = {}, dict[str, Places]()
        for name, each in strings.items():
            begins, ends = self.opens[each] + 1, self.closes[each]
            if len(each) and (word := self.raw[begins[0] : ends[0]]):
                if (ends - begins == len(word)).all() and (self._windows(f"S{len(word)}")[begins] == word).all():
                    found[name] = [word.decode("ascii")] * len(each)
                    continue
            elif (ends == begins).all():
                found[name] = [""] * len(each)
                continue
            others[name] = each
        if others:
            every = np.concatenate(list(others.values()))
            text = self._joined(self.opens[every] + 1, self.closes[every], QUOTE).decode("ascii")
            rest = iter(text.split('"'))
            found |= {name: list(islice(rest, len(each))) for name, each in others.items()}
        return found

    def integers(self, spans: Mapping[str, Span]) -> dict[str, Places]:
        """Return counts: digits, which do not begin with a 0 unless it is all."""
        begins, ends = map(np.concatenate, zip(*spans.values(), strict=True))
        digits = ends - begins
        _require((digits > 0).all() and (digits <= DIGITS).all())
        _require(((self.data[begins] != ord("0")) | (digits == 1)).all())
        values, some = np.zeros(len(begins), dtype=np.int64), np.arange(len(begins))
        for place in range(int(digits.max())):
            some = some[digits[some] > place]
            digit = self.data[ends[some] - 1 - place].astype(np.int64) - ord("0")
            _require(((digit >= 0) & (digit <= 9)).all())
            values[some] += digit * 10**place
        return dict(zip(spans, np.split(values, np.cumsum([len(begin) for begin, _ in spans.values()])), strict=False))

    def floats(self, spans: Mapping[str, Span]) -> dict[str, Floats]:
        """Return numbers as JSON has them. Raises ValueError for others."""
        if not spans:
            return {}
        begins, ends = map(np.concatenate, zip(*spans.values(), strict=True))
        _require((begins < ends).all())
        every = loads(b"[%s]" % self._joined(begins, ends, COMMA)[:-1])
        _require(len(every) == len(begins) and set(map(type, every)) <= {int, float})
        return dict(zip(spans, np.array(every, dtype=np.float64).reshape(len(spans), -1), strict=True))

    def _joined(self, begins: Places, ends: Places, separator: int) -> bytes:
        """Return pieces of the text, a separator behind each."""
        counts = ends - begins + 1
        found = self.data[_ranges(begins, counts)]
        found[counts.cumsum() - 1] = separator
        return found.tobytes()

    def _windows(self, dtype: str) -> NDArray[Any]:
        """Return the text at each place."""
        width = int(dtype[1:])
        return np.ndarray((len(self.raw) - width + 1,), dtype, self.raw, strides=(1,))


def _fields(line: Any) -> Sequence[str]:
    """Return the fields of a line. Raises UnusualError for others than those of a record."""
    _require(type(line) is dict and line.keys() >= NEEDED and line.keys() <= NEEDED | KINDS.keys())
    _require(tuple(line["usage"]) == OF_USAGE)
    found: list[str] = []
    for name in line:
        found += [name, *(f"usage.{each}" for each in OF_USAGE if name == "usage")]
    return found


@dataclass(frozen=True, slots=True)
class _Finds:
    """Collect where strings and numbers are, so that all are read at once."""

    text: _Text
    counts: dict[str, Places] = field(default_factory=dict)  # of parts
    keys: dict[str, Places] = field(default_factory=dict)  # strings
    words: dict[str, Places] = field(default_factory=dict)  # strings
    integers: dict[str, Span] = field(default_factory=dict)
    floats: dict[str, Span] = field(default_factory=dict)

    def number(self, name: str, value: _Value) -> None:
        _require((value.counts == 0).all())
        (self.floats if name in FLOATS else self.integers)[name] = value.begin, value.end

    def word(self, name: str, value: _Value) -> None:
        opens, closes = self.text.opens[value.first], self.text.closes[value.first]
        _require(((value.counts == 1) & (opens == value.begin) & (closes == value.end - 1)).all())
        self.words[name] = value.first

    def list_of_keys(self, name: str, value: _Value) -> None:
        self.counts[name], self.keys[name] = value.counts, _ranges(value.first, value.counts)
        begins, ends = self.text.opens[self.keys[name]], self.text.closes[self.keys[name]] + 1
        self._check_items(b"[]", value, value.counts, begins, ends)

    def list_of_positions(self, name: str, value: _Value) -> None:
        """Find lists of a position, in `marks` a TTL, and a key each."""
        width, text = 2 if name == "marks" else 1, self.text
        counts, odd = np.divmod(value.counts, width)
        _require(not odd.any())
        firsts = _ranges(value.first, value.counts)[::width]
        lasts = firsts + width - 1
        ends = text.closes[lasts] + 2
        begins = np.append(0, ends + 1)[:-1]
        begins[_firsts(counts)] = value.begin[counts > 0] + 1
        self._check_items(b"[]", value, counts, begins, ends)
        text.require(b"[", begins)
        text.require(b",", text.opens[firsts] - 1)
        text.require(b'"]', text.closes[lasts])
        if name == "marks":
            text.require(b'","', text.closes[firsts])
            self.words[name] = firsts
        self.counts[name], self.keys[name] = counts, lasts
        self.integers[name] = begins + 1, text.opens[firsts] - 1

    def mapping(self, name: str, value: _Value) -> None:
        """Find a count for each of some words."""
        words, counts = _ranges(value.first, value.counts), value.counts
        begins = self.text.opens[words]
        ends = np.append(begins - 1, 0)[1:]
        ends[_lasts(counts)] = value.end[counts > 0] - 1
        self._check_items(b"{}", value, counts, begins, ends)
        self.counts[name], self.words[name] = counts, words
        self.integers[name] = self.text.closes[words] + 2, ends

    def _check_items(self, brackets: bytes, value: _Value, counts: Places, begins: Places, ends: Places) -> None:
        """Raise UnusualError if a value is not these items, with commas between them, in brackets."""
        first, last, some, lengths = _firsts(counts), _lasts(counts), counts > 0, value.end - value.begin
        inner = np.delete(ends, last)
        _require((lengths >= 2).all() and (lengths[~some] == 2).all())
        _require((begins[first] == value.begin[some] + 1).all() and (ends[last] == value.end[some] - 1).all())
        _require((inner + 1 == np.delete(begins, first)).all())
        self.text.require(brackets[:1], value.begin)
        self.text.require(b",", inner)
        self.text.require(brackets[1:], value.end - 1)


def _ranges(firsts: Places, counts: Places) -> Places:
    """Return so many numbers from each of the first on, one after the other."""
    ends = counts.cumsum()
    found: Places = np.arange(int(ends[-1])) + np.repeat(firsts - (ends - counts), counts)
    return found


def _firsts(counts: Places) -> Places:
    """Return the places of the first items of those that have any."""
    found: Places = (counts.cumsum() - counts)[counts > 0]
    return found


def _lasts(counts: Places) -> Places:
    """Return the places of the last items of those that have any."""
    found: Places = counts.cumsum()[counts > 0] - 1
    return found
