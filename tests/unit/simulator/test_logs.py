"""What the logs of other tools tell: usage, conversations, prompts, and what is assumed where they lack them."""

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.test_traces import (
    aiperf,
    asked,
    claude_code,
    langfuse,
    lines,
    litellm,
    span,
    spans,
    vllm_bench,
)
from warmkv.prefixes.usage import Usage
from warmkv.simulator import traces
from warmkv.simulator.traces import Reading, TraceError
from warmkv.simulator.traces.conversations import Conversations
from warmkv.simulator.traces.reader import Rows


@pytest.fixture
def read(tmp_path):
    def make(text, name="log.jsonl", **reading):
        (tmp_path / name).write_text(text if isinstance(text, str) else lines(*text))
        rows = Rows(tmp_path / name, reading=Reading(**reading))
        return list(rows), rows

    return make


def as_csv(*rows):
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0].keys())
    writer.writeheader()
    writer.writerows(
        {key: json.dumps(value, indent=1) if isinstance(value, dict) else value for key, value in row.items()}
        for row in rows
    )
    return out.getvalue()


def marks(record):
    return [(mark.position, mark.ttl) for mark in record.marks]


# --- Claude Code


def test_an_answer_in_several_lines_is_one_request_and_came_when_it_was_asked_for(read):
    second = claude_code("a", 0, 900, parent="of-a", at="2026-11-23T06:07:49.000Z") | {"uuid": "x"}
    (one,), rows = read([asked(), claude_code("a", 0, 900), second])
    assert (rows.format.name, one.api, one.usage) == ("claude-code", "messages", Usage(10, 0, {"5m": 900}, 33))
    assert one.arrival == pytest.approx(1_795_414_062.828)


def test_writes_have_breakpoints_by_ttl_and_the_next_turn_reads_them(read):
    first, second = (
        claude_code("a", 0, 100, hour=800),
        claude_code("b", 900, 50, parent="u1", at="2026-11-23T06:09:00Z"),
    )
    (one, two), _ = read([asked(), first, asked("u1", "2026-11-23T06:08:00Z"), second])
    assert marks(one) == [(800, "1h"), (900, "5m")]
    assert marks(two) == [(950, "5m")]
    assert [read.position for read in two.reads] == [950, 900, 800]
    assert {read.key for read in two.reads} >= {mark.key for mark in one.marks}
    assert two.hashes[: len(one.hashes)] == one.hashes


def test_a_subagent_is_a_conversation_of_its_own_and_failures_are_left_out(read):
    agent = claude_code("b", 0, 500, agentId="x", isSidechain=True)
    synthetic = claude_code("c", 0, 0) | {"isApiErrorMessage": True}
    (one, two), rows = read(
        [{"type": "summary", "summary": "s", "leafUuid": "u"}, claude_code("a", 0, 900), agent, synthetic]
    )
    assert (one.session, two.session, rows.skipped) == ("s", "s/x", 1)
    assert not set(one.hashes) & set(two.hashes)


def test_the_folder_of_all_projects_is_one_log(tmp_path):
    sessions = {"p/a.jsonl": "a", "p/a/subagents/agent-1.jsonl": "b", "q/c.jsonl": "c"}
    for name, session in sessions.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(lines(claude_code(session, 0, 100, session=session)))
    (tmp_path / "p" / "sessions-index.json").write_text('{\n"version": 1}')
    assert {row.session for row in Rows(tmp_path)} == {"a", "b", "c"}
    assert {row.session for row in Rows(tmp_path / "p")} == {"a", "b"}


# --- LiteLLM


def test_spend_logs_tell_reads_and_writes(read):
    (one, two, three), rows = read([litellm("a", 1551, 0, 1541), litellm("b", 1555, 1541, 4), litellm("c", 900, 256)])
    assert (rows.format.name, one.usage) == ("litellm", Usage(10, 0, {"5m": 1541}, 33))
    assert (two.usage, marks(two)) == (Usage(10, 1541, {"5m": 4}, 33), [(1545, "5m")])
    assert (three.api, three.usage, three.marks) == ("chat", Usage(644, 256, {}, 33), ())


def test_what_reached_no_server_is_left_out(read):
    other = litellm("e", 5) | {"call_type": "aembedding", "completion_tokens": 0}
    rows = [litellm("a", 1551), litellm("b", 1, status="failure"), litellm("c", 5, cache_hit="True"), other]
    found, account = read(rows)
    assert ([row.id for row in found], account.skipped) == (["a"], 2)


def test_json_arrays_and_csv_say_the_same(read):
    rows = [litellm("a", 1551, 0, 1541), litellm("b", 1555, 1541, 4) | {"model": 'a "quoted", name'}]
    given, _ = read(rows)
    for text in (json.dumps(rows), json.dumps(rows, indent=2), as_csv(*rows)):
        assert read(text, "other")[0] == given


def test_stored_prompts_are_hashed_as_text(read):
    def body(*texts):
        return json.dumps({"model": "m", "messages": [{"role": "user", "content": text} for text in texts]})

    long = "word " * 3000
    rows = [
        litellm("a", 3000, proxy_server_request=body(long)),
        litellm("b", 3010, proxy_server_request=body(long, "more")),
    ]
    (one, two, other), _ = read([*rows, litellm("c", 3000, proxy_server_request=body("other " + long))])
    assert one.bytes_per_token == pytest.approx(5, abs=0.1)
    assert one.input_tokens == pytest.approx(3000, abs=5)
    assert two.hashes[: len(one.hashes)] == one.hashes
    assert not set(one.hashes) & set(other.hashes)
    marked = {
        "model": "m",
        "system": [{"type": "text", "text": long, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    }
    marked["messages"] = [{"role": "user", "content": "hi"}]
    (one,), _ = read([litellm("a", 3010, 0, 3000, proxy_server_request=json.dumps(marked))], "marked")
    assert [mark.ttl for mark in one.marks] == ["1h"]


def test_a_stored_prompt_that_was_cut_is_none(read):
    """Derive its prefix: LiteLLM keeps 2,048 characters of a text, from its beginning and its end."""
    text = "word " * 250 + "... (litellm_truncated skipped 77952 chars. ...) ..." + "word " * 200
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})
    whole = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 4000}]})
    rows = [litellm("a", 16010, proxy_server_request=body), litellm("b", 4000, proxy_server_request=whole)]
    (cut, other), account = read(rows)
    assert (cut.input_tokens, cut.bytes_per_token) == (16010, 0.0)
    assert other.input_tokens == pytest.approx(4000, abs=5)
    assert any("of 1 prompts the log has a part alone" in note for note in account.notes)


def test_files_of_a_log_have_one_scale(tmp_path):
    """Give equal prompts equal blocks, whichever prompt of its file came first."""

    def row(name, tokens, text):
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        return litellm(name, tokens, proxy_server_request=json.dumps(body))

    shared = "word " * 3000
    (tmp_path / "1.jsonl").write_text(lines(row("1", 3000, shared)))
    (tmp_path / "2.jsonl").write_text(lines(row("2", 2000, "да " * 1000), row("3", 3000, shared)))
    one, _, three = sorted(Rows(tmp_path), key=lambda record: record.id)
    assert one.hashes == three.hashes


def test_streams_and_pass_through_are_requests_and_unknown_calls_are_counted(read):
    types = ["pass_through_endpoint", "agenerate_content_stream", "_aresponses_websocket", "a_new_call"]
    rows = [litellm(name, 1551) | {"call_type": name, "completion_tokens": 3} for name in types]
    found, account = read(rows)
    assert ([row.id for row in found], account.skipped) == (types[:3], 1)


@pytest.mark.parametrize("scope", ["tenant", "session"])
def test_a_scope_keeps_prefixes_apart(read, scope):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 3000}]})
    owner = "api_key" if scope == "tenant" else "session_id"
    rows = [litellm(name, 3000, proxy_server_request=body) | {owner: of} for name, of in zip("abc", "xyx", strict=True)]
    (a, b, c), _ = read(rows, scope=scope)
    assert (a.hashes == c.hashes, set(a.hashes) & set(b.hashes)) == (True, set())
    with pytest.raises(TraceError, match=f"does not tell the {scope}"):
        read([litellm("a", 3000) | {owner: ""}], scope=scope)


# --- Langfuse


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"input": 10, "output": 5, "input_cached_tokens": 300, "total": 315}, Usage(10, 300, {}, 5)),
        ({"input": 310, "output": 5, "cache_read_input_tokens": 300, "total": 315}, Usage(10, 300, {}, 5)),
        (
            {"input": 3, "input_cache_creation_1h": 70, "input_cache_creation_5m": 9, "output": 5},
            Usage(3, 0, {"5m": 9, "1h": 70}, 5),
        ),
        ({"input": 3, "cache_creation_input_tokens": 70, "output": 5}, Usage(3, 0, {"5m": 70}, 5)),
        ({"input": 10, "input_audio_tokens": 4, "output": 5, "output_reasoning_tokens": 2}, Usage(14, 0, {}, 7)),
    ],
)
def test_usage_details_of_langfuse(read, usage, expected):
    (one,), _ = read([langfuse("a", usage)])
    assert one.usage == expected
    assert one.api == ("messages" if any("creation" in key for key in usage) else "chat")


LEGACY = {"input": 10, "output": 5, "total": 15, "unit": "TOKENS"}


@pytest.mark.parametrize(
    "usage",
    [LEGACY, LEGACY | {"unit": None, "inputCost": 0.0003, "outputCost": None, "totalCost": 0.0005}, json.dumps(LEGACY)],
)
@pytest.mark.parametrize("details", [None, {}])
def test_the_legacy_usage_of_langfuse(read, usage, details):
    (one,), _ = read([langfuse("a", details) | {"usage": usage}])
    assert one.usage == Usage(10, 0, {}, 5)


def test_usage_in_other_units_than_tokens_is_left_out(read):
    units = ["CHARACTERS", "IMAGES", "TOKENS"]
    rows = [langfuse(unit, {"input": 10, "output": 5}) | {"usage": LEGACY | {"unit": unit}} for unit in units]
    found, account = read(rows)
    assert [row.id for row in found] == ["TOKENS"]
    assert (account.broken, account.faults[0].split(": ")[1]) == (2, "usage is in CHARACTERS, not in tokens")


def test_both_exports_of_langfuse_say_the_same(read):
    row = langfuse(
        "a", {"input": 10, "output": 5, "input_cached_tokens": 300}, input=[{"role": "user", "content": "x" * 2000}]
    )
    snake = {
        "id": "a",
        "type": "GENERATION",
        "trace_id": "t",
        "session_id": "s",
        "start_time": "2026-11-23 06:09:03.870000",
    }
    snake |= {"provided_model_name": "m", "usage_details": row["usageDetails"], "input": json.dumps(row["input"])}
    others = [langfuse("b", {}, type="SPAN"), langfuse("c", {"input": 5}, level="ERROR")]
    (one,), rows = read([row, *others])
    assert rows.skipped == 1
    assert read([snake], "snake")[0] == [one] == read(as_csv(snake), "csv")[0]
    assert len(one.hashes) == one.input_tokens // 64 > 5


# --- OpenTelemetry


def test_spans_of_models_are_requests_and_those_of_agents_are_not(read):
    failed = span("c", 10) | {"status": {"code": 2}}
    metrics = {"resourceMetrics": []}
    found, rows = read([spans(span("a", 300), span("b", 400, operation="invoke_agent")), metrics, spans(failed)])
    assert ([row.usage for row in found], rows.skipped, rows.broken) == ([Usage(300, 0, {}, 5)], 1, 0)


def test_input_tokens_have_the_cached_ones_in_them_unless_they_are_too_few(read):
    (one, two), _ = read([spans(span("a", 400, read=256), span("b", 10, read=256, written=100))])
    assert one.usage == Usage(144, 256, {}, 5)
    assert (two.usage, two.api) == (Usage(10, 256, {"5m": 100}, 5), "messages")


def test_messages_in_spans_are_hashed(read):
    messages = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "x" * 2000}]}])
    more = {
        "gen_ai.input.messages": messages,
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "s"}]),
    }
    (one, two, other), _ = read(
        [spans(span("a", 300, **more), span("b", 300, session="t", **more), span("c", 300, session="u"))]
    )
    assert one.hashes == two.hashes
    assert len(one.hashes) > 5
    assert not set(one.hashes) & set(other.hashes)


# --- benchmarks


def test_runs_of_vllm_bench_follow_each_other_and_failures_are_left_out(read):
    first = vllm_bench((7.5, 100, 5), (7.0, 200, 6), (7.2, 0, 0), errors=["", "", "refused"])
    found, rows = read([first, vllm_bench((99.0, 50, 1))])
    assert [(row.arrival, row.input_tokens) for row in found] == [(0.5, 100), (0.0, 200), (0.5, 50)]
    assert rows.skipped == 1


def test_runs_in_several_files_follow_each_other(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(vllm_bench((7.5, 100, 5), (7.0, 200, 6))))
    assert traces.read(tmp_path).arrival.tolist() == [0.0, 0.5, 0.5, 1.0]


def test_a_result_without_details_says_how_to_have_them(read):
    result = vllm_bench((7.5, 100, 5))
    del result["start_times"]
    _, rows = read([result])
    assert (
        "log.jsonl:1: start_times is missing: run `vllm bench serve` with --save-result --save-detailed"
        in rows.faults[0]
    )


def test_turns_of_aiperf_share_what_was_sent_before(read, tmp_path):
    turns = [{"messages": [{"role": "user", "content": str(number) * 2000}]} for number in range(2)]
    requests = [
        aiperf("c", 0, 500),
        aiperf("c", 1, 1006, start=1_795_414_102_000_000_000),
        aiperf("d", 0, 500, error={"code": 500}),
    ]
    for named in (False, True):  # by conversations alone, and with the texts
        if named:
            (tmp_path / "inputs.json").write_text(json.dumps({"data": [{"session_id": "c", "payloads": turns}]}))
        (one, two), rows = read(requests, "profile_export.jsonl")
        assert (rows.skipped, one.ttft, one.bytes_per_token > 0) == (1, 0.0055, named)
        assert two.hashes[: len(one.hashes)] == one.hashes
        assert two.input_tokens == pytest.approx(1006, abs=30)
    assert len(list(Rows(tmp_path))) == 2  # the folder of artifacts
    (tmp_path / "inputs.json").write_text("[]")
    with pytest.raises(TraceError, match=r"inputs\.json:1: not the inputs of aiperf"):
        read(requests, "profile_export.jsonl")


# --- moments

MOMENT = 1_767_261_600.125


@pytest.mark.parametrize("unit", [1, 10**3, 10**6, 10**9])
@pytest.mark.parametrize("write", [float, int, str, "{:.0f}".format])
def test_the_size_of_a_number_tells_the_unit_of_a_moment(read, unit, write):
    """As pandas writes a column of times, in JSON or in a CSV."""
    at, iso = write(MOMENT * unit), "2026-01-01T10:00:00.125Z"
    expected = [pytest.approx(MOMENT, abs=1 if unit == 1 else 1e-3)] * 2
    for text in (
        [litellm("a", 5, at=at), litellm("b", 5, at=iso)],
        as_csv(litellm("a", 5, at=at), litellm("b", 5, at=iso)),
        [langfuse("a", {"input": 5}, at=at), langfuse("b", {"input": 5}, at=iso)],
        [claude_code("a", 0, 5, at=at), claude_code("b", 0, 5, at=iso)],
    ):
        found, rows = read(text, "log")
        assert ([row.arrival for row in found], rows.broken) == (expected, 0)


def test_small_numbers_are_seconds_and_what_is_no_moment_is_left_out(read):
    ats = [0, 0.5, -3, 99_999_999_999, "7.25", True, "soon", None, float("nan"), "inf", [1]]
    found, rows = read([litellm(str(number), 5, at=at) for number, at in enumerate(ats)])
    assert [row.arrival for row in found] == [-3, 0, 0.5, 7.25, 99_999_999_999]
    assert rows.broken == 6
    assert "startTime must be a date and a time, not True" in rows.faults[0]


# --- what is assumed


def plans(*requests, size=10):
    conversations = Conversations(size)
    return [conversations.plan("m", session, usage, marked=bool(usage.written)) for session, usage in requests]


def shared(one, two):
    return sum(a == b for a, b in zip(one.hashes, two.hashes, strict=False))


def test_a_shorter_prompt_shares_what_it_read():
    one, two, three = plans(("s", Usage(100)), ("s", Usage(55, 25)), ("s", Usage(100)))
    assert (shared(one, two), shared(two, three), shared(one, three)) == (2, 8, 2)


def test_a_first_request_shares_what_it_read_with_the_prompt_that_had_a_breakpoint_there():
    written = ("a", Usage(10, 0, {"5m": 90})), ("b", Usage(10, 0, {"5m": 200}))
    one, other, two, three = plans(*written, ("c", Usage(60, 90)), ("d", Usage(300)))
    assert (shared(one, two), shared(other, two)) == (9, 0)
    assert (shared(one, three), shared(other, three)) == (9, 0)  # begins as conversations do


def test_requests_without_conversations_are_known_by_what_they_read():
    one, two, three, four = plans(("", Usage(200)), ("", Usage(50, 150)), ("", Usage(400)), ("", Usage(10, 20)))
    assert (shared(one, two), shared(one, three), shared(three, four)) == (15, 0, 2)


@given(
    st.lists(
        st.tuples(st.sampled_from("ab") | st.just(""), st.integers(0, 99), st.integers(0, 99), st.integers(1, 99)),
        max_size=12,
    )
)
def test_prefixes_are_prefixes(requests):
    """Equal blocks have equal blocks before them, and every name stands for one length."""
    places = {}
    for plan, (_, read, written, rest) in zip(
        plans(*((session, Usage(rest, read, {"5m": written})) for session, read, written, rest in requests), size=7),
        requests,
        strict=True,
    ):
        assert len(plan.hashes) == (read + written + rest) // 7
        for number, key in enumerate(plan.hashes):
            assert places.setdefault(key, plan.hashes[: number + 1]) == plan.hashes[: number + 1]
        for mark in (*plan.marks, *plan.reads):
            assert mark.position % 7 or mark.key == plan.hashes[mark.position // 7 - 1]


def test_a_row_that_is_too_long_ends_the_reading(tmp_path, monkeypatch):
    monkeypatch.setattr("warmkv.simulator.traces.rows.LONGEST", 500)
    monkeypatch.setattr("warmkv.simulator.traces.rows.READ", 100)
    for text in (lines(asked(), asked(), asked() | {"message": "x" * 600}), json.dumps([litellm("a" * 600, 1)])):
        (tmp_path / "log").write_text(text)
        with pytest.raises(TraceError, match=r"log:\d: a row has more than 500 characters"):
            traces.read(tmp_path / "log", "claude-code" if "\n" in text else "litellm")
