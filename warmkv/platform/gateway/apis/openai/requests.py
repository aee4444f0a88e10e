"""Requests of the OpenAI-compatible API, chat and plain completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from warmkv.platform.gateway.apis.errors import invalid
from warmkv.platform.gateway.apis.openai import chat
from warmkv.platform.gateway.apis.openai.chat import ChatMessage, ChatTool
from warmkv.platform.gateway.apis.prompt import Turn
from warmkv.platform.gateway.apis.schema import Body, Items, WarmkvOptions
from warmkv.replicas.protocol import SamplingParams


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
    tools: Items[ChatTool] = Field([])
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: names must be unique")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(CompletionBody):
    """Body of /v1/completions."""

    prompt: str = Field(min_length=1)


def turns(body: ChatRequest) -> list[Turn]:
    """Return the conversation. Raises ApiError (400)."""
    return chat.turns(body.messages, body.tools)
