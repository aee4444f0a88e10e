"""Spans of OpenTelemetry's conventions for generative AI (`gen_ai.*`), as OTLP JSON: an export, or many.

By the conventions `gen_ai.usage.input_tokens` has cached tokens in it; where it has fewer it is taken without them, as
older instrumentations of the Messages API report. Spans of agents and tools sum up or hold none and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from warmkv.prefixes.reported_usage import DEFAULT_TTL, split
from warmkv.prefixes.usage import Usage
from warmkv.simulator.traces.calls import NOTE, Call, Texts, body_of, check
from warmkv.simulator.traces.columns import RowError
from warmkv.simulator.traces.rows import (
    Format,
    Parse,
    Reading,
    document,
    each,
    has_columns,
    listed,
    mapping,
    number,
    objects,
    whole,
)

OPERATIONS = ("chat", "text_completion", "generate_content", "")
FAILED = (2, "STATUS_CODE_ERROR")
INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
READ = ("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens")
WRITTEN = ("gen_ai.usage.cache_creation.input_tokens", "gen_ai.usage.cache_creation_input_tokens")
SESSION = ("gen_ai.conversation.id", "session.id")
MODEL = ("gen_ai.response.model", "gen_ai.request.model")
PROVIDER = ("gen_ai.provider.name", "gen_ai.system")
TENANT = ("enduser.id", "user.id")
SPANS = "resourceSpans"


def parser(reading: Reading) -> Parse:
    texts = Texts(reading)

    def parse(text: str) -> Iterable[Call | RowError | None]:
        return each(_spans(mapping(text)), lambda span: _calls(span, texts))

    return parse


def _spans(export: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if SPANS not in export:
        return  # metrics and logs, which collectors write to the same file
    for resource in listed(export, SPANS):
        for scope in _objects(resource, "scopeSpans"):
            yield from _objects(scope, "spans")


def _objects(value: Any, name: str) -> Iterator[Mapping[str, Any]]:
    if not isinstance(value, dict):
        raise RowError(f"{name} must be in an object")
    for item in listed(value, name) if name in value else ():
        if not isinstance(item, dict):
            raise RowError(f"an item of {name} is no JSON object")
        yield item


def _calls(span: Mapping[str, Any], texts: Texts) -> Iterator[Call | None]:
    found = _attributes(span)
    if not any(name in found for name in INPUT) or found.get("gen_ai.operation.name", "") not in OPERATIONS:
        return
    status = span.get("status")
    if isinstance(status, dict) and status.get("code") in FAILED:
        yield None
        return
    usage, written = _usage(found)
    call = Call(
        arrival=number(span, "startTimeUnixNano") / 1e9,
        usage=check(usage),
        model=_text(found, MODEL),
        tenant=_text(found, TENANT),
        session=_text(found, SESSION) or str(span.get("traceId", "")),
        breakpoints=written or _text(found, PROVIDER) == "anthropic",
        id=f"{span.get('traceId', '')}/{span['spanId']}" if "spanId" in span else "",
    )
    asked = dict(body_of(found.get("gen_ai.input.messages")))
    for name, key in (("system", "gen_ai.system_instructions"), ("tools", "gen_ai.tool.definitions")):
        if asked and key in found:
            asked[name] = document(found[key])
    yield texts.named(call, asked)


def _attributes(span: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a span, and of the event that may hold its messages."""
    found: dict[str, Any] = {}
    for holder in (span, *_objects(span, "events")):
        for attribute in _objects(holder, "attributes"):
            value = attribute.get("value")
            if isinstance(value, dict) and len(value) == 1:
                found.setdefault(str(attribute.get("key")), _plain(value))
    return found


def _plain(value: Mapping[str, Any]) -> Any:
    """Return a value of OTLP JSON: {"intValue": "5"}, {"arrayValue": {"values": [...]}}, {"kvlistValue": ...}."""
    ((kind, plain),) = value.items()
    inner = plain.get("values", []) if isinstance(plain, dict) else []
    if kind == "arrayValue":
        return [_plain(item) for item in inner if isinstance(item, dict) and len(item) == 1]
    if kind == "kvlistValue":
        return {str(item["key"]): _plain(item["value"]) for item in inner if item.keys() == {"key", "value"}}
    return plain


def _usage(found: Mapping[str, Any]) -> tuple[Usage, bool]:
    """Return the usage, and whether cache writes are reported, as the Messages API does. Raises RowError."""
    prompt, output, read, written = (_count(found, names) for names in (INPUT, OUTPUT, READ, WRITTEN))
    if prompt < read + written:
        prompt += read + written
    try:
        return split(prompt, output, read, {DEFAULT_TTL: written} if written else {}), bool(written)
    except ValueError as error:
        raise RowError(f"gen_ai.usage: {error}") from None


def _count(found: Mapping[str, Any], names: Iterable[str]) -> int:
    return next((whole(found, name) for name in names if name in found), 0)


def _text(found: Mapping[str, Any], names: Iterable[str]) -> str:
    return next((str(found[name]) for name in names if found.get(name)), "")


OPENTELEMETRY = Format(
    "opentelemetry", lambda text: has_columns(text, (SPANS, "scopeSpans")), parser, objects, NOTE, records=True
)
