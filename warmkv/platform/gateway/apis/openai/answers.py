"""Answers and stream events of the OpenAI-compatible API: chat and plain completions."""

from __future__ import annotations

import json
from typing import Any

from warmkv.platform.gateway.admission import SubmittedRequest
from warmkv.platform.gateway.apis.answer import TEXT, Answer, event_of_text
from warmkv.platform.gateway.apis.errors import openai_body
from warmkv.platform.gateway.streams import EventWriter
from warmkv.prefixes.usage import Usage
from warmkv.replicas.protocol import FinishReason

FINISH_REASONS: dict[FinishReason, str] = {"end": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}


def usage_fields(usage: Usage, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def respond(answer: Answer, chat: bool) -> dict[str, Any]:
    """Return the whole answer as one completion."""
    text = await answer.text()
    body = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    choice = {"index": 0, **body, "finish_reason": FINISH_REASONS[answer.end.reason], "logprobs": None}
    return {**_head(answer, chat, chunk=False), "choices": [choice], "usage": _usage(answer)}


async def stream(admission: SubmittedRequest, chat: bool, include_usage: bool, out: EventWriter) -> None:
    """Write the answer as server-sent events, ended by [DONE]. A fault after admission is an `error` object."""

    def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
        body = {"delta": delta} if chat else {"text": delta.get("content", "")}
        choice = {"index": 0, **body, "finish_reason": reason, "logprobs": None}
        return _event({**head, "choices": [choice]})

    try:
        answer = await admission.begin()
        head = _head(answer, chat, chunk=True)
        if chat:
            await out.send(chunk({"role": "assistant", "content": ""}))
        await answer.write(out, event_of_text(chunk({"content": TEXT})))
        await out.send(chunk({}, FINISH_REASONS[answer.end.reason]))
        if include_usage:
            await out.send(_event({**head, "choices": [], "usage": _usage(answer)}))
        await out.send(b"data: [DONE]\n\n")
    except Exception as error:
        await out.send(_event(openai_body(admission.failed(error), admission.id)))


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def _usage(answer: Answer) -> dict[str, Any]:
    return {**usage_fields(answer.usage, answer.started.cached_tokens), "warmkv": answer.details()}


def _head(answer: Answer, chat: bool, chunk: bool) -> dict[str, Any]:
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if chat else "text_completion"
    name = f"{'chatcmpl' if chat else 'cmpl'}-{answer.name}"
    return {"id": name, "object": kind, "created": int(answer.arrival), "model": answer.model}
