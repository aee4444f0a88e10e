"""Prompts beyond the context: the words by which clients of each API know that they should compact, and counts."""

from __future__ import annotations

import asyncio
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.unit.platform.exchanges import Exchange, Gateway, arrival, message
from warmkv.platform.gateway.apis import tokens
from warmkv.platform.gateway.apis.tokens import Piece, token_counts
from warmkv.platform.gateway.intake.parsing import Parsing
from warmkv.replicas.loading.tokenizer import load_tokenizer

CONTEXT = 4096
TOO_LONG = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")  # as Claude Code looks for it
LONGER = "a " * 5000  # than the context, and soon counted
FAR_LONGER = "a " * 50_000


def ask(folder: Path, path: str, body: dict[str, Any], *flags: str) -> Exchange:
    async def run() -> Exchange:
        gateway = Gateway(folder, *flags)
        return await Exchange(gateway, path, {"model": gateway.config.model.name, **body}).whole()

    return asyncio.run(run())


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def counted(folder: Path, text: str) -> int:
    found: int = ask(folder, "/v1/messages/count_tokens", said(text)).json["input_tokens"]
    return found


def test_the_messages_api_says_how_many_tokens_there_are(tmp_path):
    refused = ask(tmp_path, "/v1/messages", said(LONGER, max_tokens=1))
    assert (refused.status, refused.json["error"]["type"]) == (400, "invalid_request_error")
    match = TOO_LONG.fullmatch(refused.error)
    assert match is not None
    assert [int(number) for number in match.groups()] == [counted(tmp_path, LONGER), CONTEXT]


def test_where_not_all_is_counted_it_says_at_least(tmp_path):
    for text in (FAR_LONGER, "x" * 2_000_000):  # the second is not tokenized at all
        refused = ask(tmp_path, "/v1/messages", said(text, max_tokens=1))
        match = TOO_LONG.match(refused.error)
        assert match is not None
        assert CONTEXT < int(match[1]) <= counted(tmp_path, text)
        assert refused.error.endswith("maximum (at least: the rest was not counted)")


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": ("/v1/chat/completions", said(LONGER)),
    "prompt": ("/v1/completions", {"prompt": LONGER}),
    "input": ("/v1/responses", {"input": LONGER}),
}


@pytest.mark.parametrize("field", BODIES)
def test_the_openai_apis_have_the_code_and_the_words_of_openai(tmp_path, field):
    path, body = BODIES[field]
    refused = ask(tmp_path, path, body)
    error = refused.json["error"]
    assert (refused.status, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert re.fullmatch(
        rf"This model's maximum context length is {CONTEXT} tokens\. However, your {field} resulted in \d+ tokens\. "
        rf"Please reduce the length of the {field}\.",
        error["message"],
    )


def test_the_sdks_raise_what_agents_look_for(server):
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai().chat.completions.create(model="tiny", **said(LONGER))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(anthropic.BadRequestError, match=TOO_LONG.pattern):
        server.anthropic().messages.create(model="tiny", **said(LONGER), max_tokens=1)


ROOMY = "a " * 3000


@pytest.mark.parametrize(
    ("path", "body", "words", "code"),
    [
        (
            "/v1/messages",
            said(ROOMY, max_tokens=2000),
            r"input length and `max_tokens` exceed context limit: \d+ \+ 2000 > 4096, decrease",
            None,
        ),
        (
            "/v1/chat/completions",
            said(ROOMY, max_tokens=2000),
            r"context length is 4096 tokens\. However, you requested \d+ tokens \(\d+ in the messages, 2000 in the c",
            "context_length_exceeded",
        ),
        (
            "/v1/completions",
            {"prompt": ROOMY, "max_tokens": 2000},
            r"\d+ in the prompt, 2000 in the completion",
            "context_length_exceeded",
        ),
        (
            "/v1/responses",
            {"input": ROOMY, "max_output_tokens": 2000},
            r"\d+ in the input, 2000 in the completion",
            "context_length_exceeded",
        ),
    ],
)
def test_an_answer_beyond_the_context_is_refused_where_it_is_not_cut(tmp_path, path, body, words, code):
    assert ask(tmp_path, path, body).status == 200
    refused = ask(tmp_path, path, body, "gateway.strict=true")
    assert refused.status == 400
    assert re.search(words, refused.error)
    assert refused.json["error"].get("code") == code


def test_a_prompt_that_fills_the_context_leaves_no_room_for_an_answer(tmp_path):
    assert ask(tmp_path, "/v1/completions", {"prompt": [5] * (CONTEXT - 1)}).status == 200
    refused = ask(tmp_path, "/v1/completions", {"prompt": [5] * CONTEXT})
    assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")
    assert f"({CONTEXT} in the prompt, 1 in the completion)" in refused.error


# --- count_tokens


def test_tokens_are_counted_beyond_the_context(tmp_path):
    """As often as the text is repeated: by the cheap way, by the refused one, and by slices."""
    tokenizer = load_tokenizer(Gateway(tmp_path).config.model)
    around = set()
    for words in (10, 5000, 50_000, 300_000):
        text = "word " * words
        around.add(counted(tmp_path, text) - len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    assert len(around) == 1  # what the template adds


def test_an_edit_counts_what_it_clears_beyond_the_context(tmp_path):
    turns = [{"role": "user", "content": "Hello"}]
    for number in range(4):
        use = {"type": "tool_use", "id": f"t{number}", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": FAR_LONGER if not number else "x"}
        turns += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 1000}}
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    body = {"messages": turns, "tools": tools}
    whole = ask(tmp_path, "/v1/messages/count_tokens", body).json
    left = ask(tmp_path, "/v1/messages/count_tokens", {**body, "context_management": {"edits": [edit]}}).json
    assert whole["input_tokens"] > 50_000 > CONTEXT > left["input_tokens"]
    assert left["context_management"]["original_input_tokens"] == whole["input_tokens"]


@pytest.mark.parametrize("text", ["word, ", "\ue000", "a" * 9, "\n"])
def test_slices_have_the_tokens_of_the_whole_but_for_a_few(text, tmp_path):
    tokenizer = load_tokenizer(Gateway(tmp_path).config.model)
    pieces = [Piece("<|im_start|>user\n", "template"), Piece(text * (3 * tokens.SLICE // len(text)), "content", 0)]
    whole = sum(map(len, tokens._encode(tokenizer, pieces)))
    assert whole <= sum(token_counts(tokenizer, pieces)) <= whole + 6


def test_to_count_takes_memory_of_the_text_not_of_its_tokens(tmp_path):
    gateway = Gateway(tmp_path)
    tokenizer = load_tokenizer(gateway.config.model)
    parsing = Parsing(gateway.service, tokenizer, CONTEXT)
    data = json.dumps(message(gateway, "\ue000" * 1_000_000), ensure_ascii=False).encode()
    tracemalloc.start()
    try:
        answer, _ = parsing.count(arrival(gateway.service), data, tokenizer)
        assert tracemalloc.get_traced_memory()[1] < 12 * len(data)
    finally:
        tracemalloc.stop()
    assert answer["input_tokens"] > 1_000_000
