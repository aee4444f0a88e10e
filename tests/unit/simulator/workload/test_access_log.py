import gzip
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import record
from warmkv.simulator import traces
from warmkv.simulator.traces import KEPT_FAULTS, TraceError
from warmkv.simulator.workload import access_log


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def test_requests_come_in_the_order_of_arrival(tmp_path):
    log = write(
        tmp_path / "log", *(record(at, [1] * 5, name=name).to_json() for at, name in [(3, "c"), (1, "a"), (1, "b")])
    )
    assert [request.id for request in access_log.read(log).requests] == ["a", "b", "c"]


def test_lines_share_what_they_have_in_common(tmp_path):
    lines = [record(at, [1] * 8, ends=[8], ttls=["5m"]).to_json() for at in range(2)]
    read = access_log.read(write(tmp_path / "log", *lines)).requests
    assert len(read.keys) == len(read[0].hashes) == len(read[1].hashes)
    assert (len(set(read.policy.tolist())), read[0].marks[0].key) == (1, read[1].hashes[-1])


@pytest.mark.parametrize("block", [1, 900, 2000, 1 << 20])
@pytest.mark.parametrize("packed", [False, True])
def test_many_lines_are_read_a_part_at_a_time(tmp_path, monkeypatch, block, packed):
    monkeypatch.setattr("warmkv.simulator.traces.warmkv.BLOCK", block)
    monkeypatch.setattr("warmkv.simulator.traces.warmkv.MANY", 3)
    records = [record(at, [1] * (at + 1), name=f"{at}" if at % 4 else f"\u00e9{at}") for at in range(10)]
    lines = [each.to_json() if at % 3 else json.dumps(json.loads(each.to_json())) for at, each in enumerate(records)]
    lines[4:4], lines[9:9] = ["{"], ["", "[]"]
    content = "\ufeff" + "\n".join(lines).replace("\\u00e9", "\u00e9")
    log = tmp_path / "log"
    log.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    trace = access_log.read(log)
    assert list(trace.requests) == records
    assert [fault.split(": ")[0] for fault in trace.faults] == [f"{log}:5", f"{log}:11"]


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_lines_may_end_as_in_other_systems(tmp_path, end):
    records = [record(at, [1] * 5, name=f"{at}") for at in range(3)]
    log = tmp_path / "log"
    log.write_text(end.join(["x", *(each.to_json() for each in records)]), newline="")
    trace = access_log.read(log)
    assert list(trace.requests) == records
    assert [fault.split(": ")[0] for fault in trace.faults] == [f"{log}:1"]


@pytest.mark.parametrize("block", [10, 1 << 20])
def test_a_line_that_is_too_long_ends_the_reading(tmp_path, monkeypatch, block):
    monkeypatch.setattr("warmkv.simulator.traces.warmkv.LONGEST", 900)
    monkeypatch.setattr("warmkv.simulator.traces.warmkv.BLOCK", block)
    good = record(0, [1] * 5).to_json()
    log = write(tmp_path / "log", good, "x", "y" * 1000, good)
    with pytest.raises(TraceError, match=r"log:2: not JSON"):
        access_log.read(log, strict=True)
    with pytest.raises(TraceError, match=r"log:3: a row has more than"):
        access_log.read(log)


def test_what_stands_before_the_end_of_a_damaged_file_is_judged_first(tmp_path):
    log = tmp_path / "log.gz"
    log.write_bytes(gzip.compress(b"{\n" + b"x" * 100)[:-10])
    with pytest.raises(TraceError, match=r"log.gz:1: not JSON"):
        access_log.read(log, strict=True)
    with pytest.raises(TraceError, match="cannot read"):
        access_log.read(log)


def test_broken_lines_are_counted_and_named(tmp_path):
    good = record(0, [1] * 5).to_json()
    log = write(tmp_path / "log", good, "{", "", good.replace('"ok"', '"error"'), "[]")
    trace = access_log.read(log)
    assert (len(trace.requests), trace.broken, trace.skipped) == (1, 2, 1)
    assert trace.faults[0].startswith(f"{log}:2: not JSON")
    assert trace.faults[1].startswith(f"{log}:5: not an access-log record")


def test_requests_without_a_prompt_are_left_out_and_counted(tmp_path):
    path = write(tmp_path / "log", *(record(n, [1] * n).to_json() for n in range(3)))
    log = access_log.read(path)
    assert ([one.input_tokens for one in log.requests], log.skipped, log.broken) == ([1, 2], 1, 0)
    trace = traces.read(path)
    assert (trace.input_tokens.tolist(), trace.skipped, trace.broken) == ([1, 2], 1, 0)


def test_many_faults_are_counted_but_not_all_kept(tmp_path):
    trace = access_log.read(write(tmp_path / "log", *["x"] * 1000))
    assert trace.broken == 1000
    assert len(trace.faults) == KEPT_FAULTS


def test_strict_stops_at_the_first_broken_line(tmp_path):
    log = write(tmp_path / "log", record(0, [1]).to_json(), "nonsense")
    with pytest.raises(TraceError, match=r"log:2: not JSON"):
        access_log.read(log, strict=True)


def test_a_file_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(TraceError, match="cannot read"):
            access_log.read(path)


def test_an_empty_file_is_an_empty_trace(tmp_path):
    assert not len(access_log.read(write(tmp_path / "log")).requests)


@given(st.binary(max_size=200))
def test_no_content_breaks_the_reader(tmp_path_factory, content):
    log = tmp_path_factory.mktemp("log") / "log"
    log.write_bytes(content)
    with suppress(TraceError):  # what begins as gzip and is none
        assert not len(access_log.read(log).requests)
