"""Requests of the contract's cases, written as one word a content block in the order of prefixes.

    T tool   S system text   U user text   E empty user text   D document   R tool result
    A assistant text   C tool call   H thinking

A number tells texts of a kind apart (of R's digits, all but the last name the call), `'` makes a text short, `*` marks
a block for 5 minutes, `*h` for an hour. `+5m` or `+1h` at the end is the top-level cache_control, `!none` the tool
choice.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

WORD = re.compile(r"(?P<kind>[TSUEDRACH])(?P<number>\d*)(?P<short>'?)(?P<mark>(\*h?)?)")
ROLES = {"T": "tools", "S": "system", "A": "assistant", "C": "assistant", "H": "assistant"}
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}}


@dataclass(frozen=True)
class Word:
    """A content block of a case."""

    kind: str
    name: str
    text: str
    mark: str

    @property
    def call(self) -> str:
        number = self.name[1:]
        return f"toolu_{number[:-1] if self.kind == 'R' and len(number) > 1 else number}"

    def block(self) -> dict[str, Any]:
        """As the API takes it."""
        body: dict[str, Any]
        match self.kind:
            case "T":
                body = {"name": self.name, "description": self.text, "input_schema": SCHEMA}
            case "C":
                body = {"type": "tool_use", "id": self.call, "name": "look", "input": {"place": self.text}}
            case "R":
                body = {"type": "tool_result", "tool_use_id": self.call, "content": self.text}
            case "D":
                body = {"type": "document", "source": {"type": "text", "data": self.text}, "title": self.name}
            case "H":
                body = {"type": "thinking", "thinking": self.text, "signature": "signed"}
            case _:
                body = {"type": "text", "text": self.text}
        if self.mark:
            body["cache_control"] = {"type": "ephemeral", **({"ttl": "1h"} if self.mark == "*h" else {})}
        return body


def messages(request: str) -> list[tuple[str, list[Word]]]:
    """Return the words of a request by who says them."""
    found = []
    for text in request.split():
        if text[0] not in "+!":
            match = WORD.fullmatch(text)
            assert match, text
            name = match["kind"] + match["number"]
            length = 0 if match["kind"] == "E" else 4 if match["short"] else 20
            found.append(Word(match["kind"], name, " ".join(f"{name}.{i:02}" for i in range(length)), match["mark"]))
    grouped = itertools.groupby(found, key=lambda word: ROLES.get(word.kind, "user"))
    return [(role, list(said)) for role, said in grouped]


def body(request: str) -> dict[str, Any]:
    """Return the request as the client sends it."""
    found = [(role, [word.block() for word in said]) for role, said in messages(request)]
    options: dict[str, Any] = {role: blocks for role, blocks in found if role in ("tools", "system")}
    options["messages"] = [{"role": role, "content": blocks} for role, blocks in found if role not in options]
    if top := re.search(r"\+(\S+)", request):
        options["cache_control"] = {"type": "ephemeral", "ttl": top[1]}
    if choice := re.search(r"!(\S+)", request):
        options["tool_choice"] = {"type": choice[1]}
    return options


def positions(request: str, tokenizer: Any) -> tuple[list[int], int]:
    """Return, slowly and obviously, the position behind every content block in the prompt, and the tokens of the whole.

    The tiny model's template is written out by hand; content is tokenized apart from what stands between.
    """
    pieces = [
        ("".join(text for text, _ in group), is_content)
        for is_content, group in itertools.groupby(_written(request), key=lambda piece: piece[1])
    ]
    counts = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text, _ in pieces]
    totals = list(itertools.accumulate(counts))
    return [at for at, (_, is_content) in zip(totals, pieces, strict=True) if is_content], totals[-1]


def _written(request: str) -> Iterator[tuple[str, bool]]:
    """Yield the prompt piece by piece, and whether a piece is the content of a block.

    Two contents are never side by side.
    """
    turns: list[tuple[str, list[Word]]] = []
    for role, said in messages(request):
        turns += [("tool", [word]) for word in said if word.kind == "R"]
        if others := [word for word in said if word.kind != "R"]:
            turns.append((role, others))
    for number, (role, said) in enumerate(turns):
        if role == "tools":
            yield "<|im_start|>system\n<tools>\n", False
            for word in said:
                function = {"name": word.name, "description": word.text, "parameters": SCHEMA}
                yield json.dumps({"type": "function", "function": function}), True
                yield "\n", False
            yield "</tools><|im_end|>\n", False
            continue
        yield f"<|im_start|>{role}\n", False
        begun = False
        for word in (word for word in said if word.kind not in "CH"):
            if begun:
                yield "\n", False
            yield f"{word.name}\n{word.text}" if word.kind == "D" else word.text, True
            begun = True
        for word in (word for word in said if word.kind == "C"):
            yield ("\n" if begun else "") + '<tool_call>\n{"name": "look", "arguments": ', False
            yield json.dumps({"place": word.text}), True
            yield "}\n</tool_call>", False
            begun = True
        if role == "assistant" and number == len(turns) - 1:
            return  # the answer goes on from here
        yield "<|im_end|>\n", False
    yield "<|im_start|>assistant\n", False
