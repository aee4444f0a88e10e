"""Spend logs of the LiteLLM proxy: rows of its table LiteLLM_SpendLogs, as JSON lines, a JSON array or CSV.

`metadata.usage_object` has the usage that was reported, with cache reads and writes by TTL. Prompts are there where the
proxy was told to store them. A row that LiteLLM answered from its own cache reached no server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from warmkv.prefixes.reported_usage import usage_of
from warmkv.simulator.traces.calls import NOTE, Call, Texts, body_of, check, moment
from warmkv.simulator.traces.columns import RowError
from warmkv.simulator.traces.rows import Format, Parse, Reading, document, field, has_columns, json_or_csv, table, whole

KEYS = ("request_id", "call_type", "startTime", "prompt_tokens")
CALLS = ("completion", "text_completion", "responses", "generate_content", "generate_content_stream")
MORE = ("anthropic_messages", "pass_through_endpoint", "_aresponses_websocket")
GENERATING = frozenset((*CALLS, *(f"a{name}" for name in CALLS), *MORE))
CUT = "litellm_truncated skipped"
"""What stands in the middle of a stored text that had more than MAX_STRING_LENGTH_PROMPT_IN_DB characters."""


def parser(reading: Reading) -> Parse:
    texts = Texts(reading)

    def row_of(row: Mapping[str, Any]) -> Iterable[Call | None]:
        if field(row, "call_type") not in GENERATING:
            # A call that is not known, but has generated, is counted as left out; embeddings are none.
            return (None,) if row.get("completion_tokens") not in (None, 0, "0") else ()
        failed = str(row.get("status") or "success") != "success"
        if failed or str(row.get("cache_hit")).lower() == "true" or not whole(row, "prompt_tokens"):
            return (None,)
        reported = _reported(row)
        try:
            usage = usage_of(reported)
        except ValueError as error:
            raise RowError(f"usage: {error}") from None
        provider = str(row.get("custom_llm_provider", ""))
        call = Call(
            arrival=moment(field(row, "startTime"), "startTime"),
            usage=check(usage),
            model=str(row.get("model", "")),
            tenant=str(row.get("api_key") or ""),
            session=str(row.get("session_id") or ""),
            breakpoints=provider == "anthropic" or usage.total_written > 0,
            id=str(row.get("request_id") or ""),
        )
        asked = body_of(row.get("proxy_server_request"))
        body = body_of(asked["body"]) if "body" in asked else asked
        body = body or body_of(row.get("messages"))
        if _is_cut(body):
            reading.learned.cut += 1
            return (call,)
        return (texts.named(call, body),)

    return table(row_of, KEYS)


def _is_cut(value: Any) -> bool:
    """Return True if LiteLLM has stored a part alone of a text in a body."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str) and CUT in value:
            return True
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
    return False


def _reported(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the usage object, or what the columns of the row say without one."""
    metadata = document(row.get("metadata"))
    metadata = metadata if isinstance(metadata, dict) else {}
    found = metadata.get("usage_object")
    if isinstance(found, dict) and found.get("prompt_tokens") is not None:
        return found
    more = metadata.get("additional_usage_values")
    counts = {name: whole(row, name) for name in ("prompt_tokens", "completion_tokens") if name in row}
    return {**(more if isinstance(more, dict) else {}), **counts}


LITELLM = Format("litellm", lambda text: has_columns(text, KEYS), parser, json_or_csv, NOTE, records=True)
