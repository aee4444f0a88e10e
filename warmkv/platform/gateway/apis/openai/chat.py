"""Messages and tools of a chat completion, and the turns of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import from_json

from warmkv.platform.gateway.apis.errors import clipped, invalid
from warmkv.platform.gateway.apis.schema import Body, Items, TextContent
from warmkv.platform.gateway.apis.turns import ContentBlock, Role, Turn

TOOL_NAME = r"^[a-zA-Z0-9_-]{1,128}$"


class TextPart(TextContent):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str = Field(pattern=TOOL_NAME)
    arguments: str = ""


class ChatToolCall(Body):
    """A call in an earlier answer; `index` is what an answer's stream has of it."""

    type: Literal["function"] = "function"
    id: str = Field(min_length=1)
    function: CalledFunction
    index: int | None = None


class ChatMessage(Body):
    ignored = frozenset({"name"})
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    tool_call_id: str | None = None
    # An answer of ours may be sent back as it came: these are what we, or the SDK, add to it.
    tool_calls: Items[ChatToolCall] | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None

    @property
    def texts(self) -> list[str]:
        if isinstance(self.content, str):
            return [self.content]
        return [part.text for part in self.content or ()]


class Function(Body):
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False  # whether the arguments of its calls satisfy the parameters


class ChatTool(Body):
    """Describe a function of the client; of tools that others define, or run, this server has none."""

    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _functions_only(cls, value: Any) -> Any:
        kind = value.get("type", "function") if isinstance(value, dict) else "function"
        if kind != "function":
            raise ValueError(f"this server has no tools of type {clipped(str(kind), 100)!r}: describe it as a function")
        return value

    @property
    def definition(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates take."""
        described = {} if self.function.description is None else {"description": self.function.description}
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {"name": self.function.name, **described, "parameters": parameters}}


class ChosenFunction(Body):
    name: str


class NamedChoice(Body):
    """Name the one tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Items[NamedChoice] = Field(min_length=1)


class AllowedChoice(Body):
    """Name those of the tools that may be called, or of which one must be; the model is shown all."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind(choice: Any) -> str:
    return str(choice.get("type")) if isinstance(choice, dict) else "word"


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("word")]
    | Annotated[NamedChoice, Tag("function")]
    | Annotated[AllowedChoice, Tag("allowed_tools")],
    Discriminator(_kind),
]


def turns(messages: Sequence[ChatMessage], tools: Sequence[ChatTool] = ()) -> list[Turn]:
    """Return the conversation; `developer` is another name of `system`. Raises ApiError (400)."""
    _check_results(messages)
    found = []
    if tools:
        found.append(Turn("tools", tuple(ContentBlock.of_value(tool.definition) for tool in tools)))
    for number, message in enumerate(messages):
        blocks = [ContentBlock(text, id=message.tool_call_id) for text in message.texts]
        if message.role == "assistant":
            calls = message.tool_calls or []
            blocks = [block for block in blocks if block.text or not calls]
            blocks += [_call(call, f"messages.{number}.tool_calls.{at}") for at, call in enumerate(calls)]
            if not blocks and message.reasoning_content:
                blocks = [ContentBlock("")]
        if not blocks:
            raise invalid(f"messages.{number}: a message needs content")
        role: Role = "system" if message.role == "developer" else message.role
        found.append(Turn(role, tuple(blocks), message.reasoning_content or ""))
    return found


def _call(call: ChatToolCall, place: str) -> ContentBlock:
    try:
        arguments = from_json(call.function.arguments.strip() or "{}")
    except ValueError as error:
        raise invalid(f"{place}.function.arguments: no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise invalid(f"{place}.function.arguments: not a JSON object")
    return ContentBlock.of_value(arguments, call=call.function.name, id_=call.id)


def _check_results(messages: Sequence[ChatMessage]) -> None:
    """Refuse calls that the tool messages behind them do not answer, and tool messages that answer none."""
    called: dict[str, str] = {}  # id -> where; those without a result yet
    known: set[str] = set()  # ids of the last message with calls
    for number, message in enumerate(messages):
        if message.role == "tool":
            if (name := message.tool_call_id) not in known:
                raise invalid(f"messages.{number}.tool_call_id: {name!r} is no call of the assistant's message before")
            if called.pop(name, None) is None:
                raise invalid(f"messages.{number}.tool_call_id: two results for {name!r}")
            continue
        _check_answered(called)
        if message.tool_call_id is not None:
            raise invalid(f"messages.{number}.tool_call_id: only allowed in tool messages")
        if message.tool_calls and message.role != "assistant":
            raise invalid(f"messages.{number}.tool_calls: only allowed in assistant messages")
        calls = message.tool_calls or []
        called = {call.id: f"messages.{number}.tool_calls.{at}" for at, call in enumerate(calls)}
        known = set(called)
        if len(known) < len(calls):
            raise invalid(f"messages.{number}.tool_calls: ids must be unique")
    _check_answered(called)


def _check_answered(called: dict[str, str]) -> None:
    for name, place in called.items():
        raise invalid(f"{place}: no tool message answers {name!r}")
