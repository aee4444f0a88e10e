"""Content blocks, messages and tools of a Messages API request (turns.py makes the prompt of them)."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from warmkv.platform.gateway.apis.errors import clipped
from warmkv.platform.gateway.apis.schema import Body, Items, text_only

NAME = r"^[a-zA-Z0-9_-]{1,128}$"


class CacheControl(Body):
    type: Literal["ephemeral"]
    ttl: str | None = None


class Markable(Body):
    """A part of a request that may be marked with cache_control."""

    cache_control: CacheControl | None = None

    def ttl(self, default: str) -> str | None:
        """Return the TTL name of the mark, None if there is none."""
        return (self.cache_control.ttl or default) if self.cache_control else None


class Unmarkable(Body):
    """A part that may not; `kind` is what a refusal calls it."""

    kind: ClassVar[str]
    cache_control: None = None

    @field_validator("cache_control", mode="before")
    @classmethod
    def _no_mark(cls, value: Any) -> None:
        if value is not None:
            raise ValueError(f"cannot be set for {cls.kind}")


class TextBlock(Markable):
    type: Literal["text"]
    text: str
    citations: None = None  # an answer of ours may be sent back as the SDK holds it

    @model_validator(mode="after")
    def _empty_text_is_not_marked(self) -> TextBlock:
        if self.cache_control and not self.text:
            raise ValueError("cache_control cannot be set for empty text blocks")
        return self


class SubText(Unmarkable):
    """Text within a tool result or a document."""

    kind = "content within a block; mark the block itself"
    type: Literal["text"]
    text: str
    citations: None = None


class ImageBlock(Body):
    """Of whatever kind: refused by name."""

    model_config = ConfigDict(extra="allow")
    type: Literal["image"]

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        raise ValueError(text_only("images"))


SubContent = Annotated[SubText | ImageBlock, Field(discriminator="type")]


class ToolReference(Unmarkable):
    """A tool that a search of the client has found: its definition is shown in place of this."""

    kind = "content within a block; mark the block itself"
    type: Literal["tool_reference"]
    tool_name: str = Field(pattern=NAME)


ResultContent = Annotated[SubText | ImageBlock | ToolReference, Field(discriminator="type")]


class PlainSource(Body):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(Body):
    type: Literal["content"]
    content: str | Items[SubContent]


class DocumentBlock(Markable):
    """Hold a plain-text document; its title and what is said about it come before its text."""

    unsupported = MappingProxyType({"citations": ({}, {"enabled": False})})

    type: Literal["document"]
    source: Annotated[PlainSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    @field_validator("source", mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind in ("base64", "url", "file"):
            raise ValueError(text_only("files" if kind == "file" else "PDF documents"))
        return value

    @property
    def text(self) -> str:
        data = self.source.data if isinstance(self.source, PlainSource) else self._contents(self.source.content)
        return "\n".join((*filter(None, (self.title, self.context)), data))

    @staticmethod
    def _contents(content: str | list[SubContent]) -> str:
        if isinstance(content, str):
            return content
        return "\n".join(part.text for part in content if isinstance(part, SubText))

    @model_validator(mode="after")
    def _empty_text_is_not_marked(self) -> DocumentBlock:
        if self.cache_control and not self.text:
            raise ValueError("cache_control cannot be set for empty text blocks")
        return self


class ThinkingBlock(Unmarkable):
    kind = "thinking blocks"
    type: Literal["thinking"]
    thinking: str
    signature: str


class RedactedThinkingBlock(Unmarkable):
    kind = "thinking blocks"
    type: Literal["redacted_thinking"]
    data: str


class DirectCaller(Body):
    type: Literal["direct"]


class ToolUseBlock(Markable):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(pattern=NAME)
    input: dict[str, Any]
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultBlock(Markable):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: str | Items[ResultContent] = ""
    is_error: bool = False
    toolset_name: None = None


UserContent = Annotated[TextBlock | DocumentBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantContent = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]


class UserMessage(Body):
    role: Literal["user"]
    content: str | Items[UserContent]


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: str | Items[AssistantContent]


class SystemMessage(Body):
    """Instructions within the conversation."""

    role: Literal["system"]
    content: str | Items[TextBlock]


AnyMessage = UserMessage | AssistantMessage | SystemMessage
Message = Annotated[AnyMessage, Field(discriminator="role")]


class InputSchema(Body):
    model_config = ConfigDict(extra="allow")
    type: Literal["object"]


SERVER_TOOLS = ("advisor_", "code_execution_", "mcp_toolset", "tool_search_tool_", "web_fetch_", "web_search_")


class Tool(Markable):
    """Describe a tool in the client's own words. Those that Anthropic describes, or runs, are refused by their type.

    With `defer_loading` the model does not see it before a result refers to it. The input of calls of a `strict` one
    satisfies its schema.
    """

    ignored = frozenset(("eager_input_streaming",))  # the input of a call is streamed as it is written anyway
    unsupported = MappingProxyType({"input_examples": ([],), "allowed_callers": (["direct"],)})

    type: Literal["custom"] | None = None
    name: str = Field(pattern=NAME)
    description: str | None = None
    input_schema: InputSchema
    defer_loading: bool = False
    strict: bool = False

    @property
    def definition(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates take."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.input_schema.model_dump()}
        return {"type": "function", "function": function}

    @model_validator(mode="before")
    @classmethod
    def _described_by_the_client(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind in (None, "custom"):
            return value
        named = clipped(str(kind), 100)
        if named.startswith(SERVER_TOOLS):
            raise ValueError(f"{named}: this server runs no tools; the client must run its own")
        raise ValueError(f"{named}: this server knows no such tool; describe it with a name and an input_schema")

    @model_validator(mode="after")
    def _deferred_tools_are_not_marked(self) -> Tool:
        if self.defer_loading and self.cache_control:
            raise ValueError("cache_control cannot be set for a tool with defer_loading, which is not in the prompt")
        return self


class ToolChoice(Body):
    """The model is free to call tools or not, is not to, must call some, or must call the one of a `name`."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name: goes with type 'tool', which needs it")
        return self
