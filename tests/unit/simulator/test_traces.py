"""Readers of the public formats, each on a few rows as that format has them."""

import contextlib
import gzip
import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import record
from warmkv.simulator import traces
from warmkv.simulator.traces import Reading, TraceError
from warmkv.simulator.traces.reader import Rows


def lines(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def mooncake(at, tokens, ids, output=5):
    return {"timestamp": at, "input_length": tokens, "output_length": output, "hash_ids": ids}


def bailian(chat, parent, at, tokens, ids):
    return {"chat_id": chat, "parent_chat_id": parent, "timestamp": at, "input_length": tokens, "output_length": 7} | {
        "type": "text",
        "turn": 1,
        "hash_ids": ids,
    }


def agentic(name, *requests, scope="local"):
    made = [{"t": t, "type": "n", "in": n, "out": 3, "hash_ids": ids, "think_time": 1.5} for t, n, ids in requests]
    return {"id": name, "block_size": 4, "hash_id_scope": scope, "requests": made}


def talk(*turns, name="c"):
    speakers = ("human", "gpt")
    return {"id": name, "conversations": [{"from": speakers[i % 2], "value": turn} for i, turn in enumerate(turns)]}


MOONCAKE = lines(mooncake(0, 1024, [1, 2]), mooncake(1500, 1100, [1, 2, 3]), mooncake(2500, 100, []))
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
)
BURST = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,7,1.2,ChatGPT,472,18,490,Conversation log\n6,8,0,GPT-4,100,0,100,API log\n9,7,1,ChatGPT,500,20,520,API log\n"
)


def claude_code(id, read, written, hour=0, parent="u0", session="s", at="2026-11-23T06:07:43.185Z", **more):
    split = {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": hour}
    usage = {"input_tokens": 10, "cache_creation_input_tokens": written + hour, "cache_read_input_tokens": read}
    message = {
        "id": id,
        "model": "claude",
        "role": "assistant",
        "usage": {**usage, "cache_creation": split} | {"output_tokens": 33},
    }
    line = {
        "parentUuid": parent,
        "isSidechain": False,
        "message": message,
        "requestId": f"req_{id}",
        "type": "assistant",
    }
    return {**line, "uuid": f"of-{id}", "timestamp": at, "sessionId": session, "version": "2.1.197", **more}


def asked(uuid="u0", at="2026-11-23T06:07:42.828Z", session="s", parent=None):
    line = {"parentUuid": parent, "isSidechain": False, "type": "user", "message": {"role": "user", "content": "hi"}}
    return {**line, "uuid": uuid, "timestamp": at, "sessionId": session, "version": "2.1.197"}


def litellm(id, prompt, read=0, written=0, at="2026-11-23 06:09:03.870951+00:00", status="success", **more):
    details = {"cached_tokens": read, "cache_creation_tokens": written}
    usage = {"prompt_tokens": prompt, "completion_tokens": 33, "prompt_tokens_details": details}
    usage |= {"cache_creation_input_tokens": written, "cache_read_input_tokens": read} if written else {}
    row = {"request_id": id, "call_type": "acompletion", "api_key": "88dc28d0", "cache_hit": "False", "startTime": at}
    row |= {"endTime": at, "model": "m", "metadata": json.dumps({"usage_object": usage}), "prompt_tokens": prompt}
    return {**row, "completion_tokens": 33, "messages": "{}", "proxy_server_request": "{}", "status": status, **more}


def langfuse(id, usage, session="s", type="GENERATION", at="2026-11-23T06:09:03.870Z", **more):
    row = {"id": id, "type": type, "traceId": "t", "startTime": at, "model": "m", "usageDetails": usage}
    return {**row, "level": "DEFAULT", "sessionId": session, **more}


def span(id, prompt, read=0, written=0, start=1_795_414_101_000_000_000, operation="chat", session="s", **more):
    values = {
        "gen_ai.operation.name": operation,
        "gen_ai.conversation.id": session,
        "gen_ai.request.model": "m",
        **more,
    }
    counts = {
        "input_tokens": prompt,
        "output_tokens": 5,
        "cache_read.input_tokens": read,
        "cache_creation.input_tokens": written,
    }
    attributes = [{"key": key, "value": {"stringValue": value}} for key, value in values.items()]
    attributes += [{"key": f"gen_ai.usage.{key}", "value": {"intValue": str(count)}} for key, count in counts.items()]
    return {"traceId": "t", "spanId": id, "startTimeUnixNano": str(start), "attributes": attributes, "status": {}}


def spans(*these):
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": list(these)}]}]}


def vllm_bench(*requests, **more):
    starts, inputs, outputs = zip(*requests, strict=True)
    result = {"date": "20261123-060000", "model_id": "m", "num_prompts": len(requests), "request_rate": "inf"}
    columns = {"start_times": starts, "input_lens": inputs, "output_lens": outputs, "errors": [""] * len(requests)}
    return {**result, **columns, **more}


def aiperf(conversation, turn, prompt, start=1_795_414_101_000_000_000, error=None, **metrics):
    metadata = {"session_num": 0, "conversation_id": conversation, "x_correlation_id": f"run-{conversation}"}
    metadata |= {"turn_index": turn, "request_start_ns": start, "request_end_ns": start + 1, "was_cancelled": False}
    found = {"input_sequence_length": prompt, "output_sequence_length": 6, "time_to_first_token": 5.5, **metrics}
    return {
        "metadata": metadata,
        "metrics": {key: {"value": value, "unit": "-"} for key, value in found.items()},
        "error": error,
    }


FILES = {
    "mooncake": MOONCAKE,
    "bailian": lines(bailian(10, -1, 1.5, 40, [5, 6]), bailian(11, 10, 2.5, 48, [5, 6, 7])),
    "agentic": lines(agentic("a", (0, 9, [1, 2]), (4, 13, [1, 2, 3])), agentic("b", (2, 9, [1, 2]))),
    "sharegpt": json.dumps([talk("x" * 100, "y" * 20, "z" * 50, "w")], indent=1),
    "azure": AZURE,
    "burstgpt": BURST,
    "claude-code": lines(asked(), claude_code("a", 0, 900), claude_code("b", 900, 100, parent="of-a")),
    "litellm": lines(litellm("a", 1551, 0, 1541), litellm("b", 1555, 1541, 4)),
    "langfuse": lines(langfuse("a", {"input": 10, "output": 5, "input_cached_tokens": 300})),
    "opentelemetry": lines(spans(span("a", 300), span("b", 400, read=256))),
    "vllm-bench": lines(vllm_bench((7.5, 100, 5), (7.0, 200, 6))),
    "aiperf": lines(aiperf("c", 0, 100), aiperf("c", 1, 300)),
    "warmkv": lines(record(3.0, [1] * 9, 4).to_json(), record(1.0, [1] * 5, 2).to_json()),
}


@pytest.fixture
def file(tmp_path):
    def make(text, name="trace"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return make


@pytest.mark.parametrize("name", FILES)
def test_a_format_is_recognised_by_its_content(file, name):
    path = file(FILES[name], "data.csv" if name == "mooncake" else "data.jsonl")
    trace = traces.read(path)
    assert (trace.format, trace.broken) == (name, 0)
    assert len(trace) > 0
    named = traces.read(path, name)
    assert np.array_equal(named.blocks, trace.blocks)


def test_all_formats_have_a_test():
    assert FILES.keys() == traces.FORMATS.keys()


def test_mooncake_has_milliseconds_and_a_partial_last_block(file):
    trace = traces.read(file(MOONCAKE))
    assert trace.arrival.tolist() == [0, 1.5, 2.5]
    assert trace.input_tokens.tolist() == [1024, 1100, 100]
    assert [trace.chain(i).tolist() for i in range(2)] == [[1, 2], [1, 2, 3]]
    assert trace.block_tokens().tolist() == [512, 512, 512, 512, 76]


def test_another_block_size_can_be_named(file):
    path = file(lines(mooncake(0, 10, [1, 2, 3])))
    assert "another block size" in traces.read(path).faults[0]
    trace = traces.read(path, reading=Reading(block_size=4))
    assert (trace.broken, trace.block_size, trace.block_tokens().tolist()) == (0, 4, [4, 4, 2])


def test_bailian_turns_belong_to_the_session_of_their_first(file):
    rows = [bailian(1, -1, 0, 16, [1]), bailian(2, -1, 1, 16, [2]), bailian(3, 1, 2, 32, [1, 3])]
    trace = traces.read(file(lines(*rows, bailian(4, 3, 3, 33, [1, 3, 4]))))
    assert trace.session.tolist() == [0, 1, 0, 0]


def test_agentic_sessions_share_no_blocks_unless_their_scope_is_global(file):
    trace = traces.read(file(FILES["agentic"]))
    assert trace.arrival.tolist() == [0, 2, 4]
    assert trace.session.tolist() == [0, 1, 0]
    assert trace.think.tolist() == [1.5] * 3
    chains = [trace.chain(i).tolist() for i in range(3)]
    assert chains[2][:2] == chains[0]
    assert not set(chains[1]) & set(chains[0])
    shared = [agentic(name, (0, 9, [1, 2]), scope="global") for name in "ab"]
    trace = traces.read(file(lines(*shared)))
    assert trace.chain(0).tolist() == trace.chain(1).tolist()


def test_agentic_sessions_of_several_files_share_no_blocks(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(lines(agentic(name, (0, 9, [1, 2]))))
    trace = traces.read(tmp_path)
    assert not set(trace.chain(0).tolist()) & set(trace.chain(1).tolist())


def test_subagents_are_counted_and_left_out(file):
    session = agentic("a", (0, 9, [1, 2]))
    session["requests"].append({"t": 1.0, "type": "subagent", "requests": []})
    trace = traces.read(file(lines(session)))
    assert (len(trace), trace.skipped, trace.broken) == (1, 1, 0)


def test_a_conversation_resends_what_was_said(file):
    trace = traces.read(file(FILES["sharegpt"]), reading=Reading(block_size=5, characters_per_token=4))
    assert trace.input_tokens.tolist() == [25, 42]
    assert trace.output_tokens.tolist() == [5, 1]
    assert trace.chain(1)[:5].tolist() == trace.chain(0).tolist()
    assert len(trace.chain(1)) == 8
    assert trace.notes


@given(st.lists(st.text(max_size=30), max_size=6), st.floats(0.3, 9))
def test_equal_beginnings_of_texts_have_equal_blocks(tmp_path_factory, turns, per_token):
    path = tmp_path_factory.mktemp("x") / "talks"
    path.write_text(json.dumps([talk(*turns), talk(*turns, name="d"), talk("?", *turns)]))
    trace = traces.read(path, "sharegpt", reading=Reading(block_size=2, characters_per_token=per_token))
    assert trace.broken == 0
    half = len(trace) // 3
    for i in range(half):
        assert trace.chain(i).tolist() == trace.chain(half + i).tolist()
        assert len(trace.chain(i)) == trace.input_tokens[i] // 2


def test_sharegpt_may_have_a_line_for_each_conversation(file):
    array = file(json.dumps([talk("a" * 90, "b"), talk("c" * 80, "d")]), "array")
    one_each = file(lines(talk("a" * 90, "b"), talk("c" * 80, "d")), "lines")
    assert traces.read(array).input_tokens.tolist() == traces.read(one_each).input_tokens.tolist() == [22, 20]


def test_azure_times_are_seconds_of_unix_time(file):
    trace = traces.read(file(AZURE))
    assert trace.arrival == pytest.approx([1700158623.97996, 1700158624.03196], abs=1e-6)
    assert trace.input_tokens.tolist() == [4808, 3180]
    assert len(trace.blocks) == trace.block_size == 0
    milliseconds = AZURE.replace("2023-11-16 18:17:03.9799600", "1700158623979")
    assert traces.read(file(milliseconds)).arrival[0] == 1700158623.979


def test_burstgpt_failures_are_left_out_and_sessions_kept(file):
    trace = traces.read(file(BURST))
    assert (trace.arrival.tolist(), trace.session.tolist(), trace.skipped) == ([5, 9], [0, 0], 1)


def test_an_access_log_keeps_its_tenants_and_leaves_failures_out(file):
    good = record(3.0, [1] * 9, 4).to_json()
    trace = traces.read(file(lines(good, good.replace('"ok"', '"error"'), good.replace('"t"', '"u"'))))
    assert (trace.skipped, trace.tenant.tolist(), trace.block_size) == (1, [0, 1], 4)
    assert trace.chain(0).tolist() == trace.chain(1).tolist()


def test_gzip_is_unpacked(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(MOONCAKE.encode()))
    assert len(traces.read(path)) == 3
    path.write_bytes(gzip.compress(MOONCAKE.encode())[:-9])
    with pytest.raises(TraceError, match="cannot read"):
        traces.read(path)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_opened_once_and_hashed_on_the_way(tmp_path, monkeypatch, name, packed):
    """Also what lies behind the end of a JSON array; the beginning, which tells the format, is not hashed twice."""
    path, text = tmp_path / "trace", FILES[name].encode() + b"\n\n"
    path.write_bytes(gzip.compress(text) if packed else text)
    opened, plain = [], type(path).open
    monkeypatch.setattr(
        type(path), "open", lambda self, *how, **more: (opened.append(self), plain(self, *how, **more))[1]
    )
    rows = Rows(path)
    assert rows.format.name == name
    assert list(rows)
    assert opened == [path]
    assert rows.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("name", FILES)
def test_parts_make_the_whole(file, name, size):
    path = file(FILES[name] + ("\n{broken" if name in ("mooncake", "bailian") else ""))
    whole, parts = traces.read(path), list(traces.stream(path, size=size))
    assert sum(len(part) for part in parts) == len(whole)
    assert sorted(np.concatenate([part.arrival for part in parts])) == whole.arrival.tolist()
    assert sum(part.broken for part in parts) == whole.broken
    assert sorted(np.concatenate([part.session for part in parts])) == sorted(whole.session)
    if size == 1 and name == "mooncake":
        assert len(parts) > 1


BROKEN = [
    ("mooncake", lines(mooncake(0, 512, [1]), "{"), 2, "not JSON"),
    ("mooncake", lines(mooncake(0, 512, [1]), {"timestamp": 1}), 2, "input_length is missing"),
    ("mooncake", lines(mooncake(0, -1, [])), 1, "input tokens must be from 1"),
    ("mooncake", lines(mooncake(0, 512, [1]), mooncake(1, 0, [])), 2, "input tokens must be from 1"),
    ("mooncake", lines(mooncake("soon", 1, [])), 1, "timestamp must be a number, not 'soon'"),
    ("mooncake", lines(mooncake(0, 1.5, [])), 1, "input_length must be an integer"),
    ("mooncake", lines(mooncake(0, 512, ["x"])), 1, "block hashes must be integers"),
    ("mooncake", lines(mooncake(0, 512, [2**64])), 1, "block hashes must be integers"),
    ("mooncake", lines(mooncake(0, 512, 5)), 1, "hash_ids must be a list"),
    ("mooncake", lines(mooncake(float("nan"), 5, [])), 1, "times must be finite: arrival nan"),
    ("agentic", lines(agentic("a", (0, 9, [1, -2]))), 1, "hash_ids of a session must be"),
    ("agentic", lines(agentic("a", (0, 9, [1, "x"]))), 1, "hash_ids must be integers"),
    ("agentic", lines(agentic("a", (0, 9, [1, 2])), agentic("b", (0, 99, [1]))), 2, "99 tokens have 24 full blocks"),
    ("azure", AZURE + "yesterday,1,2\n", 4, "TIMESTAMP must be a date"),
    ("azure", AZURE + "1,2\n", 4, "2 cells where the header has 3"),
    ("burstgpt", "Timestamp,Request tokens\n1,2\n", 1, "the header has no column 'Response tokens'"),
    ("sharegpt", '[\n{"conversations": [{"from": "human"}]}\n]', 2, "a turn needs the texts"),
    ("sharegpt", '[{"conversations": []},\n\n{"conv', 3, "not JSON"),
    ("warmkv", lines("{}"), 1, "not an access-log record"),
]


@pytest.mark.parametrize(("name", "text", "line", "reason"), BROKEN)
def test_a_broken_row_is_named_with_file_and_line(file, name, text, line, reason):
    path = file(text)
    trace = traces.read(path, name)
    assert trace.broken == len(trace.faults) >= 1
    assert trace.faults[0].startswith(f"{path}:{line}: ")
    assert reason in trace.faults[0]
    with pytest.raises(TraceError, match=f"trace:{line}: "):
        traces.read(path, name, strict=True)


def test_many_faults_are_counted_but_not_all_kept(file):
    trace = traces.read(file("{\n" * 1000), "mooncake")
    assert (trace.broken, len(trace.faults)) == (1000, traces.KEPT_FAULTS)


def test_a_folder_is_one_trace(tmp_path):
    """Rotated files come first, the highest number before the others; packed files, too. What is hidden is none."""
    line = {at: record(at, [1] * 5).to_json() + "\n" for at in (10, 11, 12)}
    (tmp_path / "log.10").write_text(line[10])
    (tmp_path / "log.9.gz").write_bytes(gzip.compress(line[11].encode()))
    (tmp_path / "log").write_text("broken\n" + line[12])
    (tmp_path / ".log.lock").touch()
    (parts,) = traces.stream(tmp_path)
    assert parts.arrival.tolist() == [10, 11, 12]
    assert (parts.broken, parts.faults[0].partition(":")[0]) == (1, str(tmp_path / "log"))


def test_what_is_no_trace_is_refused(file, tmp_path):
    for text, message in [("", "is empty"), ("hello\n", "is of no format that is recognised")]:
        with pytest.raises(TraceError, match=message):
            traces.read(file(text))
    with pytest.raises(TraceError, match="'parquet' is no trace format"):
        traces.read(file(MOONCAKE), "parquet")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "absent", tmp_path / "empty"):
        with pytest.raises(TraceError, match="cannot read"):
            traces.read(path)


@pytest.mark.parametrize("name", FILES)
def test_an_empty_file_of_a_named_format_is_an_empty_trace(file, name):
    trace = traces.read(file(""), name)
    assert (len(trace), trace.offsets.tolist()) == (0, [0])


@given(st.sampled_from(sorted(FILES)), st.data())
def test_no_content_breaks_a_reader(tmp_path_factory, name, data):
    text = FILES[name]
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    junk = data.draw(st.text('{}[]",:0123456789-.eE\nnul', max_size=20))
    path = tmp_path_factory.mktemp("x") / "trace"
    path.write_text(text[:start] + junk + text[end:])
    trace = traces.read(path, name)
    assert len(trace.offsets) == len(trace) + 1
    assert trace.offsets[-1] == len(trace.blocks)


@given(st.binary(max_size=200), st.sampled_from([None, *sorted(FILES)]))
def test_bytes_that_are_no_trace_break_no_reader(tmp_path_factory, content, name):
    path = tmp_path_factory.mktemp("x") / "trace"
    path.write_bytes(content)
    with contextlib.suppress(TraceError):
        assert len(traces.read(path, name)) >= 0


def test_a_request_takes_few_bytes(file):
    trace = traces.read(file(MOONCAKE))
    columns = (trace.arrival, trace.input_tokens, trace.output_tokens, trace.session, trace.tenant, trace.think)
    assert sum(column.itemsize for column in columns) + trace.offsets.itemsize <= 40
