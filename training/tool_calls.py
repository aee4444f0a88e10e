"""Conversations with tools for the tiny model: when to call one, with which arguments, and what its result answers.

Every question asks for a value, as the families of `warmkv.models.tiny.tasks` do. What stands in the conversation is
answered from it, tools or not; what does not is looked up by the tool that its definition offers for it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from warmkv.models.tiny.corpus import World
from warmkv.models.tiny.tasks import (
    CODE_NEEDLES,
    CODE_QUESTIONS,
    FAMILIES,
    PREFIXES,
    SUFFIXES,
    SYSTEM_PROMPTS,
    TURN_END,
    TURN_START,
    code,
)

Kind = Literal["call", "result", "known"]
"""An answer: a call, a value from the result of one, or a value that the conversation holds without a call."""
TURN_TOKENS = 170  # of a question, a call and its result
NOUNS = ("code", "number", "pin", "port")
NAMES = ("look_up", "lookup", "look_up_{noun}", "find_{noun}", "get_{noun}", "{noun}_of", "search_{noun}s")
DESCRIPTIONS = (
    "Look up the {noun} of a name.",
    "Return the {noun} that stands under a name.",
    "Find the {noun} of something.",
    "Get the {noun} for a given name.",
    "Looks a {noun} up in the notes.",
    "Search the notes for a {noun}.",
)
NOTES = ("read_notes", "open_notes", "read_{noun}s", "list_{noun}s")
NOTES_DESCRIPTIONS = (
    "Read the notes in which every {noun} stands.",
    "Read the notes in which codes, ports and numbers stand.",
    "Return all that is known of each {noun}.",
)
PARAMETERS = ("key", "key", "name", "word", "query", "term", "item", "of")
PARAMETER_DESCRIPTIONS = ("the name", "what to look up", "The name to look for.", "whose {noun} to return")
OTHERS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("get_weather", "Return the weather of a city.", {"city": "string"}),
    ("read_file", "Read a file.", {"path": "string"}),
    ("write_file", "Write a text to a file.", {"path": "string", "text": "string"}),
    ("add", "Add two numbers.", {"a": "number", "b": "number"}),
    ("send_mail", "Send a message to somebody.", {"to": "string", "text": "string"}),
    ("list_files", "List the files of a folder.", {"path": "string"}),
    ("now", "Return the time.", {}),
    ("run", "Run a command in a shell.", {"command": "string"}),
    ("fetch", "Fetch a page.", {"url": "string"}),
    ("translate", "Translate a text.", {"text": "string", "language": "string"}),
)


@dataclass(frozen=True)
class ToolSample:
    """A conversation whose last message is the answer; `tools` as chat templates take them."""

    family: str
    tools: tuple[dict[str, Any], ...]
    conversation: tuple[dict[str, Any], ...]

    @property
    def answer(self) -> dict[str, Any]:
        """Return the message that is to be said."""
        return self.conversation[-1]

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation up to what is to be answered."""
        return list(self.conversation[:-1])

    def opening(self) -> str:
        """Return the definitions of the tools, as the chat template writes them."""
        defined = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in self.tools)
        return f"{TURN_START}system\n<tools>\n{defined}</tools>{TURN_END}\n"

    def segments(self) -> list[tuple[str, bool]]:
        """Return the whole text as (piece, is an answer) pairs, the end mark of an answer being part of it."""
        out: list[tuple[str, bool]] = []
        before = self.opening()
        for message in self.conversation:
            before += f"{TURN_START}{message['role']}\n"
            if message["role"] == "assistant":
                out += [(before, False), (_said(message) + TURN_END, True)]
                before = "\n"
            else:
                before += f"{message['content']}{TURN_END}\n"
        return out

    def prompt(self) -> str:
        """Return everything before the last answer, with its special tokens."""
        return "".join(text for text, _ in self.segments()[:-1])

    def text(self) -> str:
        """Return prompt and answer, as trained on."""
        return "".join(text for text, _ in self.segments())


def _said(message: dict[str, Any]) -> str:
    """Return what an assistant's message says, calls as the chat template writes them."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        name = json.dumps(call["function"]["name"])
        calls.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(filter(None, (message["content"], *calls)))


def _definition(rng: random.Random, name: str, about: str, properties: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as chat templates take it, its schema written in one of the ways in which clients do."""
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if properties or rng.random() < 0.3:
        schema["required"] = [key for key in properties if key != "limit"]
    if rng.random() < 0.4:
        schema["additionalProperties"] = False
    if rng.random() < 0.25:
        schema = dict(reversed(schema.items()))
    function = {"name": name, "description": about, "parameters": schema}
    return {"type": "function", "function": function}


@dataclass(frozen=True)
class _LookUp:
    """The tool that knows the values: its definition, and the parameter that takes a key, if it has one."""

    tool: dict[str, Any]
    parameter: str | None

    def call(self, key: str) -> dict[str, Any]:
        """Return the message that calls the tool for a key."""
        arguments = {self.parameter: key} if self.parameter else {}
        function = {"name": self.tool["function"]["name"], "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _look_up(rng: random.Random, noun: str) -> _LookUp:
    if rng.random() < 0.15:
        about = rng.choice(NOTES_DESCRIPTIONS).format(noun=noun)
        return _LookUp(_definition(rng, rng.choice(NOTES).format(noun=noun), about, {}), None)
    parameter = rng.choice(PARAMETERS)
    properties: dict[str, Any] = {parameter: {"type": "string"}}
    if rng.random() < 0.5:
        properties[parameter]["description"] = rng.choice(PARAMETER_DESCRIPTIONS).format(noun=noun)
    if rng.random() < 0.1:
        properties["limit"] = {"type": "integer"}
    about = rng.choice(DESCRIPTIONS).format(noun=noun)
    return _LookUp(_definition(rng, rng.choice(NAMES).format(noun=noun), about, properties), parameter)


def _toolbox(rng: random.Random, noun: str, length: int) -> tuple[_LookUp, tuple[dict[str, Any], ...]]:
    """Draw the tool that is of use and up to three beside it, in any order; no two of one name."""
    useful = _look_up(rng, noun)
    tools = {useful.tool["function"]["name"]: useful.tool}
    for _ in range(0 if length <= 256 else rng.choice((0, 0, 1, 1, 2, 3))):
        if rng.random() < 0.3:
            other = rng.choice([word for word in NOUNS if word != noun])
            tool = _look_up(rng, other).tool
            if other not in tool["function"]["name"]:
                continue
        else:
            name, about, types = rng.choice(OTHERS)
            tool = _definition(rng, name, about, {key: {"type": kind} for key, kind in types.items()})
        tools.setdefault(tool["function"]["name"], tool)
    shown = list(tools.values())
    rng.shuffle(shown)
    return useful, tuple(shown)


def _document(rng: random.Random, needles: Sequence[str], lines: Sequence[str]) -> str:
    """Return lines of text with the needles at random depths."""
    body = list(lines)
    for needle in needles:
        body.insert(rng.randint(0, len(body)), needle)
    return "\n".join(body).strip("\n")


def _conversation(family: str, last: Kind, world: World, rng: random.Random, length: int, turns: int) -> ToolSample:
    """Draw a conversation of `turns` questions, the last of which ends with an answer of the kind `last`."""
    turns = min(turns, max(1, length // TURN_TOKENS))
    noun = rng.choice(NOUNS)
    useful, tools = _toolbox(rng, noun, length)
    wording, prefix = rng.choice(CODE_NEEDLES), rng.choice(PREFIXES)
    suffix = rng.choice(SUFFIXES)
    quote = rng.choice(("", '"'))  # around a key in questions: behind a space its tokens are other ones than in a call
    keys = iter(world.keys(rng, 4 * turns + 4))
    values: dict[str, str] = {}  # of the keys that the conversation states

    def needles(count: int) -> list[str]:
        names = [next(keys) for _ in range(count)]
        values.update((name, code(rng)) for name in names)
        return [prefix + wording.format(noun=noun, key=name, value=values[name]) for name in names]

    def asked(key: str) -> str:
        return rng.choice(CODE_QUESTIONS).format(noun=noun, key=f"{quote}{key}{quote}") + suffix

    # Messages; a text that may be filled up is a list of its needles, and of what is asked behind it.
    drawn: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        drawn.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    kinds: list[Kind] = [*(rng.choice(("result", "result", "known")) for _ in range(turns - 1)), last]
    for number, kind in enumerate(kinds):
        opens = number == 0 and (kind == "known" or rng.random() < 0.5)
        stated = needles(rng.randint(1, 2)) if opens else []
        key = rng.choice(list(values)) if kind == "known" and values else next(keys)
        question = asked(key)
        drawn.append({"role": "user", "content": (stated, question) if opens else question})
        if kind == "known":
            drawn.append({"role": "assistant", "content": values[key]})
            continue
        drawn.append(useful.call(key))
        if kind == "call":
            break
        value = values[key] = code(rng)
        statement = wording.format(noun=noun, key=key, value=value)
        if useful.parameter is None or rng.random() < 0.5:
            found: Any = ([prefix + statement, *needles(rng.randint(0, 2))], "")
        else:
            found = rng.choice((statement, statement, value, json.dumps({key: value}), json.dumps({noun: value})))
        drawn.append({"role": "tool", "content": found})
        if rng.random() < 0.4:  # as a client that sends a result and words of its own
            drawn.append({"role": "user", "content": asked(key)})
        drawn.append({"role": "assistant", "content": value})
    return _filled(family, tools, drawn, world, rng, length)


def _filled(
    family: str,
    tools: tuple[dict[str, Any], ...],
    drawn: Sequence[dict[str, Any]],
    world: World,
    rng: random.Random,
    length: int,
) -> ToolSample:
    """Fill up the documents of a conversation with text until it has about `length` tokens."""
    places = [number for number, message in enumerate(drawn) if isinstance(message["content"], tuple)]
    shares = [rng.random() for _ in places]
    seed = rng.random()

    def build(filler: Sequence[Sequence[str]]) -> ToolSample:
        depth = random.Random(seed)
        said = [dict(message) for message in drawn]
        for number, lines in zip(places, filler, strict=True):
            stated, question = drawn[number]["content"]
            text = _document(depth, stated, lines)
            said[number]["content"] = f"{text}\n{question}" if question else text
        return ToolSample(family, tools, tuple(said))

    empty: list[list[str]] = [[] for _ in places]
    spare = length - world.count(build(empty).text())
    filler = [world.filler(rng, int(spare * share / sum(shares))) for share in shares] if spare > 0 else empty
    sample = build(filler)
    while any(filler) and (over := world.count(sample.text()) - length) > 0:
        while over > 0 and any(filler):
            over -= world.cost(max(filler, key=len).pop())
        sample = build(filler)
    return sample


def spelling(world: World, rng: random.Random) -> list[tuple[str, bool]]:
    """Return a question and the arguments that a call for it has, as (piece, is an answer) pairs in plain form."""
    key, parameter = world.keys(rng, 1)[0], rng.choice(PARAMETERS)
    question = rng.choice(CODE_QUESTIONS).format(noun=rng.choice(NOUNS), key=key) + rng.choice(SUFFIXES)
    return [(f'{question}\n{{"{parameter}":', False), (f' "{key}"}}', True), ("\n", False)]


def tool_call(world: World, rng: random.Random, *, length: int, turns: int = 1, **_: Any) -> ToolSample:
    """Ask last for what only a tool knows: the answer is its call."""
    return _conversation("tool_call", "call", world, rng, length, turns)


def tool_result(world: World, rng: random.Random, *, length: int, turns: int = 1, **_: Any) -> ToolSample:
    """Ask last for what a tool was called for: the answer is in its result."""
    return _conversation("tool_result", "result", world, rng, length, turns)


def tool_not_needed(world: World, rng: random.Random, *, length: int, turns: int = 1, **_: Any) -> ToolSample:
    """Ask last for what the conversation has said already, or put tools before a sample of another family."""
    if rng.random() < 0.5:
        return _conversation("tool_not_needed", "known", world, rng, length, turns)
    tools = _toolbox(rng, rng.choice(NOUNS), length)[1]
    alone = ToolSample("tool_not_needed", tools, ())
    left = max(1, length - world.count(alone.opening()))
    sample = FAMILIES[rng.choice(list(FAMILIES))](world, rng, length=left, chat=True, turns=turns)
    said = (*sample.messages(), {"role": "assistant", "content": sample.answer})
    return ToolSample("tool_not_needed", tools, said)


TOOL_FAMILIES: dict[str, Callable[..., ToolSample]] = {
    "tool_call": tool_call,
    "tool_result": tool_result,
    "tool_not_needed": tool_not_needed,
}
"""Families in chat form, by what the last answer is; called as those of `tasks.FAMILIES` are."""
