"""Claude Code's session files, `~/.claude/projects/PROJECT/SESSION.jsonl`, and those of its subagents below them.

A line of type `assistant` is a content block of an answer, with the answer's id and its usage, so that of equal ids one
counts. The request came when the line before it in the conversation was written. The files have neither system prompt
nor tools, so their texts are not used: prefixes are derived from sessions and reported reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from warmkv.prefixes.reported_usage import usage_of
from warmkv.simulator.traces.calls import NOTE, Call, check, moment
from warmkv.simulator.traces.columns import RowError
from warmkv.simulator.traces.rows import Format, Parse, Reading, field, has_keys, mapping, objects

KEYS = ("type", "sessionId", "timestamp")
SIDE_LINES = (("type", "summary", "leafUuid"), ("type", "messageId", "snapshot"))


def parser(reading: Reading) -> Parse:
    times: dict[
        str, float
    ] = {}  # line of the conversation -> when it was written; of answers, when they were asked for

    def parse(line: str) -> Iterable[Call | None]:
        row = mapping(line)
        if row.get("type") not in ("user", "assistant", "attachment", "system") or "timestamp" not in row:
            return ()
        time, name = moment(row["timestamp"], "timestamp"), row.get("uuid")
        answer = row.get("message") if row["type"] == "assistant" else None
        asked = times.get(str(row.get("parentUuid")), time) if answer is not None else time
        if isinstance(name, str):
            times[name] = asked
        if answer is None:
            return ()
        if not isinstance(answer, dict):
            raise RowError("message must be an object")
        if row.get("isApiErrorMessage") or answer.get("model") == "<synthetic>":
            return (None,)
        return (_call(row, answer, asked),)

    return parse


def _call(row: Mapping[str, Any], answer: Mapping[str, Any], asked: float) -> Call:
    reported = field(answer, "usage")
    if not isinstance(reported, dict):
        raise RowError("usage must be an object")
    try:
        usage = usage_of(reported)
    except ValueError as error:
        raise RowError(f"usage: {error}") from None
    agent = row.get("agentId") or ("sidechain" if row.get("isSidechain") else "")
    return Call(
        arrival=asked,
        usage=check(usage),
        model=str(answer.get("model", "")),
        session=f"{field(row, 'sessionId')}/{agent}" if agent else str(field(row, "sessionId")),
        breakpoints=True,
        id=str(answer.get("id") or row.get("requestId") or ""),
    )


CLAUDE_CODE = Format(
    "claude-code",
    lambda line: any(has_keys(line, keys) for keys in (KEYS, *SIDE_LINES)),
    parser,
    objects,
    NOTE,
    records=True,
)
