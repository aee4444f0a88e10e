"""`context_management`: what a request has cleared from its own conversation before the prompt is made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from warmkv.platform.gateway.apis.messages.content import (
    AnyMessage,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from warmkv.platform.gateway.apis.schema import Body, Items

CLEARED = "[cleared to save context]"

Tokens = Callable[[Sequence[AnyMessage]], int]
"""Counts the tokens of a prompt with these messages."""


class ThinkingTurns(Body):
    type: Literal["thinking_turns"]
    value: int = Field(ge=1)


class AllThinking(Body):
    type: Literal["all"]


class ClearThinking(Body):
    """Clear the thinking of all but the last answers that have any."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | ThinkingTurns | AllThinking = ThinkingTurns(type="thinking_turns", value=1)

    def apply(self, messages: Sequence[AnyMessage], tokens: Tokens) -> tuple[Sequence[AnyMessage], dict[str, Any]]:
        """Return the messages that are left, and what was cleared; nothing if that is none."""
        if not isinstance(self.keep, ThinkingTurns):
            return messages, {}
        thinking = [number for number, message in enumerate(messages) if _thoughts(message)]
        cleared = set(thinking[: -self.keep.value])
        if not cleared:
            return messages, {}
        left = [_without_thinking(message) if n in cleared else message for n, message in enumerate(messages)]
        return left, {"cleared_thinking_turns": len(cleared), "cleared_input_tokens": tokens(messages) - tokens(left)}


class InputTokens(Body):
    type: Literal["input_tokens"]
    value: int = Field(ge=0)


class ToolUses(Body):
    type: Literal["tool_uses"]
    value: int = Field(ge=0)


class ClearToolUses(Body):
    """Clear the results of all but the last tool calls where a conversation has grown long."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[InputTokens | ToolUses, Field(discriminator="type")] = InputTokens(
        type="input_tokens", value=100_000
    )
    keep: ToolUses = ToolUses(type="tool_uses", value=3)
    clear_at_least: InputTokens | None = None
    exclude_tools: Items[str] | None = None
    clear_tool_inputs: bool | Items[str] | None = None

    def apply(self, messages: Sequence[AnyMessage], tokens: Tokens) -> tuple[Sequence[AnyMessage], dict[str, Any]]:
        """Return the messages that are left, and what was cleared; nothing if that is none."""
        calls = [block for message in messages for block in _blocks(message) if isinstance(block, ToolUseBlock)]
        excluded = set(self.exclude_tools or ())
        old = calls[: len(calls) - self.keep.value] if self.keep.value else calls
        cleared = {block.id: block.name for block in old if block.name not in excluded}
        if not cleared or (isinstance(self.trigger, ToolUses) and len(calls) <= self.trigger.value):
            return messages, {}
        before = tokens(messages)
        if isinstance(self.trigger, InputTokens) and before <= self.trigger.value:
            return messages, {}
        left = [self._without_uses(message, cleared) for message in messages]
        freed = before - tokens(left)
        if self.clear_at_least is not None and freed < self.clear_at_least.value:
            return messages, {}
        return left, {"cleared_tool_uses": len(cleared), "cleared_input_tokens": freed}

    def _without_uses(self, message: AnyMessage, cleared: dict[str, str]) -> AnyMessage:
        if isinstance(message.content, str):
            return message
        blocks: list[Any] = []
        for block in message.content:
            if isinstance(block, ToolResultBlock) and block.tool_use_id in cleared:
                block = block.model_copy(update={"content": CLEARED, "is_error": False})
            elif isinstance(block, ToolUseBlock) and block.id in cleared and self._clears_input(block.name):
                block = block.model_copy(update={"input": {}})
            blocks.append(block)
        return message.model_copy(update={"content": blocks})

    def _clears_input(self, name: str) -> bool:
        chosen = self.clear_tool_inputs
        return name in chosen if isinstance(chosen, list) else bool(chosen)


Edit = Annotated[ClearThinking | ClearToolUses, Field(discriminator="type")]


class ContextManagement(Body):
    edits: Items[Edit] = Field([])

    @field_validator("edits")
    @classmethod
    def _thinking_first(cls, edits: list[Edit]) -> list[Edit]:
        types = [edit.type for edit in edits]
        if len(set(types)) < len(types):
            raise ValueError("each type of edit can be given once")
        if "clear_thinking_20251015" in types[1:]:
            raise ValueError("clear_thinking_20251015 must come first")
        return edits

    def apply(
        self, messages: Sequence[AnyMessage], tokens: Tokens
    ) -> tuple[Sequence[AnyMessage], list[dict[str, Any]]]:
        """Return the messages that are left, and the edits that cleared something, as the API reports them."""
        applied = []
        for edit in self.edits:
            messages, cleared = edit.apply(messages, tokens)
            if cleared:
                applied.append({"type": edit.type, **cleared})
        return messages, applied


def _blocks(message: AnyMessage) -> Sequence[Any]:
    return () if isinstance(message.content, str) else message.content


def _thoughts(message: AnyMessage) -> bool:
    return any(isinstance(block, ThinkingBlock | RedactedThinkingBlock) for block in _blocks(message))


def _without_thinking(message: AnyMessage) -> AnyMessage:
    left = [block for block in _blocks(message) if not isinstance(block, ThinkingBlock | RedactedThinkingBlock)]
    return message.model_copy(update={"content": left or [TextBlock(type="text", text="")]})
