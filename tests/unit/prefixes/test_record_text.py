"""Lines read from their bytes, against each by itself: either all as it says, or none."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.prefixes.test_record import GOOD, records
from tests.unit.prefixes.test_record_builder import lines, one_by_one
from warmkv.prefixes.record import Candidate, Mark
from warmkv.prefixes.record_builder import Builder
from warmkv.prefixes.record_chunk import UnusualError
from warmkv.prefixes.record_text import chunk_of_text
from warmkv.prefixes.usage import Usage

WORDS = st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters='"\\\\'), max_size=5)
PIECES = [
    *'",:[]{}0123456789.eE-',
    " ",
    "\n",
    "\r",
    "\t",
    "\\",
    "\u00e9",
    "true",
    "null",
    "NaN",
    "[[",
    '"]',
    ",,",
    '"a":1,',
]
PIECES = st.sampled_from([*PIECES, '"5m":1,', '"hashes":[],', "1e400", "2147483648", "a" * 32])


def read(text):
    """Return the records of lines, or None where they are unusual."""
    builder = Builder()
    try:
        builder.add(chunk_of_text(text.encode()))
    except UnusualError:
        return None
    return list(builder.build())


@st.composite
def plain(draw):
    """Draw a record whose words need no escapes."""
    written = st.dictionaries(WORDS, st.integers(0, 10**6), max_size=3)
    words = {name: draw(WORDS) for name in ("id", "tenant", "replica", "session", "error", "client_id")}
    return replace(draw(records()), usage=Usage(1, 2, draw(written), 3), **words)


@given(st.lists(plain(), min_size=1, max_size=5), st.booleans())
def test_what_the_gateway_writes_is_read(several, ended):
    assert read("\n".join(record.to_json() for record in several) + "\n" * ended) == several


@given(st.lists(lines(), min_size=1, max_size=3))
def test_other_lines_are_read_as_each_by_itself_or_left(texts):
    found = read("\n".join(texts) + "\n")
    assert found is None or (dict(enumerate(found)), {}) == one_by_one(texts)


@given(st.lists(plain(), min_size=1, max_size=3), st.data())
def test_a_line_with_anything_in_it_is_read_as_by_itself_or_left(several, data):
    text = "".join(record.to_json() + "\n" for record in several)
    for _ in range(data.draw(st.integers(1, 2))):
        begin = data.draw(st.integers(0, len(text) - 1))
        end = begin + data.draw(st.sampled_from([0, 1, 1, 2, 35]))
        text = text[:begin] + data.draw(PIECES | st.just("")) + text[end:]
    found = read(text)
    assert found is None or (dict(enumerate(found)), {}) == one_by_one(text.removesuffix("\n").split("\n"))


@pytest.mark.parametrize("name", ["session", "bytes_per_token", "prefill", "usage", "marks", "arrival", "v"])
def test_fields_may_be_missing_where_they_have_a_default(name):
    line = json.loads(GOOD.to_json())
    del line[name]
    text = json.dumps(line, separators=(",", ":"))
    assert read(text) == ([GOOD] if name in ("session", "bytes_per_token", "prefill") else None)
    assert read(f"{GOOD.to_json()}\n{text}\n") is None


def test_fields_may_come_in_another_order():
    full = replace(
        GOOD, marks=(Mark(8, "5m", b"3" * 16),), reads=(Candidate(8, b"3" * 16),), usage=Usage(1, 2, {"5m": 8}, 3)
    )
    line = dict(reversed(json.loads(full.to_json()).items()))
    assert read(json.dumps(line, separators=(",", ":"))) == [full]


def test_a_ttl_that_is_named_twice_is_left():
    line = replace(GOOD, usage=Usage(written={"5m": 1, "1h": 2})).to_json()
    assert read(line) is not None
    assert read(line.replace("1h", "5m")) is None
