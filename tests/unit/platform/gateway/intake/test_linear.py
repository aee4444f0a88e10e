"""No body costs more than in proportion to its size, whatever stands in any field of any endpoint.

Work is counted, not timed (work.py): a body four times as large may do four times as much, and a little.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.platform.exchanges import Gateway, arrival
from tests.unit.platform.work import work_of
from warmkv.config import GatewayConfig, LimitsConfig
from warmkv.platform.gateway.apis.errors import ApiError
from warmkv.platform.gateway.apis.messages.requests import MessagesRequest
from warmkv.platform.gateway.apis.responses.store import ResponseStore
from warmkv.platform.gateway.apis.schema import parse
from warmkv.platform.gateway.apis.tool_places import places_of
from warmkv.platform.gateway.apis.turns import ContentBlock, Turn
from warmkv.platform.gateway.intake.body_limits import BodyLimits
from warmkv.platform.gateway.intake.parsing import Parsing
from warmkv.platform.gateway.live_config import ChangeBody, RollbackBody
from warmkv.platform.gateway.service import Arrival
from warmkv.platform.tenants import Tenant
from warmkv.replicas.loading.tokenizer import load_tokenizer

SMALL, TIMES, SLACK = 64, 4, 1.1
PACKAGE = "/warmkv/"

TEXTS: dict[str, Callable[[int], str]] = {
    "one character": lambda n: "a" * n,
    "private use": lambda n: "\ue000" * n,
    "marks": lambda n: "\ue000\ue001\ue002\ue003" * (n // 4),
    "whitespace": lambda n: " \n\t " * (n // 4),
    "template": lambda n: "<|im_end|>\n<|im_start|>system\n{{ x }}{% y %}" * (n // 44 + 1),
    "structure": lambda n: '[{"a":,' * (n // 7),
    "emoji": lambda n: "\U0001f600" * n,
    "words": lambda n: "ab cd, " * (n // 7),
}
VALUES: dict[str, Callable[[int], Any]] = {
    **TEXTS,
    "zeros": lambda n: [0] * n,
    "empty lists": lambda n: [[] for _ in range(n)],
    "empty objects": lambda n: [{} for _ in range(n)],
    "keys": lambda n: {f"key{number:05}": 0 for number in range(n)},
    "deep": lambda n: deep(min(n // 4, 90)),
    "digits": lambda n: int("9" * min(n, 4000)),
    "long key": lambda n: {"a" * n: 1},
    "dots": lambda n: {".".join(["compression"] * (n // 12)): 1},
}
FIELDS = {
    "messages": ["model", "messages", "messages.0.role", "messages.0.content", "messages.0.extra", "system", "tools",
                 "tools.0.name", "tools.0.description", "tools.0.input_schema", "tool_choice", "cache_control",
                 "stop_sequences", "metadata", "max_tokens", "temperature", "warmkv", "warmkv.policy", "warmkv.replica",
                 "warmkv.chat_template_kwargs", "thinking", "context_management", "extra"],
    "chat": ["model", "messages", "messages.0.content", "messages.0.annotations", "stop", "logit_bias", "tools", "user",
             "response_format", "seed", "warmkv", "extra"],
    "completions": ["prompt", "stop", "stop_token_ids", "extra"],
    "responses": ["input", "input.0.content", "input.0.extra", "instructions", "previous_response_id", "metadata",
                  "text", "tools", "extra"],
    "change": ["changes", "why", "version", "extra"],
    "rollback": ["to", "why", "extra"],
}  # fmt: skip


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(config())


def config() -> Any:
    from warmkv.config import load

    return load().model


@pytest.fixture(scope="module")
def understand(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[[str, bytes], Any]:
    """What each endpoint makes of a body before it is sent."""
    gateway = asyncio.run(make_gateway(tmp_path_factory.mktemp("policy")))
    service = gateway.service
    parsing = Parsing(service, tokenizer, 100_000)
    limits = BodyLimits.of(gateway.config.gateway)
    salts = map(str.encode, map(str, itertools.count()))

    def parsed(take: Callable[[Arrival, bytes, Any], Any]) -> Callable[[bytes], Any]:
        def of_another_tenant(data: bytes) -> Any:  # who has sent nothing before
            return take(arrival(service, Tenant("", next(salts), frozenset(), LimitsConfig())), data, tokenizer)

        return of_another_tenant

    made = {
        "messages": parsed(parsing.message),
        "count": parsed(parsing.count),
        "chat": parsed(parsing.chat),
        "completions": parsed(parsing.completion),
        "responses": parsed(partial(parsing.response, ResponseStore(lambda: 0.0).history)),
        "change": lambda data: parse(data, ChangeBody, limits),
        "rollback": lambda data: parse(data, RollbackBody, limits),
    }
    return lambda api, data: made[api](data)


async def make_gateway(folder: Path) -> Gateway:
    return Gateway(folder)


def whole(api: str) -> dict[str, Any]:
    said = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    if api == "messages":
        tool = {"name": "t", "description": "d", "input_schema": {"type": "object"}}
        return {**said, "max_tokens": 1, "tools": [tool], "warmkv": {}}
    if api == "change":
        return {"changes": {"routing.x": 1}, "why": "x"}
    if api == "responses":
        return {"model": "tiny", "input": said["messages"]}
    return {"chat": {**said, "warmkv": {}}, "completions": {"model": "tiny", "prompt": "x"}, "rollback": {"why": "x"}}[
        api
    ]


def put(body: Any, place: str, value: Any) -> dict[str, Any]:
    """Return the body with a value in a place."""
    found = json.loads(json.dumps(body))
    *path, last = place.split(".")
    inner = found
    for name in path:
        inner = inner[int(name)] if name.isdigit() else inner[name]
    inner[last] = value
    return found


def cost(understand: Callable[[str, bytes], Any], api: str, body: Any) -> int:
    data = json.dumps(body, ensure_ascii=False).encode()

    return refusing(lambda: understand(api, data))


def refusing(call: Callable[[], Any]) -> int:
    """Return the work of a call that may refuse what it is given."""
    refused: list[ApiError] = []

    def caught() -> None:
        try:
            call()
        except ApiError as error:
            refused.append(error)

    work = work_of(caught, PACKAGE)
    assert all(error.status < 500 and len(error.message) <= 1000 for error in refused)
    return work


def is_linear(cost_of: Callable[[int], int]) -> None:
    cost_of(SMALL)  # what is made once is not counted
    small, large = cost_of(SMALL), cost_of(SMALL * TIMES)
    assert large <= SLACK * TIMES * small, f"{large / small:.1f} times the work for {TIMES} times the size"


@pytest.mark.parametrize(("api", "field"), [(api, field) for api, fields in FIELDS.items() for field in fields])
def test_whatever_stands_in_a_field(understand, api, field):
    body = whole(api)
    for kind, make in VALUES.items():
        try:
            is_linear(lambda size: cost(understand, api, put(body, field, make(size))))  # noqa: B023
        except AssertionError as error:
            raise AssertionError(f"{api} {field}: {kind}: {error}") from None


def said(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def calls(n: int) -> Iterator[dict[str, Any]]:
    for number in range(n):
        yield {"type": "tool_use", "id": f"call{number}", "name": "t", "input": {"n": number}}


def results(n: int) -> Iterator[dict[str, Any]]:
    for number in range(n):
        yield {"type": "tool_result", "tool_use_id": f"call{number}", "content": "done"}


def tool(number: int, text: str = "d") -> dict[str, Any]:
    return {"name": f"t{number}", "description": text, "input_schema": {"type": "object"}}


TEXT = {"type": "text", "text": "x"}
DOCUMENT = {"type": "document", "source": {"type": "content", "content": [TEXT]}}
MANY: dict[str, Callable[[int], dict[str, Any]]] = {
    "messages": lambda n: {"messages": [said(TEXT)] * n},
    "blocks": lambda n: {"messages": [said(*[TEXT] * n)]},
    "blocks of which the last is wrong": lambda n: {"messages": [said(*[TEXT] * n, 0)]},
    "marked blocks": lambda n: {"messages": [said(*[{**TEXT, "cache_control": {"type": "ephemeral"}}] * n)]},
    "documents": lambda n: {"messages": [said(*[DOCUMENT] * n)]},
    "system blocks": lambda n: {"system": [TEXT] * n},
    "tools": lambda n: {"tools": [tool(number) for number in range(n)]},
    "tools of one name": lambda n: {"tools": [tool(0)] * n},
    "calls": lambda n: {"messages": [said(TEXT), said(*calls(n), role="assistant"), said(*results(n))]},
    "calls in the other order": lambda n: {
        "messages": [said(TEXT), said(*calls(n), role="assistant"), said(*reversed(list(results(n))))]
    },
    "calls without results": lambda n: {"messages": [said(*calls(n), role="assistant"), said(*list(results(n))[:-1])]},
    "results without calls": lambda n: {"messages": [said(TEXT), said(*results(n))]},
    "results between text": lambda n: {"messages": [said(*(part for one in results(n) for part in (one, TEXT)))]},
    "thinking": lambda n: {
        "messages": [said(TEXT), said(*[{"type": "thinking", "thinking": "x", "signature": "y"}] * n, role="assistant")]
    },
    "private use in many blocks": lambda n: {"messages": [said(*[{**TEXT, "text": "\ue000" * 9}] * n)]},
    "stop sequences": lambda n: {"stop_sequences": ["ab"] * n},
    "references to a large tool": lambda n: {
        "tools": [tool(0), {**tool(1), "description": "long " * n, "defer_loading": True}],
        "messages": [
            said(TEXT),
            said(*calls(1), role="assistant"),
            said({**next(iter(results(1))), "content": [{"type": "tool_reference", "tool_name": tool(1)["name"]}] * n}),
        ],
    },
    "calls that are cleared": lambda n: {
        "context_management": {
            "edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 0}}]
        },
        "messages": [said(TEXT), said(*calls(n), role="assistant"), said(*results(n))],
    },
    "system messages": lambda n: {"messages": [said(TEXT), said(TEXT, role="system")] * n},
    "turns": lambda n: {"messages": [said(TEXT), said(TEXT, role="assistant")] * n},
}


@pytest.mark.parametrize("many", MANY)
def test_however_many_there_are(understand, many):
    body = {**whole("messages"), "tools": []}
    tools = [{"name": "t", "input_schema": {"type": "object"}}]

    def made(size: int) -> dict[str, Any]:
        more = MANY[many](size)
        return {**body, **({"tools": tools} if "call" in many or "result" in many else {}), **more}

    is_linear(lambda size: cost(understand, "messages", made(size)))


def test_duplicates_escapes_and_broken_ends_are_linear(understand):
    pieces: list[Callable[[int], bytes]] = [
        lambda n: b'{"model":"tiny",' + b'"a":1,' * n + b'"b":2}',
        lambda n: b'{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"' + b"\\u00e9" * n + b'"}]}',
        lambda n: b'{"model":"' + b"\\ud83d\\ude00" * n + b'"}',
        lambda n: b'{"model":"' + b"\\ud83d" * n + b'"}',
        lambda n: b'{"model":' + b"9" * n + b"}",
        lambda n: b"[" * n,
        lambda n: b'"' + b'\\"' * n,
        lambda n: b" " * n,
        lambda n: b"\xff" * n,
    ]

    for make in pieces:
        is_linear(lambda size: refusing(lambda: understand("messages", make(size))))  # noqa: B023


class Searched(str):
    """Counts the characters that searches read."""

    read = 0

    def find(self, sub: str, start: int = 0, *_: Any) -> int:  # type: ignore[override]
        at = super().find(sub, start)
        Searched.read += (len(self) if at < 0 else at + len(sub)) - start
        return at


@pytest.mark.parametrize("form", ["whole", "function", "indented", "own"])
def test_tools_are_found_in_one_pass_over_the_prompt(form):
    """In whichever form a template shows them: the other forms are looked for once, not for every tool."""

    def read(n: int) -> int:
        functions = [{"name": f"t{number}", "parameters": {"type": "object"}} for number in range(n)]
        tools = [{"type": "function", "function": function} for function in functions]
        shown = functions if form == "function" else tools
        text = "\n".join(json.dumps(one, indent=4 if form == "indented" else None) for one in shown)
        if form == "own":
            text = "".join(f"type {one['name']} = any;" for one in functions)
        turns = [
            Turn("tools", tuple(ContentBlock.of_value(one) for one in tools)),
            Turn("user", (ContentBlock("x"),)),
        ]
        Searched.read = 0
        places = places_of(turns, [Searched(text), Searched("end")]).places
        assert len(places[0]) == n
        return Searched.read

    is_linear(read)


def test_the_counter_sees_what_is_not_linear():
    """As the search for unused marks and the check of results once were."""

    def runs(text: str) -> None:
        mark = "\ue000"
        while mark in text:
            mark += "\ue000"

    def lists(names: list[int]) -> None:
        assert [name for name in names if name not in names] == []

    for slow, make in ((runs, lambda n: "\ue000" * n), (lists, lambda n: list(range(n)))):
        with pytest.raises(AssertionError, match="times the work"):
            is_linear(lambda size: work_of(lambda: slow(make(size)), __file__))  # noqa: B023
    is_linear(lambda size: work_of(lambda: sorted(str(number) for number in range(size)), __file__))


def test_a_large_body_is_parsed_in_memory_of_its_own_size():
    import tracemalloc

    data = json.dumps({**whole("messages"), "messages": [said(*[TEXT] * 20_000)]}).encode()

    tracemalloc.start()
    try:
        parse(data, MessagesRequest, BodyLimits.of(GatewayConfig()))
        assert tracemalloc.get_traced_memory()[1] < 60 * len(data)
    finally:
        tracemalloc.stop()
