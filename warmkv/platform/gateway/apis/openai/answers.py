"""Answers and stream events of the OpenAI-compatible API: chat and plain completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from warmkv.platform.gateway.apis.answer import TEXT, Answer, event_of_text
from warmkv.platform.gateway.apis.chat_parsing.parts import Part, Text, Thinking, ToolCall
from warmkv.platform.gateway.apis.errors import openai_body
from warmkv.platform.gateway.apis.openai import logprobs
from warmkv.platform.gateway.apis.openai.choices import Choices
from warmkv.platform.gateway.apis.schema import ParsedRequest
from warmkv.platform.gateway.streams import EventWriter
from warmkv.prefixes.usage import Usage
from warmkv.replicas.protocol import FinishReason, TokenLogprobs

FINISH_REASONS: dict[FinishReason, str] = {"end": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}


def usage_fields(usage: Usage, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def respond(choices: Choices) -> dict[str, Any]:
    """Return all answers as one completion. Raises ApiError."""
    found: dict[int, dict[str, Any]] = {}

    async def take(index: int, answer: Answer, asked: ParsedRequest) -> None:
        deltas, told = _Deltas(answer), _Logprobs(choices, index, asked)
        body: dict[str, Any]
        if choices.chat and answer.expected is not None:
            body = {"message": deltas.whole(await answer.parts())}
        else:
            text = asked.echo + await answer.text()
            body = {"message": {"role": "assistant", "content": text}} if choices.chat else {"text": text}
        reason = deltas.finish_reason()
        found[index] = {"index": index, **body, "finish_reason": reason, **(await told.fields())}

    await choices.run(take)
    listed = [found[index] for index in sorted(found)]
    body = {**_head(choices, chunk=False), "choices": listed, "usage": _usage(choices)}
    if choices.chat and choices.asked.prompt_logprobs is not None:  # which vLLM has beside the messages
        told = [choice.pop("prompt_logprobs") for choice in listed]
        body["prompt_logprobs"] = told[0]
    return body


async def stream(choices: Choices, out: EventWriter) -> None:
    """Write the answers as server-sent events, ended by [DONE]. A fault after admission is an `error` object."""
    head = _head(choices, chunk=True)
    is_alone = len(choices.prompts) * choices.asked.n == 1

    async def take(index: int, answer: Answer, asked: ParsedRequest) -> None:
        told = _Logprobs(choices, index, asked)

        def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
            body = {"delta": delta} if choices.chat else {"text": delta.get("content", "")}
            choice = {"index": index, **body, "finish_reason": reason, "logprobs": told.taken()}
            return _event({**head, "choices": [choice]})

        if choices.chat or asked.echo:
            first = {"role": "assistant", "content": asked.echo}
            has_many = asked.echo and asked.sampling.logprobs is not None  # log-probabilities of the prompt
            await out.send(await asyncio.to_thread(chunk, first) if has_many else chunk(first))
        deltas = _Deltas(answer)
        if answer.expected is not None:
            await answer.write_parts(out, lambda parts: b"".join(map(chunk, deltas.of(parts))))
        elif asked.sampling.logprobs is not None:
            await answer.write(out, lambda text: chunk({"content": text}))
        else:
            await answer.write(out, event_of_text(chunk({"content": TEXT})))
        end = chunk({}, deltas.finish_reason())
        if is_alone:
            out.hold(end)
        else:
            await out.send(end)

    try:
        await choices.run(take)
        if choices.asked.include_usage:
            out.hold(_event({**head, "choices": [], "usage": _usage(choices)}))
        out.hold(b"data: [DONE]\n\n")
    except Exception as error:
        out.hold(_event(openai_body(choices.report(error), choices.id)))


class _Logprobs:
    """The log-probabilities of an answer's tokens, piece by piece; with `echo` those of its prompt come first."""

    def __init__(self, choices: Choices, index: int, asked: ParsedRequest) -> None:
        self._choices, self._index, self._asked, self._offset = choices, index, asked, 0
        self._answer, self._most = choices.answers[index], asked.sampling.logprobs or 0
        self._echoed: list[TokenLogprobs] = []
        self._first: int | None = None  # token of the prompt
        if asked.echo and asked.sampling.logprobs is not None:
            self._first, self._echoed = asked.prompt.tokens[0], choices.prompt_logprobs(index)

    def taken(self) -> dict[str, Any] | None:
        """Return those that came since the last call; None if there are none, or the request wants none."""
        found, first = [*self._echoed, *self._answer.take_logprobs()], self._first
        if not found and first is None:
            return None
        self._echoed, self._first = [], None
        if self._choices.chat:
            return logprobs.of_chat(found, self._choices.decode)
        told, self._offset = logprobs.of_text(found, self._choices.decode, self._most, self._offset, first)
        return told

    async def fields(self) -> dict[str, Any]:
        """Return what a whole answer says of them. They are many, and made beside the event loop."""
        if not self._asked.tells_logprobs:
            return {"logprobs": None}
        fields: dict[str, Any] = {"logprobs": await asyncio.to_thread(self.taken)}
        if (most := self._asked.prompt_logprobs) is not None:
            prompt = self._choices.prompt_logprobs(self._index)
            fields["prompt_logprobs"] = await asyncio.to_thread(logprobs.of_prompt, prompt, self._choices.decode, most)
        return fields


class _Deltas:
    """What parts of an answer add to its message. Texts that something else stands between are lines."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._calls = answer, 0
        self._said = False
        self._last: type[Part] = Text

    def of(self, parts: Iterable[Part]) -> list[dict[str, Any]]:
        """Return the delta of every part."""
        return list(map(self._delta, parts))

    def whole(self, parts: Iterable[Part]) -> dict[str, Any]:
        """Return the message that has all parts."""
        deltas = self.of(parts)
        joined = {
            field: "".join(delta[field] for delta in deltas if field in delta)
            for field in ("content", "reasoning_content")
        }
        calls = [
            {name: value for name, value in call.items() if name != "index"}
            for delta in deltas
            for call in delta.get("tool_calls", ())
        ]
        message: dict[str, Any] = {"role": "assistant", "content": joined["content"] or (None if calls else "")}
        if joined["reasoning_content"]:
            message["reasoning_content"] = joined["reasoning_content"]
        return {**message, "tool_calls": calls} if calls else message

    def finish_reason(self) -> str:
        """Return why the answer ended."""
        return "tool_calls" if self._calls and self._answer.is_complete else FINISH_REASONS[self._answer.end.reason]

    def _delta(self, part: Part) -> dict[str, Any]:
        follows, self._last = self._last is not type(part), type(part)
        match part:
            case Text():
                text = "\n" + part.text if follows and self._said else part.text
                self._said = True
                return {"content": text}
            case Thinking():
                return {"reasoning_content": part.text}
            case ToolCall():
                number, self._calls = self._calls, self._calls + 1
                function = {"name": part.name, "arguments": part.arguments}
                call = {"id": f"call_{self._answer.name}_{number}", "type": "function", "function": function}
                return {"tool_calls": [{"index": number, **call}]}


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def _usage(choices: Choices) -> dict[str, Any]:
    """Return the usage of all answers together. What warmkv adds is the first one's, but for the price."""
    answers = [choices.answers[index] for index in sorted(choices.answers)]
    leaders = answers[:: choices.asked.n]
    usage = Usage(
        input=sum(answer.usage.input for answer in leaders),
        read=sum(answer.usage.read for answer in leaders),
        output=sum(answer.usage.output for answer in answers),
    )
    cached = sum(answer.started.cached_tokens for answer in leaders)
    thinking = {"reasoning_tokens": sum(answer.thinking_tokens for answer in answers)}
    details = {"completion_tokens_details": thinking} if choices.chat else {}
    return {**usage_fields(usage, cached), **details, "warmkv": answers[0].details(usage)}


def _head(choices: Choices, chunk: bool) -> dict[str, Any]:
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if choices.chat else "text_completion"
    name = f"{'chatcmpl' if choices.chat else 'cmpl'}-{choices.id.removeprefix('req_')}"
    return {"id": name, "object": kind, "created": int(choices.arrival.time), "model": choices.model}
