"""A few thousand records of the access log in columns, with names and keys as they are, before they are numbered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pydantic_core
from numpy.typing import NDArray

from warmkv.prefixes.packed_keys import Packed
from warmkv.prefixes.record import KINDS
from warmkv.prefixes.record_columns import NUMBERS, Smalls

LISTS = ("hashes", "generated", "marks", "reads")
FLOATS = tuple(name for name in NUMBERS if float in KINDS[name])
TYPES = {name: np.float64 if name in FLOATS else np.int64 if name == "resident_bytes" else np.int32 for name in NUMBERS}

loads: Callable[[bytes | str], Any] = partial(pydantic_core.from_json, cache_strings="keys")
with suppress(ImportError):  # a third faster; not all who replay have it
    import orjson

    loads = orjson.loads


class UnusualError(Exception):
    """Report lines among which one is wrong, or right in a way that is rare."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Hold some records in columns, names and keys as they are."""

    numbers: Mapping[str, NDArray[Any]]  # plain ones and those of usage, by column
    words: Mapping[str, Sequence[str]]  # names and texts, those of several of a request behind each other
    counts: Mapping[str, Smalls]  # of parts
    parts: Mapping[str, Smalls]  # positions, and tokens written
    keys: Packed  # of hashes, generated, marks and reads, one behind the other
    odd: Mapping[bytes, bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.numbers["arrival"])


def check(chunk: Chunk) -> None:
    """Raise UnusualError where a row is not a record, as `RequestRecord.from_json` says in words."""
    numbers, counts, parts = chunk.numbers, chunk.counts, chunk.parts
    tokens, sizes, reads = numbers["input_tokens"], numbers["block_size"], parts["reads"]
    inner = np.ones(len(reads), dtype=bool)  # reads that are not the first of their request
    begins = counts["reads"].cumsum() - counts["reads"]
    inner[begins[counts["reads"] > 0]] = False
    if not (
        all(np.isfinite(numbers[name]).all() for name in FLOATS)
        and (sizes >= 1).all()
        and (tokens >= 0).all()
        and (numbers["output_tokens"] >= 0).all()
        and (tokens // sizes == counts["hashes"]).all()
        and (parts["marks"] >= 1).all()
        and (parts["marks"] <= np.repeat(tokens, counts["marks"])).all()
        and (reads >= 1).all()
        and (reads <= np.repeat(tokens, counts["reads"])).all()
        and (reads[1:] < reads[:-1])[inner[1:]].all()
    ):
        raise UnusualError
