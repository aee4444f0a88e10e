"""Answers of the Responses API: whole, and as events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from warmkv.platform.gateway.admission import SubmittedRequest
from warmkv.platform.gateway.apis.answer import TEXT, Answer, event_of_text
from warmkv.platform.gateway.apis.chat_parsing.parts import Part, Text, ToolCall
from warmkv.platform.gateway.apis.errors import clipped
from warmkv.platform.gateway.apis.openai.logprobs import of_chat
from warmkv.platform.gateway.apis.responses.requests import ResponsesRequest
from warmkv.platform.gateway.apis.responses.store import Item, ResponseStore, StoredResponse
from warmkv.platform.gateway.apis.responses.tools import names_in_namespaces
from warmkv.platform.gateway.apis.schema import ParsedRequest
from warmkv.platform.gateway.streams import EventWriter
from warmkv.replicas.protocol import TokenLogprobs

Event = dict[str, Any]
T = TypeVar("T")


class Exchange:
    """A request of the Responses API and its answer, which is stored for its tenant when it has ended.

    `items` is JSON of what the request adds to the conversation.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        items: bytes,
        asked: ParsedRequest,
        admission: SubmittedRequest,
        store: ResponseStore,
        tenant: bytes,
        created: float,
        decode: Callable[[int], str],
    ) -> None:
        self.decode = decode  # a token to its text
        self.body, self._items, self.asked, self.admission = body, items, asked, admission
        self._store, self._tenant, self._created = store, tenant, created
        self.name = admission.id.removeprefix("req_")

    def response(self, status: str, output: list[Item], model: str, **more: Any) -> bytes:
        """Return JSON of the object that stands for the answer, with what was asked."""
        body = self.body
        response = {
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
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            **more,
        }
        return json.dumps(response).encode()

    def logprobs(self, answer: Answer) -> TextLogprobs | None:
        """Return the log-probabilities of an answer's text; None where they are not asked for."""
        return TextLogprobs(answer.take_logprobs, self.decode) if self.body.includes_logprobs else None

    async def beside(self, made: Callable[[], T]) -> T:
        """Return what `made` makes of the whole answer: beside the event loop if it has log-probabilities."""
        return await asyncio.to_thread(made) if self.asked.tells_logprobs else made()

    def ended(self, answer: Answer, output: list[Item]) -> bytes:
        """Return the response with its usage."""
        cut = answer.end.reason == "length"
        usage = answer.usage
        told = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": answer.started.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.output,
            "output_tokens_details": {"reasoning_tokens": answer.thinking_tokens},
            "total_tokens": usage.prompt + usage.output,
            "warmkv": answer.details(),
        }
        details = {"reason": "max_output_tokens"} if cut else None
        return self.response(_status(answer), output, answer.model, usage=told, incomplete_details=details)

    def keep(self, response: bytes) -> None:
        """Store the response where that is asked for. In the event loop, as all that reads the store."""
        if self.body.store:
            name, previous = f"resp_{self.name}", self.body.previous_response_id
            self._store.keep(self._tenant, StoredResponse(name, response, self._items, previous))


async def respond(exchange: Exchange) -> bytes:
    """Return the whole answer as JSON. Raises ApiError."""
    answer = await exchange.admission.begin()
    output = ResponseOutput(exchange.name, Numbered(), exchange.body.tools, exchange.logprobs(answer))
    parts = await answer.parts()

    def made() -> bytes:
        output.events(parts)
        output.end(_status(answer))
        return exchange.ended(answer, output.items)

    response = await exchange.beside(made)
    exchange.keep(response)
    return response


async def stream(exchange: Exchange, model: str, out: EventWriter) -> None:
    """Write the answer as server-sent events. A fault after admission is the event `response.failed`."""
    numbered = Numbered()
    try:
        answer = await exchange.admission.begin()
        output = ResponseOutput(exchange.name, numbered, exchange.body.tools, exchange.logprobs(answer))
        begun = exchange.response("in_progress", [], model)
        await out.send(numbered.of_response("created", begun))
        await out.send(numbered.of_response("in_progress", begun))
        if answer.expected is None:
            await answer.write(out, lambda text: output.events([Text(text)]))
        else:
            await answer.write_parts(out, output.events)

        def ended() -> tuple[bytes, bytes]:
            ending, response = output.end(_status(answer)), exchange.ended(answer, output.items)
            return ending + numbered.of_response(_status(answer), response), response

        written, response = await exchange.beside(ended)
        exchange.keep(response)
        out.hold(written)
    except Exception as error:
        told = exchange.admission.report(error)
        fault = {"code": "server_error", "message": clipped(told.message)}
        out.hold(numbered.of_response("failed", exchange.response("failed", [], model, error=fault)))


class ResponseOutput:
    """The items that an answer is made of: its message, what it thought before, and calls; and their events."""

    def __init__(
        self,
        name: str,
        numbered: Numbered,
        tools: Iterable[dict[str, Any]] = (),
        logprobs: TextLogprobs | None = None,
    ) -> None:
        self.items: list[Item] = []  # those that have ended
        self._logprobs, self._told = logprobs, list[dict[str, Any]]()  # those of the item that goes on
        self._name, self._numbered = name, numbered
        self._names = names_in_namespaces(tools)
        self._kind: type[Part] | None = None  # of the item that goes on
        self._texts: list[str] = []
        self._delta: Callable[[str], bytes] = str.encode

    def events(self, parts: Iterable[Part]) -> bytes:
        """Take parts of the answer, and return their events."""
        return b"".join(map(self._events, parts))

    def end(self, status: str) -> bytes:
        """End the answer with an item at least, and return the events."""
        empty = b"" if self.items or self._kind else self._begin(Text)
        return empty + self._end(status)

    def _events(self, part: Part) -> bytes:
        if isinstance(part, ToolCall):
            return self._end("completed") + self._call(part)
        before = b"" if self._kind is type(part) else self._end("completed") + self._begin(type(part))
        self._texts.append(part.text)
        if self._logprobs is None:
            return before + self._delta(part.text)
        logprobs = self._logprobs.of(part.text)
        delta = {"type": f"response.{self._event}.delta", **self._place, "delta": part.text}
        if self._kind is Text:
            self._told += logprobs
            delta["logprobs"] = logprobs
        return before + self._numbered(delta)

    def _begin(self, kind: type[Part]) -> bytes:
        self._kind, self._texts, self._told = kind, [], []
        added = {"type": "response.output_item.added", "output_index": len(self.items)}
        begun = {"type": "response.content_part.added", **self._place, "part": self._part("")}
        delta = {"type": f"response.{self._event}.delta", **self._place, "delta": TEXT}
        self._delta = self._numbered.of_text(delta | ({"logprobs": []} if kind is Text else {}))
        return self._numbered({**added, "item": self._item("in_progress", [])}) + self._numbered(begun)

    def _end(self, status: str) -> bytes:
        if self._kind is None:
            return b""
        text = "".join(self._texts)
        done = {"type": f"response.{self._event}.done", **self._place, "text": text}
        done |= {"logprobs": self._told} if self._kind is Text else {}
        part, item = self._part(text), self._item(status, [self._part(text)])
        events = [done, {"type": "response.content_part.done", **self._place, "part": part}]
        events.append({"type": "response.output_item.done", "output_index": len(self.items), "item": item})
        self.items.append(item)
        self._kind = None
        return b"".join(map(self._numbered, events))

    def _call(self, call: ToolCall) -> bytes:
        index = len(self.items)
        name = f"{self._name}_{index}"
        named = self._names.get(call.name, {"name": call.name})
        head = {"id": f"fc_{name}", "type": "function_call", "call_id": f"call_{name}", **named}
        item = {**head, "arguments": call.arguments, "status": "completed"}
        place = {"item_id": item["id"], "output_index": index}
        begun = {**head, "arguments": "", "status": "in_progress"}
        arguments = "response.function_call_arguments"
        self.items.append(item)
        return b"".join(
            map(
                self._numbered,
                (
                    {"type": "response.output_item.added", "output_index": index, "item": begun},
                    {"type": f"{arguments}.delta", **place, "delta": call.arguments},
                    {"type": f"{arguments}.done", **place, "name": named["name"], "arguments": call.arguments},
                    {"type": "response.output_item.done", "output_index": index, "item": item},
                ),
            )
        )

    @property
    def _event(self) -> str:
        return "output_text" if self._kind is Text else "reasoning_text"

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item("", [])["id"], "output_index": len(self.items), "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind is Text:
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._told}
        return {"type": "reasoning_text", "text": text}

    def _item(self, status: str, content: list[dict[str, Any]]) -> Item:
        name = f"{self._name}_{len(self.items)}"
        if self._kind is Text:
            return {"id": f"msg_{name}", "type": "message", "status": status, "role": "assistant", "content": content}
        return {"id": f"rs_{name}", "type": "reasoning", "status": status, "summary": [], "content": content}


class TextLogprobs:
    """The log-probabilities of the tokens of an answer's parts, which are told in their order.

    `take` returns those that came since the last call, `decode` the text of a token.
    """

    def __init__(self, take: Callable[[], list[TokenLogprobs]], decode: Callable[[int], str]) -> None:
        self._take, self._decode = take, decode
        self._rest: list[tuple[str, TokenLogprobs]] = []

    def of(self, text: str) -> list[dict[str, Any]]:
        """Return those of a text, without what stood before it, such as a call; all if it is not found as it is."""
        self._rest += [(self._decode(one.token), one) for one in self._take()]
        joined = "".join(piece for piece, _ in self._rest)
        begin = max(0, joined.find(text))
        end = begin + len(text) if text in joined else len(joined)
        found, rest, at = list[TokenLogprobs](), list[tuple[str, TokenLogprobs]](), 0
        for piece, one in self._rest:
            if at >= end:
                rest.append((piece, one))
            elif at + len(piece) > begin or not piece:
                found.append(one)
            at += len(piece)
        self._rest = rest
        told: list[dict[str, Any]] = of_chat(found, self._decode)["content"]
        return told


class Numbered:
    """Formats events, each with the number of those before it."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, event: Event) -> bytes:
        number, self._next = self._next, self._next + 1
        return f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n".encode()

    def of_response(self, status: str, response: bytes) -> bytes:
        """Return the event that a response has a status; the response is JSON."""
        number, self._next = self._next, self._next + 1
        kind = f"response.{status}".encode()
        return b'event: %b\ndata: {"type": "%b", "response": %b, "sequence_number": %d}\n\n' % (
            *(kind, kind, response, number),
        )

    def of_text(self, event: Event) -> Callable[[str], bytes]:
        """Return what makes the event of a text out of that of `TEXT`."""
        made = event_of_text(f"event: {event['type']}\ndata: {json.dumps(event)[:-1]}".encode())

        def numbered(text: str) -> bytes:
            number, self._next = self._next, self._next + 1
            return b'%b, "sequence_number": %d}\n\n' % (made(text), number)

        return numbered


def _status(answer: Answer) -> str:
    return "incomplete" if answer.end.reason == "length" else "completed"
