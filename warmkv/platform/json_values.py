"""Count the values of JSON in linear time, before anything is made of it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# Possessive, and an open string ends with the data: nothing is read twice, whatever is sent. Escapes are gone before.
_STRING = rb'"[^"]*+(?:"|\Z)'
_STRINGS = re.compile(_STRING)
_PIECE = re.compile(rb'(?:[^"]++|' + _STRING + rb"){1,4096}+")  # a pattern holds the GIL while it matches


class TooManyValuesError(Exception):
    """Refuse JSON that would take many times its size in memory."""


def count(data: bytes, limit: int) -> int:
    """Count values and keys; the rest is not read where there are more than `limit`. What is no JSON has some, too."""
    if (most := _separators(data)) < limit:  # an upper bound: commas in strings count, too
        return most
    values = 1
    for piece in outside_strings(data):
        values += _separators(piece)
        if values > limit:
            break
    return values


def loads(data: bytes, limit: int) -> Any:
    """Parse JSON. Raises ValueError, RecursionError, or TooManyValuesError where it has more values than `limit`."""
    encoding = json.detect_encoding(data)
    text = data.decode(encoding, "surrogatepass")
    if count(data if encoding == "utf-8" else text.encode("utf-8", "surrogatepass"), limit) > limit:
        raise TooManyValuesError(f"more than {limit} JSON values")
    return json.loads(text)


def outside_strings(data: bytes) -> Iterator[bytes]:
    """Yield JSON without its strings, in pieces; maybe less behind a backslash outside of them, where parsers end."""
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    return (_STRINGS.sub(b"", piece.group()) for piece in _PIECE.finditer(unescaped))


def _separators(data: bytes) -> int:
    """Count what stands before every JSON value and key but the first, strings of `data` included."""
    return sum(map(data.count, (b",", b":", b"[", b"{")))
