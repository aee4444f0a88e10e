"""The OpenAI-compatible API: chat and plain completions."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, model_validator

from warmkv.platform.gateway.admission import SubmittedRequest
from warmkv.platform.gateway.apis.answer import TEXT, Answer, event_of_text
from warmkv.platform.gateway.apis.errors import invalid, openai_body
from warmkv.platform.gateway.apis.prompt import ContentBlock, Turn
from warmkv.platform.gateway.apis.schema import Body, Items, WarmkvOptions
from warmkv.platform.gateway.streams import EventWriter
from warmkv.prefixes.usage import Usage
from warmkv.replicas.protocol import FinishReason, SamplingParams

FINISH_REASONS: dict[FinishReason, str] = {"end": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[TextPart]
    name: str | None = None
    # An answer of ours may be sent back as it came: these are what the SDK adds to it.
    refusal: None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None
    tool_calls: list[Any] | None = Field(None, max_length=0)


class StreamOptions(Body):
    include_usage: bool = False


class TextFormat(Body):
    type: Literal["text"]


class CompletionBody(Body):
    """What both endpoints take; null is the same as leaving a field out.

    Settings that warmkv does not have are accepted at the value at which they do nothing, and refused otherwise.
    """

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Items[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    warmkv: WarmkvOptions = WarmkvOptions()
    # Neutral values only.
    n: Literal[1] = 1
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    suffix: None = None
    store: Literal[False] = False
    frequency_penalty: float = Field(0.0, ge=0, le=0)
    presence_penalty: float = Field(0.0, ge=0, le=0)
    logit_bias: dict[str, Any] = Field({}, max_length=0)
    tools: list[Any] = Field([], max_length=0)
    response_format: TextFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> CompletionBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        return self

    def sampling(self, seed: int, default_tokens: int) -> SamplingParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > 16:
            raise invalid("stop: at most 16 sequences")
        return SamplingParams(
            max_tokens=self.token_limit or default_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=(seed if self.seed is None else self.seed) % 2**63,
            stop=tuple(stop),
            ignore_eos=self.warmkv.ignore_eos,
        )

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens


class ChatRequest(CompletionBody):
    """Body of /v1/chat/completions."""

    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Literal[False] = False

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(CompletionBody):
    """Body of /v1/completions."""

    prompt: str = Field(min_length=1)


def turns(body: ChatRequest) -> list[Turn]:
    """Return the conversation; `developer` is another name of `system`."""
    found = []
    for message in body.messages:
        parts = [message.content] if isinstance(message.content, str) else [part.text for part in message.content]
        if not parts:
            raise invalid("messages: a message needs content")
        role = "system" if message.role == "developer" else message.role
        found.append(Turn(role, tuple(ContentBlock(text) for text in parts)))
    return found


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
