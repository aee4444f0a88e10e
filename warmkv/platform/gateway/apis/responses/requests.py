"""Requests of the Responses API, and how each becomes one of chat completions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, ValidationError

from warmkv.platform.gateway.apis.errors import ApiError, from_validation, invalid
from warmkv.platform.gateway.apis.openai.requests import MOST_LOGPROBS, ChatRequest
from warmkv.platform.gateway.apis.responses.store import Item
from warmkv.platform.gateway.apis.responses.tools import chat_tools, qualified
from warmkv.platform.gateway.apis.schema import Body, FieldsLeftOut, Items, TextContent, WarmkvOptions, at_most

OWN_TERMS = (  # for the places of the same request in chat completions
    (r"messages\.\d+\.tool_calls\.\d+\.function", "input: function_call"),
    (r"messages(\.\d+)?(\.tool_calls)?", "input"),
    (r"response_format(\.json_schema)?", "text.format"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"logprobs", "top_logprobs"),
    (r"max_(completion_)?tokens", "max_output_tokens"),
    (r"tools\.(?P<number>\d+)\.function", r"tools.\g<number>"),
    (r"tool_choice\.(function|allowed_tools)", "tool_choice"),
)


class ResponseTextPart(TextContent):
    ignored = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})
    type: Literal["input_text", "output_text", "text"]
    text: str


class MessageItem(Body):
    ignored = frozenset({"id", "status", "phase"})
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[ResponseTextPart]


class ReasoningItem(Body):
    """What a model thought before an earlier answer: left out of the prompt."""

    ignored = frozenset({"id", "status", "summary", "content", "encrypted_content"})
    type: Literal["reasoning"]


class CallItem(Body):
    ignored = frozenset({"id", "status", "caller"})
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class OutputItem(Body):
    ignored = frozenset({"id", "status", "caller", "name", "namespace"})
    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[ResponseTextPart]


def _type(value: Any) -> str:
    """Return the type of an item; the type of a message may be left out."""
    return str(value.get("type") or "message") if isinstance(value, dict) else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")],
    Discriminator(_type),
]


class ResponseStreamOptions(Body):
    ignored = frozenset({"include_obfuscation", "include_usage"})  # a stream always ends with it


class TextOptions(Body):
    ignored = frozenset({"verbosity"})
    format: dict[str, Any] = Field({"type": "text"})


class Reasoning(Body):
    ignored = frozenset({"summary", "generate_summary", "context"})
    effort: str | None = None


def _check_keys(metadata: Any) -> Any:
    """Refuse keys that are too long before they are part of a fault's place."""
    length = max((len(key) for key in metadata), default=0) if isinstance(metadata, dict) else 0
    if length > KEY_LENGTH:
        raise ValueError(
            f"property name too long. Expected a property name with maximum length {KEY_LENGTH}, "
            f"but got a property name with length {length} instead."
        )
    return metadata


def _check_value(value: str) -> str:
    if len(value) > VALUE_LENGTH:
        raise ValueError(
            f"string too long. Expected a string with maximum length {VALUE_LENGTH}, "
            f"but got a string with length {len(value)} instead."
        )
    return value


KEY_LENGTH, VALUE_LENGTH = 64, 512  # characters, as OpenAI has them, and 16 entries
Metadata = Annotated[dict[str, Annotated[str, AfterValidator(_check_value)]], BeforeValidator(_check_keys), at_most(16)]


class ResponsesRequest(Body):
    """Body of /v1/responses."""

    ignored = frozenset({
        "client_metadata", "max_tool_calls", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "service_tier", "user",
    })  # fmt: skip
    unsupported = MappingProxyType({
        "background": (False,), "context_management": ([],), "conversation": (), "moderation": (), "prompt": (),
        "truncation": ("disabled",),
    })  # fmt: skip

    model: str
    input: str | Annotated[Items[InputItem], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    store: bool = True
    metadata: Metadata = Field({})
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    tools: Items[dict[str, Any]] = Field([])
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    include: Items[str] = Field([])  # of which what is not here changes nothing
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    prompt_cache_key: str = ""
    ignore_eos: bool = False  # by vLLM's name, for benchmarks
    warmkv: WarmkvOptions = WarmkvOptions()

    @property
    def includes_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include

    @property
    def items(self) -> list[Item]:
        """Return what the request adds to the conversation, as it is stored."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return [item.model_dump() for item in self.input if not isinstance(item, ReasoningItem)]

    def as_chat(self, history: Iterable[Item], left_out: FieldsLeftOut) -> ChatRequest:
        """Return the same request of chat completions, behind the conversation before it. Raises ApiError (400)."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = chat_tools(self.tools, left_out)
        if self.top_logprobs and not self.includes_logprobs:
            left_out.note("top_logprobs")
        said = _messages([*history, *self.items])
        _check_outputs(said)
        wanted = {
            "model": self.model,
            "messages": [*first, *said],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "ignore_eos": self.ignore_eos,
            "prompt_cache_key": self.prompt_cache_key,
            "response_format": _format(self.text.format),
            "reasoning_effort": self.reasoning.effort,
            "tools": tools or None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls if tools else None,
            "logprobs": self.includes_logprobs,
            "top_logprobs": self.top_logprobs if self.includes_logprobs else None,
        }
        try:
            chat = ChatRequest.model_validate(wanted, context=left_out)
        except ValidationError as error:
            raise from_validation(error, wanted) from None
        return chat.model_copy(update={"warmkv": self.warmkv})


def in_own_terms(error: ApiError) -> ApiError:
    """Return a refusal of the request as chat completions have it, with the place that the Responses API has for it."""
    for place, own in OWN_TERMS:
        message, found = re.subn(rf"\A{place}(?=[.:])", own, error.message)
        if found:
            return invalid(message).with_traceback(error.__traceback__)  # which the log names
    return error


def _check_outputs(messages: Iterable[dict[str, Any]]) -> None:
    """Refuse calls without an output, and outputs without a call, in OpenAI's words. Raises ApiError (400)."""
    called: dict[str, None] = {}  # those without an output yet
    known: frozenset[str] = frozenset()
    for message in [*messages, {"role": "end"}]:
        if message["role"] == "tool":
            if (name := message["tool_call_id"]) not in known:
                raise _at_input(f"No tool call found for function call output with call_id {name}.")
            if name not in called:
                raise _at_input(f"Two outputs found for function call {name}.")
            del called[name]
        elif called:
            raise _at_input(f"No tool output found for function call {next(iter(called))}.")
        else:
            called = {call["id"]: None for call in message.get("tool_calls", ())}
            known = frozenset(called)


def _at_input(message: str) -> ApiError:
    return ApiError("invalid_request_error", message, param="input")


def _messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the messages of a conversation: calls of an assistant's turn, and texts around them, are one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item["type"]:
            case "message":
                if item["role"] == "assistant" and messages and messages[-1].get("tool_calls"):
                    said = messages[-1].get("content", [])
                    messages[-1]["content"] = [*_parts(said), *_parts(_text(item["content"]))]
                else:
                    messages.append({"role": item["role"], "content": _text(item["content"])})
            case "function_call":
                call = {"name": qualified(item.get("namespace"), item["name"]), "arguments": item["arguments"]}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant"})
                calls = messages[-1].setdefault("tool_calls", [])
                calls.append({"id": item["call_id"], "type": "function", "function": call})
            case "function_call_output":
                text = _text(item["output"])
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
    return messages


def _text(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return content as chat completions have it."""
    return content if isinstance(content, str) else [{"type": "text", "text": part["text"]} for part in content]


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _format(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the format of the answer: what chat completions have under a name of its own is flat here."""
    type_ = chosen.get("type")
    if type_ == "json_schema":
        return {"type": type_, type_: {name: value for name, value in chosen.items() if name != "type"}}
    return chosen


def _choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return tool_choice as chat completions have it. What they do not have stays, and is refused there."""
    if isinstance(choice, str):
        return choice
    match choice.get("type"), choice.get("tools"):
        case "function", _:
            return {"type": "function", "function": {"name": choice.get("name")}}
        case "allowed_tools", [*tools]:
            named = [_choice(tool) if isinstance(tool, dict) else tool for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    return choice
