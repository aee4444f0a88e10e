"""Records as columns, against records one by one."""

import json
from dataclasses import replace

import numpy as np
import pydantic_core
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.prefixes.test_record import GOOD, records
from warmkv.prefixes import record_builder
from warmkv.prefixes.record import Candidate, Mark, RecordError, RequestRecord
from warmkv.prefixes.record_builder import Builder, chunk_of, chunks_of, columns_of

KEYS = ["0" * 32, "0" * 31 + "1"]
ANYTHING = st.sampled_from(
    [None, True, 0, 1, -1, 2.5, 10**12, float("inf"), float("nan"), "", "x", "\ud800", [], {}, {"a": 1}, KEYS, ["00"]]
) | st.sampled_from(
    [
        [[1, "5m", KEYS[0]]],
        [[True, "5m", KEYS[0]]],
        [[1, 7, "00"]],
        [[2, KEYS[0]], [1, KEYS[1]]],
        [[1, KEYS[0]], [1, KEYS[0]]],
        [[2, KEYS[0], 3]],
        {"input": 1, "read": 0, "output": 1, "written": {}},
        {"input": 1, "read": 0, "output": 1, "written": {"5m": True}},
        {"input": 1, "read": 0, "output": 1, "written": {}, "cost": 1},
    ]
)
NAMES = st.sampled_from(list(json.loads(GOOD.to_json()))) | st.just("colour")
TOO_MANY = "bad record: counts must be below 2,147,483,648"


@st.composite
def lines(draw):
    """Draw lines of a log, some of them with values that a record may not have, or has rarely."""
    found = json.loads(draw(records()).to_json())
    if draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(["", "{", "[]", "null", '{"v":1},{"v":1}', '"v"']))
    for name, value in draw(st.dictionaries(NAMES, ANYTHING, max_size=2)).items():
        found[name] = value
    for name in draw(st.lists(NAMES, max_size=1)):
        found.pop(name, None)
    return json.dumps(found)


def one_by_one(texts):
    """Return the records of lines by their numbers, and why others are none."""
    read, refused = {}, {}
    for number, text in enumerate(texts):
        try:
            record = RequestRecord.from_json(text)
        except RecordError as error:
            refused[number] = str(error)
            continue
        usage = record.usage
        counts = [record.block_size, record.input_tokens, record.output_tokens, record.cached_tokens]
        counts += [record.max_tokens, usage.input, usage.read, usage.output, *usage.written.values()]
        if max(counts) < 2**31:
            read[number] = record
        else:
            refused[number] = TOO_MANY
    return read, refused


@pytest.mark.parametrize("loads", [record_builder.loads, pydantic_core.from_json])
@given(st.lists(lines(), max_size=20))
def test_lines_are_read_or_refused_as_each_by_itself(loads, texts):
    refused, read, builder = {}, {}, Builder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_builder, "loads", loads)
        for first, chunk in chunks_of(texts, refused.__setitem__):
            single = Builder()
            single.add(chunk)
            read |= dict(enumerate(single.build(), first))
            builder.add(chunk)
    assert (read, refused) == one_by_one(texts)
    assert list(refused) == sorted(refused)
    assert list(builder.build()) == list(read.values())


@given(st.lists(records(), max_size=8), st.randoms())
def test_records_come_back_from_columns(several, random):
    columns = columns_of(several)
    assert list(columns) == several
    assert [columns[-1 - at] for at in range(len(columns))] == several[::-1]
    assert list(columns[1:5:2]) == several[1:5:2]
    order = random.sample(range(len(several)), len(several))
    taken = columns.take(np.array(order, dtype=np.int64))
    assert list(taken) == [several[at] for at in order]
    flat = [key for at in order for key in several[at].hashes]
    assert taken.keys_of(*taken.hashes.flat()) == flat
    assert list(taken.by_arrival()) == sorted((several[at] for at in order), key=lambda record: record.arrival)
    with pytest.raises(IndexError):
        columns[len(several)]


def test_equal_names_and_keys_have_equal_numbers():
    line = replace(GOOD, marks=(Mark(8, "5m", b"2" * 16),), reads=(Candidate(8, b"2" * 16),)).to_json()
    builder = Builder()
    for _ in range(2):
        for _, chunk in chunks_of([line], pytest.fail):
            builder.add(chunk)
    columns = builder.build()
    assert columns.hashes.flat()[0].tolist() == [0, 1, 0, 1]
    assert [parts.values[-1].tolist() for parts in (columns.marks, columns.reads)] == [[1, 1], [1, 1]]
    assert columns.policy.tolist() == [columns.names.index("full")] * 2


@pytest.mark.parametrize("keys", [(b"a", b"b"), (b"1" * 16, b"a" * 8), (b"a" * 15, b"b" * 17)])
def test_keys_of_any_length_have_a_place(keys):
    record = replace(GOOD, hashes=keys, marks=(Mark(4, "5m", keys[0]),))
    columns = columns_of([record, GOOD, record])
    assert list(columns) == [record, GOOD, record]
    assert columns.hashes.flat()[0][:2].tolist() == columns.hashes.flat()[0][4:].tolist()


@pytest.mark.parametrize("name", ["output_tokens", "cached_tokens", "max_tokens"])
def test_counts_beyond_what_columns_hold_are_refused(name):
    with pytest.raises(RecordError, match="counts must be below"):
        chunk_of([replace(GOOD, **{name: 2**31})])
    assert getattr(columns_of([replace(GOOD, **{name: 2**31 - 1})])[0], name) == 2**31 - 1


def test_a_wrong_line_among_many_costs_no_more_than_twice_their_reading(monkeypatch):
    texts, read = [GOOD.to_json()] * 4096, []
    texts[1234] = "{"
    monkeypatch.setattr(record_builder, "loads", lambda text, loads=record_builder.loads: read.append(0) or loads(text))
    refused = {}
    assert sum(len(chunk) for _, chunk in chunks_of(texts, refused.__setitem__)) == 4095
    assert list(refused) == [1234]
    assert len(read) <= 2.5 * len(texts)
