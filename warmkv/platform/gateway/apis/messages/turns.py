"""The conversation of a Messages API request as the turns of a prompt, in the order of its prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from warmkv.platform.gateway.apis.errors import invalid
from warmkv.platform.gateway.apis.messages.content import (
    AnyMessage,
    AssistantMessage,
    DocumentBlock,
    SubText,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolReference,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from warmkv.platform.gateway.apis.tokens import Place, place_name
from warmkv.platform.gateway.apis.turns import ContentBlock, Turn, to_json
from warmkv.prefixes.prompt_text import BILLING_LINE


@dataclass(frozen=True, slots=True)
class MessageReading:
    """How requests are read: `default_ttl` of marks without one; `restore` returns thinking of ours by its signature.

    With `omit_billing_line` the line that changes with every request is left out of the system prompt.
    """

    default_ttl: str
    restore: Callable[[str, str], str | None] = lambda thinking, signature: None
    omit_billing_line: bool = True
    tools: Mapping[str, Tool] = field(default_factory=dict)  # that results may refer to
    shown: set[str] = field(default_factory=set)  # names of those that one has referred to

    def turns(
        self, tools: Sequence[Tool], system: str | Sequence[TextBlock] | None, messages: Sequence[AnyMessage]
    ) -> list[Turn]:
        """Return the turns of a prompt: tools, system, messages. Raises ApiError (400).

        Thinking of earlier answers is kept where this service signed it. A user's tool results become turns of their
        own. Tools with defer_loading are left out, until a result refers to them.
        """
        check_results(messages)
        reading = replace(self, tools={tool.name: tool for tool in tools}, shown=set())
        found = []
        if loaded := [(number, tool) for number, tool in enumerate(tools) if not tool.defer_loading]:
            blocks = (
                ContentBlock.of_value(tool.definition, reading._ttl(tool), place=("tools", number))
                for number, tool in loaded
            )
            found.append(Turn("tools", tuple(blocks)))
        elif tools:
            raise invalid("tools: all have defer_loading; at least one must be there from the start")
        if self.omit_billing_line and system:
            system = without_billing_line(system)
        if system:
            found.append(Turn("system", reading._texts(system, ("system",), ("system",))))
        for number, message in enumerate(messages):
            place: Place = ("messages", number)
            if isinstance(message, AssistantMessage):
                found.append(reading._said(message, place))
            elif isinstance(message, SystemMessage):
                found.append(Turn("system", reading._texts(message.content, place, (*place, "content"))))
            else:
                found += reading._user_turns(message, place)
        return found

    def _ttl(self, part: TextBlock | DocumentBlock | Tool | ToolUseBlock | ToolResultBlock) -> str | None:
        return part.ttl(self.default_ttl)

    def _user_turns(self, message: UserMessage, place: Place) -> Iterator[Turn]:
        if isinstance(message.content, str):
            yield Turn("user", (ContentBlock(message.content, place=place),))
            return
        results = [block for block in message.content if isinstance(block, ToolResultBlock)]
        if results != message.content[: len(results)]:
            raise invalid(f"{place_name(place)}.content: tool_result blocks must come before other content")
        for number, result in enumerate(results):
            at = (*place, "content", number)
            text = self._result(result, at)
            yield Turn("tool", (ContentBlock(text, self._ttl(result), place=at, id=result.tool_use_id),))
        rest = [block for block in message.content[len(results) :] if isinstance(block, TextBlock | DocumentBlock)]
        if rest or not results:
            yield Turn("user", self._texts(rest, place, (*place, "content"), len(results)))

    def _result(self, result: ToolResultBlock, place: Place) -> str:
        text = result.content if isinstance(result.content, str) else None
        if text is None:
            parts = []
            for number, part in enumerate(result.content):
                if isinstance(part, ToolReference):
                    if (tool := self.tools.get(part.tool_name)) is None:
                        raise invalid(
                            f"{place_name(place)}.content.{number}.tool_name: no tool is named {part.tool_name!r}"
                        )
                    new = tool.name not in self.shown  # once, or the prompt could be far longer than the request
                    self.shown.add(tool.name)
                    parts.append(f"<tools>\n{to_json(tool.definition)}\n</tools>" if new else tool.name)
                elif isinstance(part, SubText):
                    parts.append(part.text)
            text = "\n".join(parts)
        return f"Error: {text}" if result.is_error else text

    def _said(self, message: AssistantMessage, place: Place) -> Turn:
        if isinstance(message.content, str):
            return Turn("assistant", (ContentBlock(message.content, place=place),))
        blocks, thoughts = list[ContentBlock](), list[str]()
        for number, block in enumerate(message.content):
            at = (*place, "content", number)
            if isinstance(block, TextBlock):
                blocks.append(ContentBlock(block.text, self._ttl(block), place=at))
            elif isinstance(block, ToolUseBlock):
                blocks.append(ContentBlock.of_value(block.input, self._ttl(block), block.name, at, block.id))
            elif isinstance(block, ThinkingBlock):
                thinking = self.restore(block.thinking, block.signature)
                thoughts += [] if thinking is None else [thinking.strip()]
        if not blocks and message.content:  # it was cut off while it thought, here or in another service
            blocks.append(ContentBlock("", place=place))
        return Turn("assistant", _at_least_one(blocks, place), "\n".join(filter(None, thoughts)))

    def _texts(
        self, content: str | Sequence[TextBlock | DocumentBlock], place: Place, within: Place, first: int = 0
    ) -> tuple[ContentBlock, ...]:
        """Return the blocks of a text, or of blocks that stand at `within` from number `first` on."""
        if isinstance(content, str):
            return (ContentBlock(content, place=place),)
        blocks = (
            ContentBlock(block.text, self._ttl(block), place=(*within, number))
            for number, block in enumerate(content, first)
        )
        return _at_least_one(tuple(blocks), place)


def without_billing_line(system: str | Sequence[TextBlock]) -> str | Sequence[TextBlock]:
    """Return a system prompt without Claude Code's billing line, and without its block if nothing else is in it."""
    if isinstance(system, str):
        return BILLING_LINE.sub("", system, count=1) if BILLING_LINE.match(system) else system
    if not system or not (line := BILLING_LINE.match(system[0].text)):
        return system
    rest = system[0].text[line.end() :]
    return [*([system[0].model_copy(update={"text": rest})] if rest else []), *system[1:]]


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
            return [*turns[:number], replace(turn, blocks=blocks), *turns[number + 1 :]]
    return list(turns)


def check_results(messages: Sequence[AnyMessage]) -> None:
    """Refuse calls without a result in the next message, and results without a call in the one before.

    System messages may stand between. Raises ApiError (400).
    """
    called: dict[str, str] = {}  # id -> place of the call
    for number, message in enumerate(messages):
        if isinstance(message, SystemMessage):
            continue
        content = [] if isinstance(message.content, str) else message.content
        results: set[str] = set()
        calls: dict[str, str] = {}
        for at, block in enumerate(content):
            place = f"messages.{number}.content.{at}"
            if isinstance(block, ToolResultBlock):
                name = block.tool_use_id
                if name not in called:
                    raise invalid(f"{place}: tool_result {name!r}: the message before has no tool_use of that id")
                if name in results:
                    raise invalid(f"{place}: tool_result {name!r}: two results for one tool_use")
                results.add(name)
            elif isinstance(block, ToolUseBlock):
                if block.id in calls:
                    raise invalid(f"{place}: tool_use {block.id!r}: ids must be unique")
                calls[block.id] = place
        if missing := next((name for name in called if name not in results), None):
            raise _no_result(missing, called[missing])
        called = calls
    if called:
        name = next(iter(called))
        raise _no_result(name, called[name])


def _no_result(name: str, place: str) -> Exception:
    return invalid(f"{place}: tool_use {name!r}: the next message has no tool_result for it")


def _at_least_one(blocks: Sequence[ContentBlock], place: Place) -> tuple[ContentBlock, ...]:
    if not blocks:
        raise invalid(f"{place_name(place)}.content: a message needs at least one content block")
    return tuple(blocks)
