"""Observations of Langfuse, exported by its pages or to a blob storage: JSON, JSON lines, CSV; camel or snake case.
Pages of its API (`GET /api/public/observations`) are read, too.

Those of the type GENERATION are requests. Keys of `usageDetails` do not overlap, as Langfuse bills them, unless its
total says that the input has the cached tokens in it. A legacy export of a blob storage has no sessions: there a trace
is a conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from warmkv.prefixes.reported_usage import split, written_of
from warmkv.prefixes.usage import Usage
from warmkv.simulator.traces.calls import NOTE, Call, Texts, body_of, check, moment
from warmkv.simulator.traces.columns import RowError
from warmkv.simulator.traces.rows import Format, Parse, Reading, document, has_columns, json_or_csv, table, whole

KEYS = ("id", "type", "traceId", "startTime")
SNAKE_KEYS = ("id", "type", "trace_id", "start_time")
READ = ("input_cached_tokens", "cache_read_input_tokens", "input_cache_read")
WRITTEN = ("cache_creation_input_tokens", "input_cache_creation")
BY_TTL = {
    "input_cache_creation_5m": "ephemeral_5m_input_tokens",
    "input_cache_creation_1h": "ephemeral_1h_input_tokens",
}
TOKENS = "TOKENS"
NO_COUNTS = ("unit", "inputCost", "outputCost", "totalCost")  # of the legacy `usage`
CACHE = (*READ, *WRITTEN, *BY_TTL)


def parser(reading: Reading) -> Parse:
    texts = Texts(reading)

    def row_of(row: Mapping[str, Any]) -> Iterable[Call | None]:
        if str(row.get("type")) != "GENERATION":
            return ()
        if str(row.get("level")) == "ERROR":
            return (None,)
        usage, written = _usage(row)
        call = Call(
            arrival=moment(_value(row, "startTime", "start_time"), "startTime"),
            usage=check(usage),
            model=str(_value(row, "model", "providedModelName", "provided_model_name") or ""),
            tenant=str(_value(row, "userId", "user_id") or ""),
            session=str(_value(row, "sessionId", "session_id", "traceId", "trace_id") or ""),
            breakpoints=written,
            id=str(row.get("id") or ""),
        )
        return (texts.named(call, body_of(row.get("input"))),)

    return table(row_of, ("id", "type"))


def _value(row: Mapping[str, Any], *names: str) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _usage(row: Mapping[str, Any]) -> tuple[Usage, bool]:
    """Return the usage, and whether cache writes are reported, as the Messages API does. Raises RowError."""
    reported = [document(row.get(name)) for name in ("usageDetails", "usage_details", "usage")]
    details: Mapping[str, Any] = next((found for found in reported if isinstance(found, dict) and found), {})
    for found in reported:
        if isinstance(found, dict) and found.get("unit") not in (None, "", TOKENS):
            raise RowError(f"usage is in {found['unit']}, not in tokens")
    counts = {key: whole(details, key) for key in details if details[key] is not None and key not in NO_COUNTS}
    given = [key for key in ("input", "input_tokens", "prompt_tokens", "promptTokens") if key in counts]
    if not given:
        raise RowError("usageDetails has no input tokens")
    read = sum(counts.get(key, 0) for key in READ)
    by_ttl = {name: counts.get(key, 0) for key, name in BY_TTL.items()}
    total = sum(counts.get(key, 0) for key in WRITTEN)
    written = written_of(by_ttl, total)
    other = sum(tokens for key, tokens in counts.items() if key.startswith("input_") and key not in (*CACHE, *given))
    output = sum(tokens for key, tokens in counts.items() if key.startswith(("output", "completion")))
    prompt = counts[given[0]] + other
    if counts.get("total") != prompt + output:  # else the input has what was cached in it
        prompt += read + sum(written.values())
    try:
        return split(prompt, output, read, written), any(key in counts for key in (*WRITTEN, *BY_TTL))
    except ValueError as error:
        raise RowError(f"usageDetails: {error}") from None


LANGFUSE = Format(
    "langfuse",
    lambda text: has_columns(text, KEYS) or has_columns(text, SNAKE_KEYS),
    parser,
    json_or_csv,
    NOTE,
    records=True,
)
