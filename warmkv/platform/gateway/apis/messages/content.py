"""Content of a Messages API request: its blocks and tools, and how they become the turns of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from warmkv.platform.gateway.apis.errors import invalid
from warmkv.platform.gateway.apis.prompt import ContentBlock, Turn
from warmkv.platform.gateway.apis.schema import Body, Items

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
        raise ValueError("this server's model takes text only, no images")


SubContent = Annotated[SubText | ImageBlock, Field(discriminator="type")]


class PlainSource(Body):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(Body):
    type: Literal["content"]
    content: str | Items[SubContent]


class DocumentBlock(Markable):
    """A plain-text document; its title comes before its text."""

    type: Literal["document"]
    source: Annotated[PlainSource | ContentSource, Field(discriminator="type")]
    title: str | None = None

    @property
    def text(self) -> str:
        data = self.source.data if isinstance(self.source, PlainSource) else _joined(self.source.content)
        return f"{self.title}\n{data}" if self.title else data

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
    content: str | Items[SubContent] = ""
    is_error: bool = False
    toolset_name: None = None

    @property
    def text(self) -> str:
        text = _joined(self.content)
        return f"Error: {text}" if self.is_error else text


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


Message = Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]


class InputSchema(Body):
    model_config = ConfigDict(extra="allow")
    type: Literal["object"]


class Tool(Markable):
    """A tool of the client. Tools that would run on the server are refused by their type."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=NAME)
    description: str | None = None
    input_schema: InputSchema

    @property
    def definition(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates take."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.input_schema.model_dump()}
        return {"type": "function", "function": function}


class ToolChoice(Body):
    """The model is free to call tools or not, or is not to; it cannot be made to.

    No answer calls tools in parallel, so that it must not is always kept.
    """

    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool = False

    @field_validator("type", mode="before")
    @classmethod
    def _no_force(cls, value: Any) -> Any:
        if value in ("any", "tool"):
            raise ValueError(f"{value!r} needs a model that can be made to call a tool; this server has auto and none")
        return value


def turns(
    tools: Sequence[Tool],
    system: str | Sequence[TextBlock] | None,
    messages: Sequence[UserMessage | AssistantMessage],
    default_ttl: str,
) -> list[Turn]:
    """Return the conversation in the order of its prefixes: tools, system, messages. Raises ApiError (400).

    Thinking blocks of earlier answers are left out of the prompt. A user's tool results become turns of their own.
    """
    _check_results(messages)
    found = []
    if tools:
        blocks = (ContentBlock.of_value(tool.definition, tool.ttl(default_ttl)) for tool in tools)
        found.append(Turn("tools", tuple(blocks)))
    if system:
        found.append(Turn("system", _texts(system, default_ttl)))
    for message in messages:
        if isinstance(message, UserMessage):
            found += _user_turns(message, default_ttl)
        else:
            found.append(Turn("assistant", _said(message, default_ttl)))
    return found


def mark_last(turns: Sequence[Turn], ttl: str) -> list[Turn]:
    """Mark the last block that can be marked, as top-level cache_control does. Raises ApiError (400)."""
    for number in reversed(range(len(turns))):
        turn = turns[number]
        for place in reversed(range(len(turn.blocks))):
            block = turn.blocks[place]
            if not block.text and turn.role != "tool":
                continue
            if block.ttl not in (None, ttl):
                raise invalid(f"cache_control: the last block is marked with ttl {block.ttl!r} already")
            blocks = (*turn.blocks[:place], replace(block, ttl=ttl), *turn.blocks[place + 1 :])
            return [*turns[:number], Turn(turn.role, blocks), *turns[number + 1 :]]
    return list(turns)


def _user_turns(message: UserMessage, default_ttl: str) -> Iterator[Turn]:
    if isinstance(message.content, str):
        yield Turn("user", (ContentBlock(message.content),))
        return
    results = [block for block in message.content if isinstance(block, ToolResultBlock)]
    if results != message.content[: len(results)]:
        raise invalid("content: tool_result blocks must come before other content")
    for result in results:
        yield Turn("tool", (ContentBlock(result.text, result.ttl(default_ttl)),))
    rest = [block for block in message.content[len(results) :] if isinstance(block, TextBlock | DocumentBlock)]
    if rest or not results:
        yield Turn("user", _texts(rest, default_ttl))


def _said(message: AssistantMessage, default_ttl: str) -> tuple[ContentBlock, ...]:
    if isinstance(message.content, str):
        return (ContentBlock(message.content),)
    blocks = []
    for block in message.content:
        if isinstance(block, TextBlock):
            blocks.append(ContentBlock(block.text, block.ttl(default_ttl)))
        elif isinstance(block, ToolUseBlock):
            blocks.append(ContentBlock.of_value(block.input, block.ttl(default_ttl), block.name))
    return _at_least_one(blocks)


def _texts(content: str | Sequence[TextBlock | DocumentBlock], default_ttl: str) -> tuple[ContentBlock, ...]:
    if isinstance(content, str):
        return (ContentBlock(content),)
    return _at_least_one([ContentBlock(block.text, block.ttl(default_ttl)) for block in content])


def _at_least_one(blocks: Sequence[ContentBlock]) -> tuple[ContentBlock, ...]:
    if not blocks:
        raise invalid("content: a message needs at least one content block, thinking aside")
    return tuple(blocks)


def _joined(content: str | Sequence[SubText | ImageBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, SubText))


def _check_results(messages: Sequence[UserMessage | AssistantMessage]) -> None:
    """Check that every call has its result in the next message, and every result its call in the one before."""
    called: dict[str, None] = {}  # in order
    for message in messages:
        content = [] if isinstance(message.content, str) else message.content
        named = [block.tool_use_id for block in content if isinstance(block, ToolResultBlock)]
        results = dict.fromkeys(named)
        if missing := next((name for name in called if name not in results), None):
            raise invalid(f"tool_use {missing!r}: the next message has no tool_result for it")
        if foreign := next((name for name in results if name not in called), None):
            raise invalid(f"tool_result {foreign!r}: the message before has no tool_use of that id")
        if len(results) < len(named):
            raise invalid("tool_result: two results for one tool_use")
        calls = [block.id for block in content if isinstance(block, ToolUseBlock)]
        called = dict.fromkeys(calls)
        if len(called) < len(calls):
            raise invalid("tool_use: ids must be unique")
    if called:
        raise invalid(f"tool_use {next(iter(called))!r}: the next message has no tool_result for it")
