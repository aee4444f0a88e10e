"""What a hosted API should have billed, by the rules of the contract, against what it reported."""

from dataclasses import replace

import pytest

from tests.unit.simulator.test_traces import claude_code, lines
from warmkv.config import Config, load
from warmkv.prefixes.record import Candidate, Mark, RequestRecord
from warmkv.prefixes.usage import Usage
from warmkv.simulator.studies.replays.hosted import HostedError, compare
from warmkv.simulator.studies.replays.variants import VariantError
from warmkv.simulator.traces.reader import Rows

CONFIG = Config()


def asked(at, *marks, reads=(), reported=None, tokens=1000, ttft=0.0, **more):
    """A request whose breakpoints lie at `marks`, (position, ttl); all prefixes are of one conversation."""
    places = sorted({*(position for position, _ in marks), *reads}, reverse=True)
    return RequestRecord(
        id=f"at-{at}",
        arrival=float(at),
        tenant="t",
        model="m",
        api="messages",
        policy="full",
        block_size=4000,
        input_tokens=tokens,
        output_tokens=5,
        hashes=(),
        marks=tuple(Mark(position, ttl, position.to_bytes(4)) for position, ttl in marks),
        reads=tuple(Candidate(position, position.to_bytes(4)) for position in places),
        usage=reported or Usage(tokens, 0, {}, 5),
        ttft=ttft,
        **more,
    )


def written(tokens, ttl="5m", read=0, rest=0):
    return Usage(rest, read, {ttl: tokens} if tokens else {}, 5)


FIRST = asked(0, (900, "5m"), reported=written(900, rest=100))


@pytest.mark.parametrize(
    ("second", "finding"),
    [
        (asked(300, (900, "5m"), reported=Usage(100, 900, {}, 5)), "equal"),
        (asked(301, (900, "5m"), reported=Usage(100, 900, {}, 5)), "unforeseen"),
        (asked(301, (900, "5m"), reported=written(900, rest=100)), "equal"),
        (asked(10, (900, "5m"), reported=written(900, rest=100)), "gone"),
        (asked(10, (950, "5m"), reads=[900], reported=Usage(50, 900, {"5m": 50}, 5)), "equal"),
        (asked(10, (950, "5m"), reported=written(950, rest=50)), "equal"),
        (asked(10, (700, "5m"), reported=Usage(300, 700, {}, 5)), "before"),
    ],
)
def test_what_was_read_is_held_to_the_ttl(second, finding):
    found = compare([FIRST, second], CONFIG)
    assert {name: count for name, count in found.findings.items() if name != "equal"} == (
        {} if finding == "equal" else {finding: 1}
    )
    assert found.judged == 2 - (finding == "before")
    if finding == "equal":
        assert found.reported == found.predicted
        assert found.misses == []
    elif finding != "before":
        assert found.misses
        assert found.examples == {finding: [second.id]}


def test_a_read_starts_the_ttl_anew_and_an_hour_lasts_an_hour():
    reads = [asked(at, (900, "5m"), reported=Usage(100, 900, {}, 5)) for at in (250, 500, 750)]
    assert compare([FIRST, *reads], CONFIG).findings == {"equal": 4}
    hour = asked(0, (500, "1h"), (900, "5m"), reported=Usage(100, 0, {"1h": 500, "5m": 400}, 5))
    later = asked(3000, (500, "1h"), (900, "5m"), reported=Usage(100, 500, {"5m": 400}, 5))
    found = compare([hour, later], CONFIG)
    assert (found.findings, found.predicted.written) == ({"equal": 2}, {"1h": 500, "5m": 800})
    assert found.predicted_dollars == found.reported_dollars > 0


def test_what_is_written_can_be_read_once_its_answer_has_begun():
    first = replace(FIRST, ttft=2.0)
    both = [
        asked(1, (900, "5m"), reported=written(900, rest=100)),
        asked(2, (900, "5m"), reported=Usage(100, 900, {}, 5)),
    ]
    assert compare([first, *both], CONFIG).findings == {"equal": 3}


def test_a_second_writer_starts_the_ttl_anew():
    first, second = (asked(at, (900, "5m"), reported=written(900, rest=100), ttft=90.0) for at in (0, 60))
    late = [asked(at, (900, "5m"), reported=Usage(100, 900, {}, 5)) for at in (330, 630)]
    assert compare([first, second, *late], CONFIG).findings == {"equal": 4}
    hour = replace(second, marks=(Mark(900, "1h", first.marks[0].key),), usage=written(900, "1h", rest=100), ttft=5.0)
    early = asked(70, (900, "5m"), reported=Usage(100, 900, {}, 5))
    assert compare([first, hour, early, replace(late[0], arrival=3600.0)], CONFIG).findings == {"equal": 4}


def test_prompts_counted_by_their_text_are_compared_in_reported_tokens():
    def scaled(record):
        return replace(record, bytes_per_token=4.0, block_size=64, input_tokens=1000, hashes=(b"",) * 15)

    one = scaled(asked(0, (900, "5m"), reported=written(1800, rest=200)))
    two = scaled(asked(9, (900, "5m"), reported=Usage(190, 1810, {}, 5)))
    found = compare([one, two], CONFIG)
    assert (found.findings, found.predicted.read, found.predicted.written) == ({"equal": 2}, 1800, {"5m": 1800})
    assert found.read_error == pytest.approx(-10 / 1810)


def test_openai_apis_keep_every_block():
    def chat(at, keys, read, tokens=1000):
        record = asked(at, reported=Usage(tokens - read, read, {}, 5), tokens=tokens)
        return replace(record, api="chat", block_size=100, hashes=tuple(bytes([key]) for key in keys))

    one, two = chat(0, range(10), 0), chat(100, [0, 1, 2, 3, 4, 5, 60, 70, 80, 90], 512)
    assert compare([one, two], CONFIG).findings == {"equal": 2}
    assert compare([one, replace(two, usage=Usage(1000, 0, {}, 5))], CONFIG).findings == {"equal": 1, "gone": 1}
    late = replace(two, arrival=301.0)
    assert compare([one, late], CONFIG).findings == {"equal": 1, "unforeseen": 1}
    assert compare([two], CONFIG).findings == {"before": 1}


def test_a_session_of_claude_code_is_as_predicted(tmp_path):
    """The last turn comes after five minutes and writes everything anew."""
    at = [f"2026-11-23T06:{minute:02}:00Z" for minute in (0, 1, 5, 11)]
    turns = [(0, 2000), (2000, 100), (2100, 50), (0, 2300)]
    answers = [
        claude_code(str(n), read, new, at=when, parent=None)
        for n, ((read, new), when) in enumerate(zip(turns, at, strict=True))
    ]
    (tmp_path / "s.jsonl").write_text(lines(*answers))
    found = compare(list(Rows(tmp_path / "s.jsonl")), CONFIG)
    assert (found.findings, found.predicted) == ({"equal": 4}, found.reported)
    answers[3] = claude_code("3", 2150, 150, at=at[3], parent=None)  # an API that keeps longer than it says
    (tmp_path / "s.jsonl").write_text(lines(*answers))
    assert compare(list(Rows(tmp_path / "s.jsonl")), CONFIG).findings == {"equal": 3, "unforeseen": 1}


def test_a_ttl_that_the_settings_do_not_know_is_refused():
    config = load(flags=["prefix_cache.ttls={5m: 300}", "pricing.write={5m: 1.25}"], environ={})
    hour = asked(9, (900, "1h"), reported=written(900, "1h", rest=100))
    for unknown in (hour, replace(hour, marks=()), replace(hour, usage=Usage(1000, 0, {}, 5))):
        with pytest.raises(VariantError, match=r"request at-9: TTL '1h' is not one of prefix_cache.ttls \(5m\)"):
            compare([FIRST, unknown], config)
    assert compare([FIRST], config).findings == {"equal": 1}


def test_short_prefixes_are_not_cached_and_logs_without_usage_are_refused():
    config = CONFIG.model_copy(update={"prefix_cache": CONFIG.prefix_cache.model_copy(update={"min_tokens": 1024})})
    again = asked(1, (900, "5m"))
    assert compare([replace(FIRST, usage=Usage(1000, 0, {}, 5)), again], config).findings == {"equal": 2}
    with pytest.raises(HostedError, match="no request of the log reports its usage"):
        compare([replace(FIRST, usage=Usage())], CONFIG)
