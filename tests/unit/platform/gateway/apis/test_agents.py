"""What agents send to the Messages API, and that their prefixes stay warm: through the real client and engine."""

from __future__ import annotations

import itertools
import json
from typing import Any

import anthropic
import pytest
import requests

from tests.polling import PATIENCE
from tests.unit.platform.gateway.apis import claude_code
from tests.unit.platform.gateway.apis.claude_code import MARK, text, tool
from warmkv.replicas.loading.tokenizer import load_tokenizer

LONG = "def rotate(keys, angles):\n    return keys * angles.cos()\n" * 20


def ask(server: Any, key: str, **body: Any) -> Any:
    """Return the answer of the beta client, whose path has `?beta=true`."""
    body.setdefault("model", server.config.model.name)
    stream = body.pop("stream", False)
    assert not stream
    extra = {"temperature": 0, **body.pop("extra", {})}
    return server.anthropic(key).beta.messages.create(**{"max_tokens": 4, **body}, extra_body=extra)


def shown(server: Any) -> str:
    """Return the prompt that reached the engine last."""
    text: str = load_tokenizer(server.config.model).decode(server.requests[-1].token_ids)
    return text


@pytest.mark.parametrize("calls", [1, 25])
def test_the_second_turn_of_claude_code_reads_what_the_first_wrote(server, calls):
    """Another billing line, a round of tools more; every field that it sends is taken."""
    usages = []
    for turn in (1, 2):
        body = claude_code.request(server.config.model.name, turn, calls)
        answer = requests.post(
            f"{server.url}/v1/messages?beta=true",
            json=body,
            headers={**claude_code.HEADERS, "authorization": f"Bearer claude {calls}"},
            timeout=PATIENCE,
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["context_management"] == {"applied_edits": []}
        usages.append(answer.json()["usage"])
    totals = [
        usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
        for usage in usages
    ]
    assert usages[0]["cache_read_input_tokens"] == 0
    for before, usage in itertools.pairwise(usages):
        assert (
            usage["cache_read_input_tokens"]
            == before["cache_creation_input_tokens"] + before["cache_read_input_tokens"]
        )
    if calls == 1:
        assert usages[1]["cache_read_input_tokens"] > 0.8 * totals[1]
    prompt = shown(server)
    assert "billing" not in prompt
    assert "Friday" in prompt
    assert '"name": "Read"' in prompt
    assert '"name": "WebFetch"' not in prompt


def test_the_billing_line_is_shown_where_the_setting_is_off(serve):
    plain = serve("engine.threads=1", "gateway.omit_billing_line=false")
    for turn in (1, 2):
        usage = ask(plain, "billing", **claude_code.request(plain.config.model.name, turn, 1)).usage
        assert usage.cache_read_input_tokens == 0
    assert "x-anthropic-billing-header" in shown(plain)


BILLING = "x-anthropic-billing-header: cc_version=1; cch=0;"


@pytest.mark.parametrize(
    ("system", "left"),
    [
        (BILLING, ""),
        (f"{BILLING}\nBe brief.", "Be brief."),
        ([text(BILLING)], ""),
        ([text(f"{BILLING}\nBe brief."), text("Then stop.")], "Be brief.\nThen stop."),
        ([text("Be brief."), text(BILLING)], f"Be brief.\n{BILLING}"),
        (f"See {BILLING}", f"See {BILLING}"),
    ],
)
def test_the_billing_line_is_left_out_where_it_comes_first(server, system, left):
    ask(server, "line", system=system, messages=[{"role": "user", "content": "x"}])
    prompt = shown(server)
    assert prompt.startswith(f"<|im_start|>system\n{left}<|im_end|>" if left else "<|im_start|>user")


def test_a_system_message_stands_where_it_is(server):
    said = [
        {"role": "user", "content": "one"},
        {"role": "system", "content": [text("from now on in French")]},
        {"role": "assistant", "content": "un"},
        {"role": "system", "content": "and louder"},
        {"role": "user", "content": "two"},
    ]
    ask(server, "system", system="Be brief.", messages=said)
    roles = [part.split("\n")[0] for part in shown(server).split("<|im_start|>")[1:]]
    assert roles == ["system", "user", "system", "assistant", "system", "user", "assistant"]


def test_a_marked_system_message_is_read_again(server):
    said: list[Any] = [
        {"role": "user", "content": LONG},
        {"role": "system", "content": [text("in French", **MARK)]},
    ]
    first = ask(server, "marked system", messages=said).usage
    second = ask(server, "marked system", messages=[*said, {"role": "user", "content": "and?"}]).usage
    assert first.cache_creation_input_tokens == second.cache_read_input_tokens > 400


def test_a_deferred_tool_is_shown_where_a_result_refers_to_it(server):
    """So that the prefix stays what it was when a tool is found."""
    tools = [tool("ToolSearch", **MARK), tool("WebFetch", defer_loading=True)]
    said: list[Any] = [{"role": "user", "content": "fetch it"}]
    first = ask(server, "deferred", tools=tools, messages=said).usage
    assert "WebFetch" not in shown(server)
    said += [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "ToolSearch", "input": {}}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "tool_reference", "tool_name": "WebFetch"}] * 2,
                }
            ],
        },
    ]
    second = ask(server, "deferred", tools=tools, messages=said).usage
    assert second.cache_read_input_tokens == first.cache_creation_input_tokens > 0
    assert shown(server).count('"name": "WebFetch"') == 1
    found = shown(server).partition("<tools>")[2].partition("<tools>")[2].partition("</tools>")[0]
    assert json.loads(found)["function"]["name"] == "WebFetch"


def rounds(number: int, **more: Any) -> list[dict[str, Any]]:
    """Return a conversation in which a tool was called so many times, each result some 60 tokens long."""
    said: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for at in range(number):
        call = {"type": "tool_use", "id": f"t{at}", "name": "look" if at else "keep", "input": {"place": f"place {at}"}}
        result = {"type": "tool_result", "tool_use_id": f"t{at}", "content": f"result {at}: " + "long " * 60, **more}
        said += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return said


CLEAR: dict[str, Any] = {"type": "clear_tool_uses_20250919"}


@pytest.mark.parametrize(
    ("edit", "cleared"),
    [
        ({"trigger": {"type": "tool_uses", "value": 3}, "keep": {"type": "tool_uses", "value": 1}}, {0, 1, 2}),
        ({"trigger": {"type": "tool_uses", "value": 4}}, set()),
        ({"trigger": {"type": "input_tokens", "value": 100}}, {0}),
        ({"trigger": {"type": "input_tokens", "value": 100_000}}, set()),
        ({"trigger": {"type": "tool_uses", "value": 0}, "keep": {"type": "tool_uses", "value": 0}}, {0, 1, 2, 3}),
        ({"trigger": {"type": "tool_uses", "value": 0}, "exclude_tools": ["keep"]}, set()),
        (
            {
                "trigger": {"type": "tool_uses", "value": 0},
                "clear_at_least": {"type": "input_tokens", "value": 1000},
            },
            set(),
        ),
    ],
)
def test_results_are_cleared_as_the_edit_says(server, edit, cleared):
    body = {"messages": rounds(4), "context_management": {"edits": [CLEAR | edit]}}
    whole = ask(server, "edits", messages=rounds(4)).usage.input_tokens
    answer = ask(server, "edits", **body)
    prompt = shown(server)
    assert {at for at in range(4) if f"result {at}" not in prompt} == cleared
    assert all(f"place {at}" in prompt for at in range(4))
    applied = answer.context_management.applied_edits
    assert [edit.cleared_tool_uses for edit in applied] == ([len(cleared)] if cleared else [])
    freed = sum(edit.cleared_input_tokens for edit in applied)
    assert whole - freed == answer.usage.input_tokens
    counted = server.anthropic("edits").beta.messages.count_tokens(model=server.config.model.name, **body)
    assert counted.input_tokens == answer.usage.input_tokens
    assert counted.context_management.original_input_tokens == whole


def test_inputs_of_cleared_calls_are_cleared_if_that_is_asked_for(server):
    uses: dict[str, Any] = {"trigger": {"type": "tool_uses", "value": 0}, "keep": {"type": "tool_uses", "value": 1}}
    for chosen, left in ((True, {2}), (["look"], {0, 2}), (False, {0, 1, 2})):
        edit = {**CLEAR, **uses, "clear_tool_inputs": chosen}
        ask(server, "inputs", messages=rounds(3), context_management={"edits": [edit]})
        assert {at for at in range(3) if f"place {at}" in shown(server)} == left


def test_what_is_beyond_the_context_may_be_cleared(server):
    said = rounds(60)
    edit = CLEAR | {"trigger": {"type": "input_tokens", "value": 1000}}
    answer = ask(server, "long", messages=said, context_management={"edits": [edit]})
    (applied,) = answer.context_management.applied_edits
    assert applied.cleared_tool_uses == 57
    assert answer.usage.input_tokens + applied.cleared_input_tokens > server.engine.max_context


def test_a_stream_tells_its_edits_at_its_end(server):
    edit = {**CLEAR, "trigger": {"type": "tool_uses", "value": 0}}
    with server.anthropic("streamed edits").beta.messages.stream(
        model=server.config.model.name,
        max_tokens=2,
        messages=rounds(4),
        context_management={"edits": [edit]},
        betas=["context-management-2025-06-27"],
    ) as events:
        (delta,) = [event for event in events if event.type == "message_delta"]
        final = events.get_final_message()
    assert [edit.cleared_tool_uses for edit in delta.context_management.applied_edits] == [1]
    assert final.context_management == delta.context_management


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("all deferred", {"tools": [tool("look", defer_loading=True)]}, "all have defer_loading"),
    ("deferred and marked", {"tools": [tool("a"), tool("look", defer_loading=True, **MARK)]}, "tools.1: cache_control"),
    ("two of one name", {"tools": [tool("a"), tool("b"), tool("a")]}, "tools.2.name: 'a' is the name of tool 0"),
    ("no name", {"tools": [{"input_schema": {"type": "object"}}]}, "tools.0.name"),
    ("compaction", {"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits.0"),
    (
        "an edit twice",
        {"context_management": {"edits": [CLEAR, CLEAR]}},
        "context_management.edits: each type of edit can be given once",
    ),
    (
        "thinking behind",
        {"context_management": {"edits": [CLEAR, {"type": "clear_thinking_20251015"}]}},
        "clear_thinking_20251015 must come first",
    ),
    ("a budget of nothing", {"thinking": {"type": "enabled"}}, "budget_tokens"),
    ("too small a budget", {"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
    (
        "a budget beyond max_tokens",
        {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 100},
        "thinking.budget_tokens: 2000 must be less than max_tokens",
    ),
    ("an effort", {"output_config": {"effort": "huge"}}, "output_config.effort"),
    (
        "a variable",
        {"extra": {"warmkv": {"chat_template_kwargs": {"enable_thinking": True}}}},
        "this model's template takes none, not 'enable_thinking'",
    ),
    ("a variable of rendering", {"extra": {"warmkv": {"chat_template_kwargs": {"tools": "x"}}}}, "not 'tools'"),
]


@pytest.mark.parametrize(("body", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_is_refused_and_nothing_is_computed(server, body, message):
    begun, lines = len(server.requests), len(server.records)
    with pytest.raises(anthropic.BadRequestError, match=message):
        ask(server, "refused", **{"messages": [{"role": "user", "content": "x"}], **body})
    assert len(server.requests) == begun
    assert len(server.records) == lines


CALL = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "x"}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([[RESULT]], "messages.0.content.0: tool_result 'a': the message before has no tool_use of that id"),
        ([[text("x")], [text("y"), CALL]], "messages.1.content.1: tool_use 'a': the next message has no tool_result"),
        ([[text("x")], [CALL], [text("y")]], "messages.1.content.0: tool_use 'a': the next message has no tool_result"),
        ([[text("x")], [CALL], [RESULT, RESULT]], "messages.2.content.1: tool_result 'a': two results"),
        ([[text("x")], [CALL, CALL], [RESULT]], "messages.1.content.1: tool_use 'a': ids must be unique"),
    ],
)
def test_calls_and_results_that_do_not_belong_together_are_refused_with_their_place(server, said, message):
    messages = [
        {"role": "assistant" if number % 2 else "user", "content": content} for number, content in enumerate(said)
    ]
    with pytest.raises(anthropic.BadRequestError, match=message):
        ask(server, "refused", messages=messages)


def test_a_system_message_may_stand_between_a_call_and_its_result(server):
    said = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [CALL]},
        {"role": "system", "content": "a minute has passed"},
        {"role": "user", "content": [RESULT]},
    ]
    assert ask(server, "between", messages=said).usage.output_tokens > 0
