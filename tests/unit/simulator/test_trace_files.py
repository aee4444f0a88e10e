"""Files as people have them: folders of several formats, objects over many lines, other encodings, pipes."""

import gzip
import json
import os
import threading

import numpy as np
import pytest

from tests.unit.simulator.conversations import record
from tests.unit.simulator.test_traces import (
    AZURE,
    FILES,
    MOONCAKE,
    agentic,
    claude_code,
    langfuse,
    lines,
    litellm,
    span,
    spans,
)
from warmkv.config import load
from warmkv.simulator import traces
from warmkv.simulator.traces import TraceError
from warmkv.simulator.traces.reader import Rows
from warmkv.simulator.workload.source import Source
from warmkv.simulator.workload.source import read as read_requests

OF_OBJECTS = sorted(FILES.keys() - {"azure", "burstgpt", "sharegpt"})


def make(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


# --- folders


def test_logs_of_several_tools_are_one_trace(tmp_path):
    own = record(1_795_414_000.0, [1] * 200, 4).to_json() + "\n"
    make(tmp_path, a_jsonl=FILES["claude-code"], b_jsonl=FILES["litellm"], c_jsonl=own)
    rows = Rows(tmp_path)
    assert len(list(rows)) == 5
    assert (rows.format.name, rows.format_name) == ("claude-code", "claude-code+litellm+warmkv")
    assert len(rows.notes) == 1
    trace = read_requests(Source(tmp_path, strict=True), load())
    assert (len(trace.requests.records), trace.format) == (5, "claude-code+litellm+warmkv")
    assert traces.read(tmp_path).format == "claude-code+litellm+warmkv"


def test_equal_ids_of_two_tools_are_two_requests(tmp_path):
    """And prefixes that are derived for one are not those of the other."""
    make(tmp_path, a_jsonl=lines(claude_code("x", 0, 900)), b_jsonl=lines(litellm("x", 950)))
    one, other = Rows(tmp_path)
    assert {one.id, other.id} == {"x"}
    assert not set(one.hashes) & set(other.hashes)


@pytest.mark.parametrize("second", ["mooncake", "claude-code", "vllm-bench"])
def test_traces_without_a_common_clock_are_not_read_together(tmp_path, second):
    make(tmp_path, a_csv=AZURE, b_jsonl=FILES[second])
    with pytest.raises(TraceError, match=rf"a\.csv is of the format azure, \S+b\.jsonl of {second}, .*own"):
        traces.read(tmp_path)


@pytest.mark.parametrize("name", ["mooncake", "bailian", "burstgpt"])
def test_files_with_numbers_of_their_own_are_not_one_trace(tmp_path, name):
    """Read rotated parts together, and refuse two files, whose equal numbers are not the same blocks."""
    make(tmp_path / "parts", trace_jsonl=FILES[name], trace_jsonl_1=FILES[name])
    alone = len(traces.read(tmp_path / "parts" / "trace.jsonl"))
    assert len(traces.read(tmp_path / "parts")) == 2 * alone
    make(tmp_path / "two", a_jsonl=FILES[name], b_jsonl=FILES[name])
    with pytest.raises(TraceError, match=rf"a\.jsonl and \S+b\.jsonl are of the format {name}, .* a folder of its own"):
        traces.read(tmp_path / "two")


def test_sessions_in_files_of_their_own_are_one_trace(tmp_path):
    make(tmp_path, a_jsonl=lines(agentic("a", (0, 9, [1, 2]))), b_jsonl=lines(agentic("b", (5, 9, [1, 2]))))
    trace = traces.read(tmp_path)
    assert (trace.arrival.tolist(), len(set(trace.blocks.tolist()))) == ([0, 5], 4)
    assert trace.notes == ("all sessions begin at 0: times count from the start of each",)


def test_files_of_a_folder_that_are_no_trace_are_left_out_and_named(tmp_path):
    make(
        tmp_path, README_md="# Logs\n", access_jsonl=FILES["litellm"], notes_txt="what\n", empty="", z_jsonl='{"a": 1}'
    )
    trace = traces.read(tmp_path)
    strangers = tuple(str(tmp_path / name) for name in ("README.md", "notes.txt", "z.jsonl"))
    assert (len(trace), trace.unrecognised, trace.broken) == (2, strangers, 0)
    (part,) = traces.stream(tmp_path)
    assert part.unrecognised == strangers
    assert read_requests(Source(tmp_path), load()).unrecognised == strangers
    with pytest.raises(TraceError, match=r"README\.md is of no format that is recognised"):
        traces.read(tmp_path, strict=True)
    (tmp_path / "access.jsonl").unlink()
    with pytest.raises(TraceError, match=r"README\.md is of no format that is recognised; name its format"):
        traces.read(tmp_path)


def test_a_named_format_is_that_of_all_files(tmp_path):
    make(tmp_path, a_jsonl=FILES["litellm"], b_txt="hello\n")
    trace = traces.read(tmp_path, "litellm")
    assert (len(trace), trace.broken, trace.unrecognised) == (2, 1, ())


def test_a_folder_of_empty_files_is_empty(tmp_path):
    with pytest.raises(TraceError, match=r"is empty$"):
        traces.read(make(tmp_path, a="", b="\n"))


@pytest.mark.parametrize("stray", [{}, {"notes_txt": "x"}, {"c_jsonl": FILES["litellm"]}])
def test_folders_below_are_read_whatever_lies_beside_them(tmp_path, stray):
    def session(name):
        return lines(claude_code(f"of-{name}", 0, 100, session=name))

    make(tmp_path, p__a_jsonl=session("a"), p__a__subagents__x_jsonl=session("b"), q__b_jsonl=session("c"), **stray)
    make(tmp_path / ".git", d_jsonl=session("d"))
    make(tmp_path / "q" / ".git", d_jsonl=session("d"))
    make(tmp_path / "p" / "memory", notes_md="no session")
    rows = Rows(tmp_path)
    assert {row.session for row in rows} >= {"a", "b", "c"}
    assert len(rows.unrecognised) == ("notes_txt" in stray)


# --- which format


@pytest.mark.parametrize(
    ("content", "named"), [("litellm", "claude-code"), ("azure", "litellm"), ("litellm", "warmkv")]
)
def test_a_wrong_format_is_told_with_the_right_one(tmp_path, content, named):
    path = make(tmp_path, trace=FILES[content]) / "trace"
    for given in (path, tmp_path):
        with pytest.raises(
            TraceError, match=f"trace has no request of the format {named}; it is of the format {content}"
        ):
            traces.read(given, named)


def test_a_header_with_other_separators_is_not_that_of_a_format(tmp_path):
    make(tmp_path, trace=AZURE.replace(",", ";"))
    with pytest.raises(TraceError, match="is of no format that is recognised"):
        traces.read(tmp_path / "trace")


# --- objects over many lines


def objects(name):
    return [json.loads(line) for line in FILES[name].splitlines()]


WRITTEN = {
    "jq": lambda found: "".join(json.dumps(one, indent=2) + "\n" for one in found),
    "tabs": lambda found: "".join(json.dumps(one, indent="\t") + "\n\n" for one in found),
    "pretty array": lambda found: json.dumps(found, indent=2),
    "array": json.dumps,
    "arrays": lambda found: "".join(json.dumps([one]) + "\n" for one in found),
    "windows": lambda found: "\r\n".join(json.dumps(one, indent=2).replace("\n", "\r\n") for one in found),
    "first levels": lambda found: "".join(
        "{\n" + ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in one.items()) + "}\n" for one in found
    ),
}


def same(one, other):
    names = ("arrival", "input_tokens", "output_tokens", "session", "blocks")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("name", OF_OBJECTS)
def test_objects_may_be_written_over_many_lines(tmp_path, name, form):
    expected = traces.read(make(tmp_path, lines=FILES[name]) / "lines")
    content = WRITTEN[form](objects(name)).encode()
    for file in (content, gzip.compress(content), b"\xef\xbb\xbf" + content):
        (tmp_path / "trace").write_bytes(file)
        trace = traces.read(tmp_path / "trace", strict=True)
        assert trace.format == name
        assert same(trace, expected)


def test_lines_of_a_record_over_many_are_numbered(tmp_path):
    """A log that is left after an error ends: what is whole behind a record that was cut off is read."""
    good = json.dumps(json.loads(record(1.0, [1] * 9).to_json()), indent=1)
    path = make(tmp_path, log=f'{good}\n{{"v": 1,\n "id":\n{good}\n{good}\n') / "log"
    trace = traces.read(path)
    first = good.count("\n") + 2
    assert (len(trace), trace.broken) == (3, 2)
    assert [fault.split(": ")[0] for fault in trace.faults] == [f"{path}:{first}", f"{path}:{first + 1}"]


CUT = ['{"a": [1, 2', '{"a": [1,', '{"a": [', '{"a": {', '{"a": "x,', '{"a": "{', "{", '{"a": 1,', '{"a"']


@pytest.mark.parametrize("cut", CUT)
@pytest.mark.parametrize("before", [0, 1])
def test_a_line_that_was_cut_off_costs_no_other(tmp_path, cut, before):
    good = json.loads(MOONCAKE.splitlines()[0])
    path = make(tmp_path, trace=lines(*[good] * before, cut, good, good)) / "trace"
    trace = traces.read(path)
    assert (len(trace), trace.broken) == (2 + before, 1)
    assert trace.faults[0].startswith(f"{path}:{before + 1}: not JSON")
    path.write_text(lines(*[good] * before, cut, good))  # and the file ends
    assert (len(traces.read(path)), traces.read(path).broken) == (1 + before, 1)


def test_an_object_that_is_too_long_ends_the_reading(tmp_path, monkeypatch):
    monkeypatch.setattr("warmkv.simulator.traces.rows.LONGEST", 500)
    path = make(tmp_path, trace="{\n" + '"a": 1,\n' * 100 + "}\n") / "trace"
    with pytest.raises(TraceError, match=r"trace:1: a row has more than 500 characters"):
        traces.read(path, "litellm")


def test_one_of_many_that_is_broken_costs_no_other(tmp_path):
    """Also where all stand in one object: spans of an export, observations of a page."""
    wrong = span("b", 300) | {"startTimeUnixNano": "soon"}
    page = {"data": [langfuse("a", {"input": 10, "output": 5}), langfuse("b", {}), 5], "meta": {"page": 1}}
    for document, broken in ((spans(span("a", 300), wrong, span("c", 400)), 1), (page, 2)):
        path = make(tmp_path, trace=json.dumps(document, indent=2)) / "trace"
        trace = traces.read(path)
        assert (len(trace), trace.broken) == (3 - broken, broken)
        assert trace.faults[0].startswith(f"{path}:1: ")
        with pytest.raises(TraceError, match="trace:1: "):
            traces.read(path, strict=True)


@pytest.mark.parametrize("name", ["langfuse", "litellm"])
def test_pages_of_an_api_are_read_as_exports_are(tmp_path, name):
    expected = traces.read(make(tmp_path, lines=FILES[name]) / "lines")
    pages = [{"data": [one], "meta": {"page": number}} for number, one in enumerate(objects(name))]
    for text in (lines(*pages), WRITTEN["jq"](pages), json.dumps(pages)):
        assert same(traces.read(make(tmp_path, pages=text) / "pages", strict=True), expected)


# --- encodings and pipes


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_utf_16_is_read_where_its_mark_tells(tmp_path, name, packed, encoding):
    expected = traces.read(make(tmp_path, plain=FILES[name]) / "plain")
    content = ("\ufeff" * encoding.endswith("e") + FILES[name].replace("\n", "\r\n")).encode(encoding)
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(content) if packed else content)
    rows = Rows(path, strict=True)
    list(rows)
    trace = traces.read(path, strict=True)
    assert trace.format == name
    assert same(trace, expected)
    (tmp_path / "copy").write_bytes(path.read_bytes())
    copied = Rows(tmp_path / "copy")
    list(copied)
    assert copied.sha256 == rows.sha256


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_trace_may_come_through_a_pipe(tmp_path, name, packed):
    content = gzip.compress(FILES[name].encode()) if packed else FILES[name].encode()
    (tmp_path / "file").write_bytes(content)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    found = read_requests(Source(pipe), load())
    writer.join()
    expected = read_requests(Source(tmp_path / "file"), load())
    assert (found.sha256, found.format) == (expected.sha256, expected.format)
    assert list(found.requests.records) == list(expected.requests.records)
