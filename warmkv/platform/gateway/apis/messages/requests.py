"""Requests of the Anthropic Messages API, and the turns of their prompts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from warmkv.config import PrefixCacheConfig
from warmkv.platform.gateway.apis.errors import invalid
from warmkv.platform.gateway.apis.messages import content
from warmkv.platform.gateway.apis.messages.content import CacheControl, Message, TextBlock, Tool, ToolChoice
from warmkv.platform.gateway.apis.prompt import Turn
from warmkv.platform.gateway.apis.schema import Body, Items, WarmkvOptions
from warmkv.prefixes import breakpoints
from warmkv.replicas.protocol import SamplingParams

VERSIONS = ("2023-01-01", "2023-06-01", "2026-10-21")


class NoThinking(Body):
    """Models here do not think before they answer, so this is the only value."""

    type: Literal["disabled"]


class CountRequest(Body):
    """Body of /v1/messages/count_tokens: what of a request makes its prompt."""

    model: str
    messages: Items[Message] = Field(min_length=1)
    system: str | Items[TextBlock] | None = None
    tools: Items[Tool] = Field([])
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = None
    thinking: NoThinking | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> CountRequest:
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: names must be unique")
        if self.tool_choice is not None and not self.tools:
            raise ValueError("tool_choice: only allowed with tools")
        return self


class MessagesRequest(CountRequest):
    """Body of /v1/messages."""

    max_tokens: int = Field(ge=0)
    temperature: float = Field(1.0, ge=0, le=1)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    stop_sequences: Items[Annotated[str, Field(min_length=1)]] = Field([], max_length=16)
    stream: bool = False
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    warmkv: WarmkvOptions = WarmkvOptions()

    def sampling(self, seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=seed,
            stop=tuple(self.stop_sequences),
            ignore_eos=self.warmkv.ignore_eos,
        )


def turns(body: CountRequest, cache: PrefixCacheConfig) -> list[Turn]:
    """Return the conversation as the turns of a prompt, with the TTL of every mark.

    Raises ApiError (400), also for marks that the contract refuses.
    """
    found = content.turns(body.tools, body.system, body.messages, cache.default_ttl)
    if body.cache_control is not None:
        found = content.mark_last(found, body.cache_control.ttl or cache.default_ttl)
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
