import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.prefixes.record import Candidate, Mark, RecordError, RequestRecord
from warmkv.prefixes.usage import Usage

TIMES = st.floats(0, 1e10)
KEYS = st.binary(min_size=16, max_size=16)
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
        marks=tuple(Mark(at, "5m", draw(KEYS)) for at in positions),
        reads=tuple(Candidate(at, draw(KEYS)) for at in reversed(positions)),
        usage=Usage(draw(COUNTS), draw(COUNTS), {"5m": draw(COUNTS)}, draw(COUNTS)),
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
        ({"usage": {"read": 1, "cost": 2}}, "TypeError"),
    ],
)
def test_a_broken_line_is_refused_with_the_reason(change, reason):
    line = json.dumps(json.loads(GOOD.to_json()) | change)
    with pytest.raises(RecordError, match=reason):
        RequestRecord.from_json(line)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"v":1}', '{"v":1,"hashes":[]}'])
def test_what_is_no_record_is_refused(text):
    with pytest.raises(RecordError):
        RequestRecord.from_json(text)


def test_fields_of_later_writers_are_ignored():
    line = json.dumps(json.loads(GOOD.to_json()) | {"colour": "red"})
    assert RequestRecord.from_json(line) == GOOD
