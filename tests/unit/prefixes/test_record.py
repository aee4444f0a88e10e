import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.prefixes.record import Candidate, Mark, RecordError, RequestRecord
from warmkv.prefixes.usage import Usage

TIMES = st.floats(0, 1e10)
KEYS = st.binary(min_size=16, max_size=16) | st.sampled_from([b"1" * 16, b"2" * 16])
COUNTS = st.integers(0, 10**6)


@st.composite
def records(draw):
    size = draw(st.integers(1, 64))
    tokens = draw(st.integers(0, 300))
    positions = sorted(draw(st.sets(st.integers(1, tokens), max_size=4))) if tokens else []
    return RequestRecord(
        id=draw(st.text()),
        arrival=draw(TIMES),
        tenant=draw(st.text()),
        model="tiny",
        api="messages",
        policy="snapkv@0.2",
        block_size=size,
        input_tokens=tokens,
        output_tokens=draw(COUNTS),
        hashes=tuple(draw(st.lists(KEYS, min_size=tokens // size, max_size=tokens // size))),
        marks=tuple(Mark(at, draw(st.sampled_from(["5m", "1h"])), draw(KEYS)) for at in positions),
        reads=tuple(Candidate(at, draw(KEYS)) for at in reversed(positions)),
        usage=Usage(draw(COUNTS), draw(COUNTS), {"5m": draw(COUNTS)}, draw(COUNTS)),
        generated=tuple(draw(st.lists(KEYS, max_size=2))),
        replica=draw(st.text()),
        ttft=draw(TIMES),
        e2e=draw(TIMES),
        status=draw(st.sampled_from(["ok", "error", "cancelled"])),
    )


@given(records())
def test_a_record_survives_the_log(record):
    line = record.to_json()
    assert "\n" not in line
    assert RequestRecord.from_json(line) == record


@pytest.mark.parametrize(
    "keys", [["0" * 30 + "  ", "1" * 32], ["0" * 30, "1" * 34], ["0" * 30, "1" * 32], ["00", "11"]]
)
def test_hashes_of_any_length_are_read(keys):
    line = json.dumps(json.loads(GOOD.to_json()) | {"hashes": keys})
    assert RequestRecord.from_json(line).hashes == tuple(map(bytes.fromhex, keys))


GOOD = RequestRecord("a", 1.0, "t", "m", "messages", "full", 4, 9, 3, (b"1" * 16, b"2" * 16))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"v": 2}, "version 1"),
        ({"input_tokens": -1, "hashes": []}, "must not be negative"),
        ({"block_size": 0}, "block_size must be positive"),
        ({"hashes": []}, "2 full blocks of 4, but 0 hashes"),
        ({"hashes": ["xyz", "00"]}, "ValueError"),
        ({"hashes": None}, "TypeError"),
        ({"hashes": ["0" * 32, "x" * 32]}, "non-hexadecimal number found"),
        ({"hashes": ["0" * 32, 7]}, "TypeError"),
        ({"arrival": "noon"}, "arrival must be float"),
        ({"arrival": None}, "arrival must be float"),
        ({"arrival": float("nan")}, "arrival must be finite"),
        ({"e2e": float("inf")}, "e2e must be finite"),
        ({"output_tokens": 2.5}, "output_tokens must be int"),
        ({"output_tokens": True}, "output_tokens must be int"),
        ({"policy": 3}, "policy must be str"),
        ({"marks": [[10, "5m", "00"]]}, "within the prompt's 9 tokens"),
        ({"reads": [[0, "00"]]}, "within the prompt's 9 tokens"),
        ({"reads": [[3, "00"], [4, "00"]]}, "highest position first"),
        ({"marks": [[1, "5m"]]}, "ValueError"),
        ({"marks": [[float("inf"), "5m", "00"]]}, "OverflowError"),
        ({"usage": {"read": 1, "cost": 2}}, "TypeError"),
        ({"usage": {"read": "1"}}, "usage.read must be int"),
        ({"usage": {"written": [1]}}, "usage.written must be dict"),
        ({"usage": {"written": {"5m": 1.5}}}, "usage.5m must be int"),
    ],
)
def test_a_broken_line_is_refused_with_the_reason(change, reason):
    line = json.dumps(json.loads(GOOD.to_json()) | change)
    with pytest.raises(RecordError, match=reason):
        RequestRecord.from_json(line)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 10**5, '{"v":1}', '{"v":1,"hashes":[]}'])
def test_what_is_no_record_is_refused(text):
    with pytest.raises(RecordError):
        RequestRecord.from_json(text)


@pytest.mark.parametrize("session", ["\ud800", "\U0001f600", "\x00"])
def test_any_character_survives(session):
    record = replace(GOOD, session=session)
    assert RequestRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize("change", [{"arrival": 10**12}, {"e2e": 3}])
def test_whole_numbers_are_times(change):
    record = RequestRecord.from_json(json.dumps(json.loads(GOOD.to_json()) | change))
    assert record == replace(GOOD, **change)


def test_fields_of_later_writers_are_ignored():
    line = json.dumps(json.loads(GOOD.to_json()) | {"colour": "red"})
    assert RequestRecord.from_json(line) == GOOD
