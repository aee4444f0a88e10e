"""Answers and stream events of the Anthropic Messages API."""

from __future__ import annotations

import json
from typing import Any

from warmkv.platform.gateway.admission import SubmittedRequest
from warmkv.platform.gateway.apis.answer import TEXT, Answer, event_of_text
from warmkv.platform.gateway.apis.errors import anthropic_body
from warmkv.platform.gateway.streams import EventWriter
from warmkv.prefixes.usage import Usage
from warmkv.replicas.protocol import FinishReason

STOP_REASONS: dict[FinishReason, str] = {
    "end": "end_turn",
    "length": "max_tokens",
    "stop": "stop_sequence",
    "cancelled": "end_turn",
}


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Return token counts as the Messages API reports them."""
    return {
        "input_tokens": usage.input,
        "cache_creation_input_tokens": usage.total_written,
        "cache_read_input_tokens": usage.read,
        "cache_creation": {f"ephemeral_{ttl}_input_tokens": tokens for ttl, tokens in usage.written.items()},
        "output_tokens": usage.output,
    }


async def respond(answer: Answer) -> dict[str, Any]:
    """Return the whole answer as one message."""
    text = await answer.text()
    return {
        **_head(answer),
        "content": [{"type": "text", "text": text}] if text else [],
        "stop_reason": STOP_REASONS[answer.end.reason],
        "stop_sequence": answer.end.stop_sequence,
        "usage": {**usage_fields(answer.usage), "warmkv": answer.details()},
        **_edits(answer),
    }


async def stream(admission: SubmittedRequest, out: EventWriter) -> None:
    """Write the answer as server-sent events. A fault after admission is an `error` event."""
    try:
        answer = await admission.begin()
        start = {**_head(answer), "content": [], "stop_reason": None, "stop_sequence": None}
        start["usage"] = {**usage_fields(answer.usage), "warmkv": answer.details()}
        await out.send(_event({"type": "message_start", "message": start}))
        if (first := await answer.more()) is not None:
            block = {"type": "text", "text": ""}
            await out.send(_event({"type": "content_block_start", "index": 0, "content_block": block}))
            more = {"type": "text_delta", "text": TEXT}
            event = event_of_text(_event({"type": "content_block_delta", "index": 0, "delta": more}))
            await out.send(event(first.text))
            await answer.write(out, event)
            await out.send(_event({"type": "content_block_stop", "index": 0}))
        stop = {"stop_reason": STOP_REASONS[answer.end.reason], "stop_sequence": answer.end.stop_sequence}
        usage = {**usage_fields(answer.usage), "warmkv": answer.details()}
        await out.send(_event({"type": "message_delta", "delta": stop, "usage": usage, **_edits(answer)}))
        await out.send(_event({"type": "message_stop"}))
    except Exception as error:
        await out.send(_event(anthropic_body(admission.failed(error), admission.id)))


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.name}", "type": "message", "role": "assistant", "model": answer.model}


def _edits(answer: Answer) -> dict[str, Any]:
    return {} if answer.context_management is None else {"context_management": answer.context_management}


def _event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()
