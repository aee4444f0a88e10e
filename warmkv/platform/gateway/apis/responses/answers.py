"""Answers of the Responses API: whole, and as events."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from warmkv.platform.gateway.admission import SubmittedRequest
from warmkv.platform.gateway.apis.answer import TEXT, Answer, event_of_text
from warmkv.platform.gateway.apis.errors import clipped
from warmkv.platform.gateway.apis.responses.requests import ResponsesRequest
from warmkv.platform.gateway.apis.responses.store import Item, ResponseStore, Stored
from warmkv.platform.gateway.apis.schema import ParsedRequest
from warmkv.platform.gateway.streams import EventWriter

Event = dict[str, Any]


class Exchange:
    """A request of the Responses API and its answer, which is stored for its tenant when it has ended."""

    def __init__(
        self,
        body: ResponsesRequest,
        asked: ParsedRequest,
        admission: SubmittedRequest,
        store: ResponseStore,
        tenant: bytes,
        created: float,
    ) -> None:
        self.body, self.asked, self.admission = body, asked, admission
        self._store, self._tenant, self._created = store, tenant, created
        self.name = admission.id.removeprefix("req_")

    def response(self, status: str, output: list[Item], model: str, **more: Any) -> dict[str, Any]:
        """Return the object that stands for the answer, with what was asked."""
        body = self.body
        return {
            "id": f"resp_{self.name}",
            "object": "response",
            "created_at": int(self._created),
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": body.store,
            "temperature": body.temperature,
            "text": {"format": body.text.format},
            "tool_choice": body.tool_choice,
            "tools": body.tools,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            **more,
        }

    def ended(self, answer: Answer, output: list[Item]) -> dict[str, Any]:
        """Return the response with its usage, and store it where that is asked for."""
        cut = answer.end.reason == "length"
        usage = answer.usage
        told = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": answer.started.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.output,
            "warmkv": answer.details(),
        }
        details = {"reason": "max_output_tokens"} if cut else None
        status = "incomplete" if cut else "completed"
        response = self.response(status, output, answer.model, usage=told, incomplete_details=details)
        if self.body.store:
            items = [*self.body.items, *output]
            self._store.keep(self._tenant, Stored(response, items, self.body.previous_response_id))
        return response

    def message(self, text: str, status: str) -> Item:
        """Return the message of the answer."""
        part = [] if status == "in_progress" else [_part(text)]
        return {"id": f"msg_{self.name}", "type": "message", "status": status, "role": "assistant", "content": part}


async def respond(exchange: Exchange) -> dict[str, Any]:
    """Return the whole answer. Raises ApiError."""
    answer = await exchange.admission.begin()
    text = await answer.text()
    return exchange.ended(answer, [exchange.message(text, _status(answer))])


async def stream(exchange: Exchange, model: str, out: EventWriter) -> None:
    """Write the answer as server-sent events. A fault after admission is the event `response.failed`."""
    numbered = Numbered()
    try:
        answer = await exchange.admission.begin()
        begun = exchange.response("in_progress", [], model)
        await out.send(numbered({"type": "response.created", "response": begun}))
        await out.send(numbered({"type": "response.in_progress", "response": begun}))
        item = exchange.message("", "in_progress")
        await out.send(numbered({"type": "response.output_item.added", "output_index": 0, "item": item}))
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        await out.send(numbered({"type": "response.content_part.added", **place, "part": _part("")}))
        text: list[str] = []
        delta = numbered.of_text({"type": "response.output_text.delta", **place, "delta": TEXT, "logprobs": []})

        def taken(piece: str) -> bytes:
            text.append(piece)
            return delta(piece)

        await answer.write(out, taken)
        whole = "".join(text)
        await out.send(numbered({"type": "response.output_text.done", **place, "text": whole, "logprobs": []}))
        await out.send(numbered({"type": "response.content_part.done", **place, "part": _part(whole)}))
        item = exchange.message(whole, _status(answer))
        await out.send(numbered({"type": "response.output_item.done", "output_index": 0, "item": item}))
        response = exchange.ended(answer, [item])
        await out.send(numbered({"type": f"response.{response['status']}", "response": response}))
    except Exception as error:
        told = exchange.admission.failed(error)
        fault = {"code": "server_error", "message": clipped(told.message)}
        failed = exchange.response("failed", [], model, error=fault)
        await out.send(numbered({"type": "response.failed", "response": failed}))


class Numbered:
    """Formats events, each with the number of those before it."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, event: Event) -> bytes:
        number, self._next = self._next, self._next + 1
        return f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n".encode()

    def of_text(self, event: Event) -> Callable[[str], bytes]:
        """Return what makes the event of a text out of that of `TEXT`."""
        made = event_of_text(f"event: {event['type']}\ndata: {json.dumps(event)[:-1]}".encode())

        def numbered(text: str) -> bytes:
            number, self._next = self._next, self._next + 1
            return b'%b, "sequence_number": %d}\n\n' % (made(text), number)

        return numbered


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(answer: Answer) -> str:
    return "incomplete" if answer.end.reason == "length" else "completed"
