"""The parts of an answer, as its text comes: transformers' ResponseParser, and what a service needs beyond it.

Calls are told when they are complete, since JSON that has been streamed cannot be taken back: one that is cut off, or
is no call, is text. Whitespace between parts is dropped. What the prompt has begun of the answer is not repeated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from warmkv.platform.gateway.apis.chat_parsing.parts import Part, Text, Thinking, ToolCall

CALLABLE = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")
CALL_FIELDS = "tool_calls"  # what their names begin with
READ, KEPT = 4096, 256  # characters behind which the buffer is cut, and those that stay for what looks back


class PartParser:
    """Turns the text of an answer, which comes in pieces cut anywhere, into parts.

    `template` is one of transformers' response templates, `prefix` the prompt's end from the answer's beginning on,
    `tools` are the request's as chat templates take them. With `names`, calls of other tools are text. Without
    `parallel` the answer is over (`done`) behind its first call.
    """

    def __init__(
        self,
        template: Any,
        prefix: str,
        tools: Sequence[Mapping[str, Any]] = (),
        names: Collection[str] | None = None,
        parallel: bool = True,
    ) -> None:
        self._regions = _Regions(template, prefix, tools, names)
        self._parallel = parallel
        self._kind: type[Part] = Text  # of the last part
        self._held = ""  # whitespace that is told when more follows it
        self._strips = False  # whether whitespace comes next that stands between parts
        self.calls = 0
        self.done = False

    @property
    def is_thinking(self) -> bool:
        """Return True where what comes next is thinking, as far as the text tells."""
        return self._regions.field in THINKING_FIELDS

    def feed(self, text: str) -> list[Part]:
        """Add text; return what is certain now."""
        return [] if self.done else self._parts(self._regions.feed(text))

    def finish(self, *, complete: bool) -> list[Part]:
        """Return the rest of an answer that the model ended itself, or that was cut off."""
        if self.done:
            return []
        parts = self._parts(self._regions.end(complete))
        if self._held and self._kind is Text and not self.done:
            parts.append(Text(self._held))
        return parts

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            match event["type"]:
                case "region_chunk" if not _is_call(event["field"]):
                    self._say(parts, Thinking if event["field"] in THINKING_FIELDS else Text, event["text"])
                case "region_broken":
                    self._say(parts, Text, event["text"])
                case "region_close":
                    for call in event.get("calls", ()):
                        parts.append(call)
                        self._kind, self._held, self._strips = ToolCall, "", True
                        self.calls += 1
                        if not self._parallel:
                            self.done = True
                            return parts
        return parts

    def _say(self, parts: list[Part], kind: type[Text] | type[Thinking], text: str) -> None:
        if kind is not self._kind:
            self._kind, self._held, self._strips = kind, "", True
        if self._strips:
            text = text.lstrip()
            if not text:
                return
            self._strips = False
        text = self._held + text
        said = text.rstrip()
        self._held = text[len(said) :]
        if said:
            parts.append(kind(said))


class _Regions(ResponseParser):
    """Transformers' parser, which gives a region that is no call back as text: the event `region_broken`.

    Events of calls have them as `calls`. Those of what the prompt has begun are left out.
    """

    _buffer: str
    _pos: int

    def __init__(
        self, template: Any, prefix: str, tools: Sequence[Mapping[str, Any]], names: Collection[str] | None
    ) -> None:
        self._names, self._complete = names, True
        self._opened_at = self._body_at = self._said_from = 0  # places in the buffer
        super().__init__(template, prefix=prefix, tools=list(tools))
        self._said_from = len(self._buffer)

    @property
    def field(self) -> str | None:
        """Return the field whose region is open."""
        found: str | None = self._current
        return found

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Add text, and forget what was told long ago; a call may have to be told as text."""
        if self._pos > READ and not (self._current is not None and _is_call(self._current)):
            cut = self._pos - KEPT
            self._buffer, self._pos = self._buffer[cut:], KEPT
            self._said_from -= cut
        events: list[dict[str, Any]] = super().feed(text)
        return events

    def end(self, complete: bool) -> list[dict[str, Any]]:
        """Return the events of the end. Calls that are not closed are so where the model has ended the answer."""
        self._complete = complete
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return events

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        super()._open_explicit(events, field, m)
        self._opened_at, self._body_at = m.start(), m.end()

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        before, at = len(events), self._pos
        super()._accumulate(events, text)
        if len(events) > before:
            events[-1]["text"] = text[max(0, self._said_from - at) :]
        if self._current is not None and not _is_call(self._current):
            self._body = ""  # is told already

    def _coerce_tool_calls(self, value: Any) -> Any:
        """Give arguments that are written as text the types of the schema; JSON says itself which are strings."""
        if self._spec.fields[self._current].content == "json":
            return value
        return super()._coerce_tool_calls(value)

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        field = self._spec.fields.get(self._current)
        is_call = field is not None and _is_call(field.name)
        is_closed = self._pos > self._body_at + len(self._body)
        before = len(events)
        try:
            if is_call and self._opened:
                if not (is_closed or self._complete):
                    raise ValueError("the call is cut off")
                _check_tags(self._body, field)
            super()._close_current(events)
            if is_call and len(events) > before:
                events[-1]["calls"] = calls_of(events[-1]["value"], self._names)
        except (ValueError, KeyError, TypeError, RecursionError):
            del events[before:]
            if is_call:
                text = self._buffer[max(self._opened_at, self._said_from) : self._pos]
                events.append({"type": "region_broken", "text": text})
            self._reset_to_implicit()


def calls_of(value: Any, names: Collection[str] | None = None) -> list[ToolCall]:
    """Return the calls of a field's value, one or a list. Raises ValueError where they are none."""
    return [_call(item, names) for item in (value if isinstance(value, list) else [value])]


def _call(value: Any, names: Collection[str] | None) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise ValueError("there is no function")
    name, arguments = function.get("name"), function.get("arguments", function.get("parameters", {}))
    if not isinstance(name, str) or not CALLABLE.fullmatch(name) or (names is not None and name not in names):
        raise ValueError("there is no such tool")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments are no object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # raises for half a surrogate pair
    return ToolCall(name, text)


def _check_tags(body: str, field: Any) -> None:
    """Raise ValueError where a region of tags has something else beside them, such as half a tag."""
    if field.content == "xml-inline":
        rest = re.sub(field.content_args["tag_pattern"], "", body, flags=re.DOTALL)
        if rest.strip():
            raise ValueError("there is more than tags")


def _is_call(field: str) -> bool:
    return field.startswith(CALL_FIELDS)
