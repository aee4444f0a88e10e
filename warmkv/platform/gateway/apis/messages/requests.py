"""Requests of the Anthropic Messages API, and the turns of their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from warmkv.config import PrefixCacheConfig
from warmkv.platform.gateway.apis.errors import ApiError, invalid
from warmkv.platform.gateway.apis.messages.content import (
    AnyMessage,
    CacheControl,
    Message,
    TextBlock,
    Tool,
    ToolChoice,
)
from warmkv.platform.gateway.apis.messages.context_edits import ContextManagement
from warmkv.platform.gateway.apis.messages.turns import MessageReading, mark_last
from warmkv.platform.gateway.apis.schema import Body, Items, WarmkvOptions
from warmkv.platform.gateway.apis.structured import OutputFormat, Wanted
from warmkv.platform.gateway.apis.turns import Turn
from warmkv.prefixes import breakpoints
from warmkv.replicas.protocol import MOST_TOP_K, SamplingParams

VERSIONS = ("2023-01-01", "2023-06-01", "2026-10-21")


class ThinkingConfig(Body):
    """What of thinking the request wants; `adaptive` and `between_tools` are `enabled` where a template knows no more.

    What is thought counts towards max_tokens. `block_binding` is taken and changes nothing.
    """

    type: Literal["disabled", "enabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1024)
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> ThinkingConfig:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ValueError("budget_tokens: goes with type 'enabled', which needs it")
        return self

    @property
    def enabled(self) -> bool:
        return self.type != "disabled"


class OutputConfig(Body):
    unsupported = MappingProxyType({"task_budget": ()})

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


EFFORTS = {"xhigh": "high", "max": "high"}  # templates know low, medium and high


class CountRequest(Body):
    """Body of /v1/messages/count_tokens: what of a request makes its prompt."""

    unsupported = MappingProxyType({"compaction": ()})

    model: str
    messages: Items[Message] = Field(min_length=1)
    system: str | Items[TextBlock] | None = None
    tools: Items[Tool] = Field([])
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    context_management: ContextManagement | None = None

    @model_validator(mode="after")
    def _one_format(self) -> CountRequest:
        given = self.output_config.format if self.output_config is not None else None
        if given is not None and self.output_format not in (None, given):
            raise ValueError("output_format: differs from output_config.format, whose older name it is; give one")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> CountRequest:
        first: dict[str, int] = {}
        for number, tool in enumerate(self.tools):
            if (other := first.setdefault(tool.name, number)) != number:
                raise ValueError(
                    f"tools.{number}.name: {tool.name!r} is the name of tool {other}; names must be unique"
                )
        if self.tool_choice is not None and not self.tools:
            raise ValueError("tool_choice: only allowed with tools")
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return what chat templates call thinking and effort, for those that take it."""
        found: dict[str, Any] = {}
        if self.thinking is not None:
            found |= {"enable_thinking": self.thinking.enabled, "thinking": self.thinking.enabled}
        if self.output_config is not None and self.output_config.effort is not None:
            found["reasoning_effort"] = EFFORTS.get(self.output_config.effort, self.output_config.effort)
        return found


class MessagesRequest(CountRequest):
    """Body of /v1/messages."""

    ignored = frozenset(("inference_geo", "speed", "user_profile_id", "workspace_id"))
    unsupported = MappingProxyType({**CountRequest.unsupported, "container": (), "mcp_servers": ([],)})

    max_tokens: int = Field(ge=0)
    temperature: float = Field(1.0, ge=0, le=1)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    stop_sequences: Items[Annotated[str, Field(min_length=1)]] = Field([], max_length=16)
    stream: bool = False
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    thread: dict[str, Any] | None = None  # a conversation that the server is to hold
    ignore_eos: bool = False  # by vLLM's name, for benchmarks
    warmkv: WarmkvOptions = Field(default_factory=WarmkvOptions)  # a default that is a model would be copied

    @model_validator(mode="after")
    def _thinking_leaves_room(self) -> MessagesRequest:
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and 0 < self.max_tokens <= budget:
            raise ValueError(f"thinking.budget_tokens: {budget} must be less than max_tokens")
        return self

    @property
    def options(self) -> WarmkvOptions:
        """Return warmkv's own options; `ignore_eos` is a right of a tenant under either name."""
        return self.warmkv.model_copy(update={"ignore_eos": True}) if self.ignore_eos else self.warmkv

    @property
    def wanted(self) -> Wanted | None:
        """Return the constraint of the answer."""
        if self.output_config is not None and (format_ := self.output_config.format) is not None:
            return format_.wanted("output_config.format")
        return self.output_format.wanted("output_format") if self.output_format is not None else None

    def sampling(self, seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=min(self.top_k, MOST_TOP_K),
            seed=seed,
            stop=tuple(self.stop_sequences),
            ignore_eos=self.options.ignore_eos,
        )


def check_thread(body: MessagesRequest) -> None:
    """Refuse to hold a conversation. Raises ApiError (400), with details at which the SDK sends all of it."""
    if body.thread is not None:
        raise ApiError(
            "invalid_request_error",
            "thread: this server holds no conversations; send all messages",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )


def turns(
    body: CountRequest, messages: Sequence[AnyMessage], cache: PrefixCacheConfig, reading: MessageReading
) -> list[Turn]:
    """Return the conversation as the turns of a prompt, with the TTL of every mark; `messages` are those of the body.

    Raises ApiError (400), also for marks that the contract refuses.
    """
    found = reading.turns(body.tools, body.system, messages)
    if body.cache_control is not None:
        found = mark_last(found, body.cache_control.ttl or cache.default_ttl)
    try:
        breakpoints.check_marks(
            [block.ttl for turn in found for block in turn.blocks], cache.ttls, cache.max_breakpoints
        )
    except breakpoints.BreakpointError as error:
        raise invalid(str(error)) from None
    return found


def check_version(version: str | None) -> None:
    """Raise ApiError (400) for an anthropic-version that is not known; none at all is fine."""
    if version is not None and version not in VERSIONS:
        raise invalid(f"anthropic-version: {version!r} is not one of {', '.join(VERSIONS)}")
