"""Lines of recorded exchanges: what they tell, and that nothing of a prompt, an answer or a key is in them."""

import gzip
import json
import zlib

import brotli
import pytest
import zstandard

from warmkv.platform.json_values import TooManyValuesError
from warmkv.platform.recording import exchange as recorded
from warmkv.platform.recording.conversations import Conversations
from warmkv.platform.recording.exchange import Analyst, Answer, Exchange, api_of
from warmkv.platform.recording.state import State, StateError
from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.usage import Usage

SECRETS = ("sk-ant-verysecret", "The quick brown fox", "jumps over the lazy dog", "Bash", "user_account_7")
SYSTEM = "The quick brown fox " * 300
USAGE = {"input_tokens": 12, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 1500, "output_tokens": 1}
SPLIT = {"cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 1500}}


def messages(*texts, **more):
    mark = {"type": "ephemeral", "ttl": "1h"}
    body = {
        "model": "claude-x",
        "max_tokens": 64,
        "tools": [{"name": "Bash"}],
        "metadata": {"user_id": "user_account_7"},
    }
    body["system"] = [{"type": "text", "text": SYSTEM, "cache_control": mark}]
    return body | {"messages": [{"role": "user", "content": text} for text in texts]} | more


def stream(*events):
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events).encode()


ANSWER = stream(
    {"type": "message_start", "message": {"id": "msg_1", "usage": USAGE | SPLIT}},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "jumps over the lazy dog"}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 33}},
)


def exchange(body, answer=ANSWER, path="/v1/messages", code=200, **more):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"x-api-key": "sk-ant-verysecret", "user-agent": "x"}
    found = Exchange(
        path, 1000.0, headers, bytearray(data), bytearray(answer), {"request-id": "req_1"}, code, first=0.5, last=2.0
    )
    for name, value in more.items():
        setattr(found, name, value)
    return found


@pytest.fixture
def analyst():
    return Analyst(State(b"salt"), 64)


def test_a_line_has_usage_marks_and_times_and_no_text(analyst):
    line = analyst.record(exchange(messages("jumps over the lazy dog"))).to_json()
    for secret in SECRETS:
        for start in range(len(secret) - 3):
            assert secret[start : start + 4] not in line
    record = RequestRecord.from_json(line)
    assert (record.api, record.model, record.id, record.max_tokens) == ("messages", "claude-x", "req_1", 64)
    assert record.usage == Usage(12, 0, {"1h": 1500}, 33)
    assert (record.ttft, record.e2e, record.output_tokens, record.stop_reason) == (0.5, 2.0, 33, "end_turn")
    assert [mark.ttl for mark in record.marks] == ["1h"]
    assert record.input_tokens == pytest.approx(1512, abs=2)  # scaled by the usage
    assert record.bytes_per_token == pytest.approx(6090 / 1512, abs=0.1)


def test_equal_beginnings_are_equal_for_one_key_and_model_only(analyst):
    one, two = (analyst.record(exchange(messages(text))) for text in ("a", "b"))
    assert one.hashes[:-1] == two.hashes[:-1]
    assert one.marks == two.marks
    for other in (
        exchange(messages("a"), headers={"authorization": "Bearer x"}),
        exchange(messages("a", model="other")),
    ):
        assert not set(analyst.record(other).hashes) & set(one.hashes)
    assert not set(Analyst(State(b"other salt"), 64).record(exchange(messages("a"))).hashes) & set(one.hashes)


def test_a_tokenizer_counts_exactly():
    record = Analyst(State(b"salt"), 8, lambda text: list(range(len(text) // 2))).record(exchange(messages("hello")))
    assert (record.bytes_per_token, record.input_tokens // 8) == (0.0, len(record.hashes))
    assert record.marks[0].position < record.input_tokens


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/messages", "messages"),
        ("/anthropic/v1/messages/", "messages"),
        ("/v1/chat/completions", "chat"),
        ("/v1/completions", "completions"),
        ("/v1/responses", "responses"),
        ("/v1/messages/count_tokens", None),
        ("/v1/embeddings", None),
    ],
)
def test_requests_that_generate_are_written(path, api):
    assert api_of("POST", path) == api
    assert api_of("GET", path) is None


def chunk(**more):
    event = {"choices": [{"delta": {"content": "x"}, "finish_reason": None}], "usage": None} | more
    return f"data: {json.dumps(event)}\n\n"


def test_streams_of_the_openai_apis(analyst):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt_cache_key": "user_account_7"}
    usage = {"prompt_tokens": 400, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 256}}
    events = chunk() * 3 + chunk(choices=[{"delta": {}, "finish_reason": "length"}])
    record = analyst.record(exchange(body, (events + chunk(choices=[], usage=usage)).encode(), "/v1/chat/completions"))
    assert (record.api, record.usage, record.stop_reason) == ("chat", Usage(144, 256, {}, 3), "length")
    assert record.session == analyst.record(exchange(body)).session != ""
    silent = analyst.record(exchange(body, events.encode(), "/v1/chat/completions"))
    assert (silent.usage, silent.output_tokens) == (Usage(), 3)
    completed = {"type": "response.completed", "response": {"usage": {"input_tokens": 9, "output_tokens": 2}}}
    assert Answer.of(stream(completed)).usage == Usage(9, 0, {}, 2)


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("br", brotli.compress),
        ("zstd", zstandard.ZstdCompressor().compress),
        ("identity", bytes),
    ],
)
def test_packed_answers_are_read(analyst, encoding, pack):
    packed = exchange(messages("a"), pack(ANSWER), answer_headers={"content-encoding": encoding})
    assert analyst.record(packed).usage.output == 33


def test_packed_requests_are_read(analyst):
    data = zstandard.ZstdCompressor().compress(json.dumps(messages("a")).encode())  # as Codex sends them
    packed = exchange(data, headers={"x-api-key": "sk-ant-verysecret", "content-encoding": "zstd"})
    assert analyst.record(packed).hashes == analyst.record(exchange(messages("a"))).hashes


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("br", brotli.compress), ("zstd", zstandard.ZstdCompressor().compress)],
)
def test_no_body_is_inflated_beyond_what_is_kept_of_one(analyst, monkeypatch, encoding, pack):
    monkeypatch.setattr(recorded, "LONGEST_BODY", 100_000)
    encoded = {"content-encoding": encoding}
    data, large = (json.dumps(messages("a" * size)).encode() for size in (10_000, 200_000))
    assert analyst.record(exchange(pack(data), headers=encoded))
    for one in (exchange(pack(large), headers=encoded), exchange(data, pack(large), answer_headers=encoded)):
        with pytest.raises(ValueError, match="more than 100000 bytes"):
            analyst.record(one)


def test_nothing_is_parsed_that_would_take_many_times_its_size(analyst):
    many = b'{"usage": {"x": [' + b"[]," * 600_000 + b"0]}}"
    for one in (exchange(many), exchange(messages("a"), many), exchange(messages("a"), b"data: " + many + b"\n\n")):
        with pytest.raises(TooManyValuesError):
            analyst.record(one)


def test_a_prompt_that_goes_on_from_an_answer_is_as_long_as_reported_and_settles_nothing(analyst):
    """Take nothing of its prefix as known, since only its end was sent."""
    body = {"model": "m", "input": "And then?", "previous_response_id": "resp_1"}
    usage = {"input_tokens": 5200, "input_tokens_details": {"cached_tokens": 5120}, "output_tokens": 9}
    found = [analyst.record(exchange(body, json.dumps({"usage": usage}).encode(), "/v1/responses")) for _ in "ab"]
    assert [(one.input_tokens, len(one.hashes), one.usage.read) for one in found] == [(5200, 81, 5120)] * 2
    assert not set(found[0].hashes) & set(found[1].hashes)
    whole = json.dumps({"usage": {"input_tokens": 4001, "output_tokens": 9}}).encode()
    record = analyst.record(exchange({"model": "m", "input": "word " * 4000}, whole, "/v1/responses"))
    assert record.input_tokens == pytest.approx(4001, abs=2)


def responses(analyst, body, name, tokens, streamed=False):
    answer = {"id": name, "usage": {"input_tokens": tokens, "output_tokens": 9}}
    data = stream({"type": "response.completed", "response": answer}) if streamed else json.dumps(answer).encode()
    return analyst.record(exchange({"model": "m", "instructions": "Be brief."} | body, data, "/v1/responses")).hashes


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_goes_on_from_the_blocks_of_the_answer_that_it_names(analyst, streamed):
    first = responses(analyst, {"input": "word " * 6000}, "resp_1", 6000)
    second = responses(analyst, {"input": "And?", "previous_response_id": "resp_1"}, "resp_2", 6400, streamed)
    other = responses(analyst, {"input": "Or?", "previous_response_id": "resp_1"}, "resp_3", 6400)
    third = responses(analyst, {"input": "So?", "previous_response_id": "resp_2"}, "resp_4", 6800)
    assert (len(first) >= 90, len(second), len(third)) == (True, 100, 106)
    assert second[: len(first)] == other[: len(first)] == first
    assert third[:100] == second
    assert not set(second[len(first) :]) & set(other[len(first) :])


def test_a_prompt_shares_nothing_with_an_answer_of_another_key_model_or_instructions(analyst):
    first = responses(analyst, {"input": "word " * 6000}, "resp_1", 6000)
    asked = {"input": "And?", "previous_response_id": "resp_1"}
    for other in ({"instructions": "Be long."}, {"model": "n"}, {"tools": [{"name": "Bash"}]}):
        assert not set(first) & set(responses(analyst, asked | other, "resp_2", 6400))
    theirs = exchange({"model": "m", "instructions": "Be brief."} | asked, b"", "/v1/responses", headers={})
    theirs.answer += json.dumps({"usage": {"input_tokens": 6400, "output_tokens": 9}}).encode()
    assert not set(first) & set(analyst.record(theirs).hashes)


def test_a_conversation_goes_on_by_its_own_name(analyst):
    first, second = (
        responses(analyst, {"input": "word", "conversation": name}, answer, tokens)
        for name, answer, tokens in (("conv_1", "resp_1", 3200), ({"id": "conv_1"}, "resp_2", 6400))
    )
    assert second[:50] == first


def test_conversations_are_remembered_within_a_limit():
    conversations = Conversations(most_blocks=30)
    for number in range(5):
        conversations.add("a", [f"resp_{number}", ""], b"head", [bytes([number])] * 9)
    assert [len(conversations.prefix("a", f"resp_{number}", b"head")) for number in range(5)] == [0, 0, 9, 9, 9]
    assert conversations.prefix("a", "", b"head") == ()
    conversations.prefix("a", "resp_2", b"head")
    conversations.add("a", ["resp_4"], b"head", [b"x"] * 9)  # anew, so that no other goes
    conversations.add("a", ["resp_5"], b"head", [b"x"] * 9)
    assert [len(conversations.prefix("a", f"resp_{number}", b"head")) for number in range(2, 6)] == [9, 0, 9, 9]


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "rot13"])
def test_what_cannot_be_unpacked_reports_nothing(analyst, encoding):
    record = analyst.record(exchange(messages("a"), b"junk", answer_headers={"content-encoding": encoding}))
    assert (record.usage, record.status) == (Usage(), "ok")


def test_errors_and_cancelled_requests_say_so(analyst):
    refused = json.dumps({"type": "error", "error": {"type": "overloaded_error", "message": "jumps over"}}).encode()
    record = analyst.record(exchange(messages("a"), refused, code=529))
    assert (record.status, record.error, record.ttft) == ("error", "overloaded_error", 0.0)
    assert analyst.record(exchange(messages("a"), b"<html>", code=500)).error == "http_500"
    assert analyst.record(exchange(messages("a"), ANSWER[:90], outcome="cancelled")).status == "cancelled"
    within = stream({"type": "error", "error": {"type": "api error: secret text"}})
    assert analyst.record(exchange(messages("a"), within)).error == "error"
    failed = {"type": "response.failed", "response": {"error": {"code": "server_error", "message": "jumps over"}}}
    for event in (failed, {"type": "error", "code": "server_error", "message": "jumps over"}):
        record = analyst.record(exchange({"model": "m", "input": "a"}, stream(event), "/v1/responses"))
        assert (record.status, record.error) == ("error", "server_error")
    assert analyst.record(exchange(messages("a"), ANSWER[:90], outcome="error")).error == "cut_off"
    for body in (b"no json", b"[]"):
        with pytest.raises(ValueError, match=r"JSON|Expecting"):
            analyst.record(exchange(body))


def test_a_recording_goes_on_with_its_salt_and_scale(tmp_path):
    path = tmp_path / "new" / "log.state"
    one = Analyst(State.of(path), 64).record(exchange(messages("a")))
    assert path.stat().st_mode & 0o777 == 0o600
    usage = json.dumps({"usage": {"input_tokens": 9000, "output_tokens": 1}}).encode()
    two = Analyst(State.of(path), 64).record(exchange(messages("a"), usage))
    assert (two.hashes, two.bytes_per_token) == (one.hashes, one.bytes_per_token)
    given = State.of(path, "given")
    given.save()
    assert given.salt == b"given" != State.of(path).salt, "the log's own salt stays"
    path.write_text("{}")
    with pytest.raises(StateError, match="is no state of `warmkv record`"):
        State.of(path)
