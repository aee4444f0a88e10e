"""Every refusal of the contract, through the real `anthropic` client against the running service."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
import requests

from tests.polling import PATIENCE

pytestmark = pytest.mark.cluster


def user(*blocks: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}], **more}


def text(value: str = "Hello", **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


MARK, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
MARKED = {"cache_control": MARK}
TOOL: dict[str, Any] = {"name": "look", "description": "Look there.", "input_schema": {"type": "object"}}
CALL: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "There."}
THOUGHT: dict[str, Any] = {"type": "thinking", "thinking": "hm", "signature": "s"}
PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}


def answered(*blocks: Any) -> list[Any]:
    """Return messages in which the assistant's last one has these blocks, and the user's answer to them."""
    return [turn("user", text()), turn("assistant", *blocks), turn("user", text("And?"))]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # items 1, 2
    "five marks": (
        user(*[text(**MARKED)] * 5),
        r"A maximum of 4 blocks with cache_control may be provided\. Found 5\.",
    ),
    "five marks over all parts": (
        user(*[text(**MARKED)] * 3, tools=[TOOL | MARKED], system=[text(**MARKED)]),
        r"Found 5\.",
    ),
    "top-level as the fifth": (user(*[text(**MARKED)] * 4, text(), **MARKED), r"Found 5\."),
    "top-level against the last block": (user(text(**MARKED), cache_control=HOUR), "marked with ttl '5m' already"),
    "unknown TTL": (user(text(cache_control=MARK | {"ttl": "2h"})), "'2h' is not one of '5m', '1h'"),
    "unknown TTL, top-level": (user(text(), cache_control=MARK | {"ttl": "1d"}), "'1d' is not one of"),
    "unknown type of mark": (user(text(cache_control={"type": "persistent"})), "ephemeral"),
    # item 4
    "marked thinking": (
        {"messages": answered(THOUGHT | MARKED, text())},
        "cache_control: cannot be set for thinking blocks",
    ),
    "marked redacted thinking": (
        {"messages": answered({"type": "redacted_thinking", "data": "x"} | MARKED, text())},
        "cannot be set for thinking blocks",
    ),
    "marked empty text": (user(text("", **MARKED)), "cannot be set for empty text"),
    "marked empty system text": (user(text(), system=[text("", **MARKED)]), "cannot be set for empty text"),
    "marked empty document": (
        user({"type": "document", "source": {"type": "text", "data": ""}} | MARKED),
        "cannot be set for empty text",
    ),
    "marked text within a result": (
        {"messages": [*answered(CALL)[:2], turn("user", RESULT | {"content": [text(**MARKED)]})]},
        "cannot be set for content within a block",
    ),
    "marked text within a document": (
        user({"type": "document", "source": {"type": "content", "content": [text(**MARKED)]}}),
        "cannot be set for content within a block",
    ),
    # item 6
    "an hour after 5 minutes": (
        user(text(**MARKED), text(cache_control=HOUR)),
        "must not come after a block with ttl '5m'",
    ),
    "an hour in messages, 5 minutes in tools": (
        user(text(cache_control=HOUR), tools=[TOOL | MARKED]),
        "must not come after",
    ),
    "top-level hour after 5 minutes": (
        user(text(), system=[text(**MARKED)], cache_control=HOUR),
        "must not come after",
    ),
    # item 10
    "an image": (user(PIXEL, text()), "takes text only, no images"),
    "an image within a result": (
        {"messages": [*answered(CALL)[:2], turn("user", RESULT | {"content": [PIXEL]})]},
        "takes text only, no images",
    ),
    "a PDF": (user(PDF), "content.0.source: this server's model takes text only, no PDF documents"),
    "a search result": (user({"type": "search_result", "source": "x", "title": "x", "content": []}), "search_result"),
    "a tool of the server": (
        user(text(), tools=[{"type": "web_search_20250305", "name": "web_search"}]),
        "tools.0: web_search_20250305: this server runs no tools",
    ),
    "a tool that Anthropic describes": (
        user(text(), tools=[{"type": "bash_20250124", "name": "bash"}]),
        "tools.0: bash_20250124: this server knows no such tool",
    ),
    "a tool without a schema": (user(text(), tools=[{"name": "look"}]), "input_schema"),
    "a schema that is no object": (user(text(), tools=[TOOL | {"input_schema": {"type": "string"}}]), "object"),
    "a tool's name with a blank": (user(text(), tools=[TOOL | {"name": "look here"}]), "name"),
    "two tools of one name": (user(text(), tools=[TOOL, TOOL]), "names must be unique"),
    "a tool choice without tools": (user(text(), tool_choice={"type": "auto"}), "only allowed with tools"),
    "a forced call of no tool": (
        user(text(), tools=[TOOL], tool_choice={"type": "tool", "name": "absent"}),
        "tool_choice: there is no tool 'absent'",
    ),
    # conversations
    "a call without a result": (
        {"messages": answered(CALL)},
        "tool_use 'toolu_1': the next message has no tool_result",
    ),
    "a call at the end": ({"messages": answered(CALL)[:2]}, "tool_use 'toolu_1'"),
    "a result without a call": (user(RESULT), "tool_result 'toolu_1': the message before has no tool_use"),
    "a result of another call": (
        {"messages": [*answered(CALL)[:2], turn("user", RESULT, RESULT | {"tool_use_id": "toolu_2"})]},
        "tool_result 'toolu_2'",
    ),
    "two results of one call": (
        {"messages": [*answered(CALL)[:2], turn("user", RESULT, RESULT)]},
        "two results for one tool_use",
    ),
    "two calls of one id": ({"messages": [*answered(CALL, CALL)[:2], turn("user", RESULT)]}, "ids must be unique"),
    "a text before a result": (
        {"messages": [*answered(CALL)[:2], turn("user", text(), RESULT)]},
        "tool_result blocks must come before other content",
    ),
    "a call by the user": (user(CALL), "tool_use"),
    "thinking by the user": (user(THOUGHT), "thinking"),
    "a message without content": (user(), "at least one content block"),
    "an answer without content": ({"messages": answered()}, "at least one content block"),
    "no message": ({"messages": []}, "messages"),
    "a role of its own": ({"messages": [turn("tool", text())]}, "messages.0: role 'tool' is not supported here"),
    "thinking without a budget": (user(text(), thinking={"type": "enabled"}), "budget_tokens"),
    "a budget that leaves no room": (
        user(text(), thinking={"type": "enabled", "budget_tokens": 1024}),
        "thinking.budget_tokens: 1024 must be less than max_tokens",
    ),
    "a variable that the template does not take": (
        user(text(), warmkv={"chat_template_kwargs": {"enable_thinking": False}}),
        "this model's template takes none, not 'enable_thinking'",
    ),
    "an edit that is not there": (
        user(text(), context_management={"edits": [{"type": "compact_20260112"}]}),
        "context_management.edits.0: type 'compact_20260112' is not supported here",
    ),
    "compaction": (user(text(), compaction={}), "compaction: this server does not support it"),
    "two formats": (
        user(
            text(),
            output_format={"type": "json_schema", "schema": {"type": "object"}},
            output_config={"format": {"type": "json_schema", "schema": {"type": "array"}}},
        ),
        "output_format: differs from output_config.format",
    ),
    "tools that are all deferred": (user(text(), tools=[TOOL | {"defer_loading": True}]), "all have defer_loading"),
    "a marked deferred tool": (user(text(), tools=[TOOL | {"defer_loading": True} | MARKED]), "defer_loading"),
    "a reference to no tool": (
        {
            "messages": [
                *answered(CALL)[:2],
                turn("user", RESULT | {"content": [{"type": "tool_reference", "tool_name": "find"}]}),
            ]
        },
        "messages.2.content.0.content.0.tool_name: no tool is named 'find'",
    ),
    # item 13, and limits
    "pre-warming as a stream": (user(text(), max_tokens=0, stream=True), "stream: must be false when max_tokens is 0"),
    "more than the context": (user(text("a " * 5000)), r"prompt is too long: 50\d\d tokens > 4096 maximum"),
    "less than nothing": (user(text(), max_tokens=-1), "max_tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(cluster, case):
    given, message = REFUSED[case]
    whole = {"model": cluster.config.model.name, "max_tokens": 1, **given}
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        cluster.anthropic("refused").post("/v1/messages", body=whole, cast_to=object)
    answer = caught.value.body
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["request_id"] == caught.value.response.headers["request-id"]


def test_errors_of_other_kinds(cluster):
    client, body = cluster.anthropic("refused"), user(text(), max_tokens=1)
    with pytest.raises(anthropic.NotFoundError, match="model: gpt") as missing:
        client.messages.create(**body, model="gpt")
    assert missing.value.body["request_id"] == missing.value.response.headers["request-id"]
    with pytest.raises(anthropic.NotFoundError, match="/v1/nothing"):
        client.get("/v1/nothing", cast_to=object)
    with pytest.raises(anthropic.RequestTooLargeError, match="max_body_bytes"):
        client.messages.create(**user(text("x" * cluster.config.gateway.max_body_bytes), max_tokens=1), model="tiny")
    broken = requests.post(f"{cluster.url}/v1/messages", data=b"{", timeout=PATIENCE)
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("version", ["2023-01-01", "2023-06-01", "2026-10-21", None])
def test_known_versions_are_accepted(cluster, version):
    headers = {"anthropic-version": version} if version else {}
    body = {"model": cluster.config.model.name, **user(text())}
    answer = requests.post(f"{cluster.url}/v1/messages/count_tokens", json=body, headers=headers, timeout=PATIENCE)
    assert answer.status_code == 200
    assert answer.headers["request-id"].startswith("req_")


def test_an_unknown_version_is_refused(cluster):
    with pytest.raises(anthropic.BadRequestError, match="anthropic-version: '1999-01-01' is not one of 2023-01-01"):
        cluster.anthropic("refused").messages.create(
            **user(text(), max_tokens=1), model="tiny", extra_headers={"anthropic-version": "1999-01-01"}
        )
