"""Requests of the OpenAI-compatible API, chat and plain completions, and the turns of their prompts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from warmkv.platform.gateway.apis.errors import invalid
from warmkv.platform.gateway.apis.prompt import ContentBlock, Turn
from warmkv.platform.gateway.apis.schema import Body, Items, WarmkvOptions
from warmkv.replicas.protocol import SamplingParams


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
