"""Answers and stream events of the Anthropic Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from warmkv.platform.gateway.admission import SubmittedRequest
from warmkv.platform.gateway.apis.answer import TEXT, Answer, event_of_text
from warmkv.platform.gateway.apis.chat_parsing.parts import Part, Text, Thinking, ToolCall
from warmkv.platform.gateway.apis.errors import anthropic_body
from warmkv.platform.gateway.apis.thinking import seal, sign
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


def _usage(answer: Answer) -> dict[str, Any]:
    """Return the usage of an answer that has ended.

    The price is in the details of the output as well: the SDK's helper of streams keeps those of the last event, while
    of what the API does not have it keeps what the first event said, before there was a price.
    """
    told = answer.details()
    details = {"thinking_tokens": answer.thinking_tokens, "warmkv": {"price": told["price"]}}
    return {**usage_fields(answer.usage), "output_tokens_details": details, "warmkv": told}


async def respond(answer: Answer, secret: bytes) -> dict[str, Any]:
    """Return the whole answer as one message, whose thinking is signed with the service's secret."""
    content = [_block(answer, number, part, secret) for number, part in enumerate(await answer.parts())]
    return {
        **_head(answer),
        "content": content,
        **_stop(answer, called=any(block["type"] == "tool_use" for block in content)),
        "usage": _usage(answer),
        **_edits(answer),
    }


async def stream(admission: SubmittedRequest, secret: bytes, out: EventWriter) -> None:
    """Write the answer as server-sent events. A fault after admission is an `error` event."""
    try:
        answer = await admission.begin()
        start = {**_head(answer), "content": [], "stop_reason": None, "stop_sequence": None}
        known = {name: value for name, value in answer.details().items() if name != "price"}
        start["usage"] = {**usage_fields(answer.usage), "warmkv": known}
        await out.send(_event({"type": "message_start", "message": start}))
        blocks = _BlockEvents(answer, secret)
        if answer.expected is not None:
            await answer.write_parts(out, blocks.of)
            out.hold(blocks.close())
        elif (first := await answer.more()) is not None:
            block = {"type": "text", "text": ""}
            await out.send(_event({"type": "content_block_start", "index": 0, "content_block": block}))
            more = {"type": "text_delta", "text": TEXT}
            event = event_of_text(_event({"type": "content_block_delta", "index": 0, "delta": more}))
            await out.send(event(first.text))
            await answer.write(out, event)
            out.hold(_event({"type": "content_block_stop", "index": 0}))
        stop = _stop(answer, called=blocks.called)
        out.hold(_event({"type": "message_delta", "delta": stop, "usage": _usage(answer), **_edits(answer)}))
        out.hold(_event({"type": "message_stop"}))
    except Exception as error:
        out.hold(_event(anthropic_body(admission.report(error), admission.id)))


def _stop(answer: Answer, *, called: bool) -> dict[str, Any]:
    reason = "tool_use" if called and answer.is_complete else STOP_REASONS[answer.end.reason]
    return {"stop_reason": reason, "stop_sequence": answer.end.stop_sequence}


def _block(answer: Answer, number: int, part: Part, secret: bytes) -> dict[str, Any]:
    """Return a part as a whole content block, the answer's `number`."""
    match part:
        case Text():
            return {"type": "text", "text": part.text}
        case Thinking():
            shown = "" if answer.omit_thinking else part.text
            return {"type": "thinking", "thinking": shown, "signature": _signature(answer, part.text, secret)}
        case ToolCall():
            return {**_call(answer, number, part), "input": json.loads(part.arguments)}


def _signature(answer: Answer, thinking: str, secret: bytes) -> str:
    return (seal if answer.omit_thinking else sign)(thinking, secret)


def _call(answer: Answer, number: int, call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{answer.name}_{number}", "name": call.name, "input": {}}


class _BlockEvents:
    """The events of an answer's content blocks, of which one is open at a time."""

    def __init__(self, answer: Answer, secret: bytes) -> None:
        self._answer, self._secret = answer, secret
        self._number = 0
        self._open: type[Part] | None = None
        self._thinking = list[str]()
        self.called = False

    def of(self, parts: Iterable[Part]) -> bytes:
        """Return the events of more parts."""
        return b"".join(map(self._written, parts))

    def close(self) -> bytes:
        """Return the events that end the open block."""
        if self._open is None:
            return b""
        signed = b""
        if self._open is Thinking:
            signature = _signature(self._answer, "".join(self._thinking), self._secret)
            signed, self._thinking = self._delta({"type": "signature_delta", "signature": signature}), []
        stop = _event({"type": "content_block_stop", "index": self._number})
        self._number, self._open = self._number + 1, None
        return signed + stop

    def _written(self, part: Part) -> bytes:
        match part:
            case Text():
                return self._begun(part, {"type": "text", "text": ""}) + self._delta(
                    {"type": "text_delta", "text": part.text}
                )
            case Thinking():
                self._thinking.append(part.text)
                begun = self._begun(part, {"type": "thinking", "thinking": "", "signature": ""})
                omitted = self._answer.omit_thinking
                return begun if omitted else begun + self._delta({"type": "thinking_delta", "thinking": part.text})
            case ToolCall():
                self.called = True
                closed = self.close()
                begun = self._begun(part, _call(self._answer, self._number, part))
                written = self._delta({"type": "input_json_delta", "partial_json": part.arguments})
                return closed + begun + written + self.close()

    def _begun(self, part: Part, block: dict[str, Any]) -> bytes:
        """Return the events that begin a block, unless such a one is open."""
        if self._open is type(part):
            return b""
        closed, self._open = self.close(), type(part)
        return closed + _event({"type": "content_block_start", "index": self._number, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._number, "delta": delta})


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.name}", "type": "message", "role": "assistant", "model": answer.model}


def _edits(answer: Answer) -> dict[str, Any]:
    return {} if answer.context_management is None else {"context_management": answer.context_management}


def _event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()
