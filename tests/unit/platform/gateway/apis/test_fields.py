"""Fields of requests: refused by name, left out and listed, or taken; limits of new tokens; names of the model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.platform import exchanges
from tests.unit.platform.exchanges import Exchange, Gateway, chat, message
from warmkv.config import ConfigError, load
from warmkv.platform.gateway.apis.chat_parsing.format import ResponseFormat
from warmkv.replicas.loading.tokenizer import load_tokenizer
from warmkv.replicas.protocol import GenerateRequest

MESSAGES, CHAT, COMPLETIONS = "/v1/messages", "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"


class Asked(Gateway):
    """Keeps the requests that reach the replica."""

    def __init__(self, folder: Path, *flags: str) -> None:
        super().__init__(folder, *flags)
        self.asked: list[GenerateRequest] = []

    def answer(self, attempt: Any) -> Any:
        self.asked.append(attempt.request)
        return super().answer(attempt)

    @property
    def max_tokens(self) -> list[int]:
        return [request.sampling.max_tokens for request in self.asked]


def with_template(tokenizer: Any, template: str) -> Any:
    tokenizer.chat_template = template
    return tokenizer


def body(gateway: Gateway, path: str, **more: Any) -> dict[str, Any]:
    if path == RESPONSES:
        return {"model": gateway.config.model.name, **more}
    if path == COMPLETIONS:
        return {"model": gateway.config.model.name, "prompt": "hello", **more}
    return (message if path == MESSAGES else chat)(gateway, **more)


def ask(tmp_path: Path, flags: tuple[str, ...], *requests: tuple[str, dict[str, Any]]) -> tuple[Asked, list[Exchange]]:
    """Send requests to a gateway, one after the other; of each the path, and what is added to the smallest body."""

    async def run() -> tuple[Asked, list[Exchange]]:
        gateway = Asked(tmp_path, *flags)
        return gateway, [await Exchange(gateway, path, body(gateway, path, **more)).whole() for path, more in requests]

    return asyncio.run(run())


USER = {"role": "user", "content": "Hello"}
SAID = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}],
}
OFF = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": None, "logprobs": None, "seed": None, "best_of": 1}
CLIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "langchain-openai, a plain completion": (COMPLETIONS, {"prompt": ["Hello"], "n": 1, "top_p": 1, **OFF}),
    "langchain-openai, an answer sent back": (RESPONSES, {"input": [USER, SAID, USER]}),
    "openai-agents": (
        RESPONSES,
        {
            "input": [USER],
            "instructions": "Be brief.",
            "include": [],
            "tools": [],
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"verbosity": "low"},
            "store": False,
            "metadata": {},
        },
    ),
    "litellm": (CHAT, {"n": 2, "seed": 3, "user": "a", "metadata": {"b": "c"}, "stream_options": None}),
    "load generators": (
        CHAT,
        {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 8,
            "min_tokens": 8,
            "ignore_eos": True,
            "stop": None,
        },
    ),
    "aiperf, the Messages API": (MESSAGES, {"stream": True, "ignore_eos": True}),
    "aiperf, the Responses API": (
        RESPONSES,
        {"input": [USER], "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True},
    ),
    "lm-eval": (COMPLETIONS, {"prompt": [[1, 2], [3]], "max_tokens": 8, "temperature": 0, "stop": ["a"], "seed": 1}),
    "the OpenAI SDK, what does not change the answer": (
        CHAT,
        {
            "service_tier": "auto",
            "store": True,
            "safety_identifier": "x",
            "prompt_cache_retention": "24h",
            "verbosity": "low",
            "modalities": ["text"],
            "prediction": {"type": "content", "content": "x"},
        },
    ),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_what_clients_send_is_taken_even_by_a_strict_gateway(tmp_path, client):
    _, (answer,) = ask(tmp_path, ("gateway.strict=true",), CLIENTS[client])
    assert answer.status == 200, answer.error


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, CHAT, COMPLETIONS])
def test_benchmarks_ask_every_api_to_ignore_the_end(tmp_path, path):
    said = {"input": "Hello"} if path == RESPONSES else {}
    ignoring = ({"ignore_eos": True}, {"warmkv": {"ignore_eos": True}}, {"ignore_eos": False}, {})
    gateway, _ = ask(tmp_path, (), *((path, said | more) for more in ignoring))
    assert [request.sampling.ignore_eos for request in gateway.asked] == [True, True, False, False]


def test_unknown_fields_are_left_out_and_listed(tmp_path):
    said = [{"role": "user", "content": [{"type": "text", "text": "hello", "cache_id": 1}], "\r\nx: y": 1}]
    _, exchanges = ask(
        tmp_path,
        (),
        (MESSAGES, {"nobody_knows": 1, "messages": said, "stream": True}),
        (MESSAGES + "/count_tokens", {"nobody_knows": {"a": []}}),
        (CHAT, {"nobody_knows": 1, "messages": said}),
        (COMPLETIONS, {"nobody_knows": 1, "store": None, **{f"field{number}": 0 for number in range(1000)}}),
        (COMPLETIONS, {"max_tokens": 1, "store": None}),
    )
    assert [exchange.status for exchange in exchanges] == [200] * 5
    listed = [exchange.headers.get("x-warmkv-ignored") for exchange in exchanges]
    assert listed[:3] == ["nobody_knows, ?, cache_id", "nobody_knows", "nobody_knows, ?, cache_id"]
    assert listed[3].startswith("nobody_knows, field0, ")
    assert len(listed[3]) < 1000
    assert listed[4] is None


def test_names_of_speakers_and_log_probabilities_that_are_not_included_are_listed(tmp_path):
    logprobs = {"input": "hello", "top_logprobs": 2}
    included = {**logprobs, "include": ["message.output_text.logprobs"]}
    named = {"messages": [{"role": "user", "content": "hello", "name": "ann"}]}
    _, exchanges = ask(tmp_path, (), (CHAT, named), (RESPONSES, logprobs), (RESPONSES, included))
    listed = [exchange.headers.get("x-warmkv-ignored") for exchange in exchanges]
    assert listed == ["name", "top_logprobs", None]


@pytest.mark.parametrize(
    ("path", "more", "told"),
    [
        (MESSAGES, {"temprature": 1}, "temprature: "),
        (MESSAGES, {"max_tokens": 9000}, "max_tokens: 9000 > 8192"),
        (CHAT, {"max_tokens": 9000}, "max_tokens: 9000 > 8192"),
        (MESSAGES, {"messages": [{"role": "user", "content": "x", "to": "y"}]}, "messages.0.to: "),
        (MESSAGES, {"cache_control": {"type": "ephemeral", "scope": "x"}}, "cache_control.scope: "),
        (CHAT, {"temprature": 1}, "temprature: "),
        (COMPLETIONS, {"temprature": 1}, "temprature: "),
    ],
)
def test_a_strict_gateway_refuses_what_nobody_knows(tmp_path, path, more, told):
    gateway, (refused, taken) = ask(tmp_path, ("gateway.strict=true",), (path, more), (path, {"max_tokens": 1}))
    assert (refused.status, taken.status, len(gateway.asked)) == (400, 200, 1)
    assert refused.error.startswith(told)


@pytest.mark.parametrize("path", [MESSAGES, CHAT, COMPLETIONS])
def test_a_mistake_in_our_own_options_is_refused(tmp_path, path):
    _, (refused,) = ask(tmp_path, (), (path, {"warmkv": {"polcy": "full"}}))
    assert refused.status == 400
    assert refused.error.startswith("warmkv.polcy: ")


def test_max_tokens_is_cut_to_what_there_is(tmp_path):
    flags = ("gateway.max_output_tokens=3000",)
    gateway, exchanges = ask(
        tmp_path,
        flags,
        (MESSAGES, {"max_tokens": 32_000}),
        (CHAT, {"max_tokens": 3000}),
        (COMPLETIONS, {"prompt": "a " * 2000, "max_tokens": 3000}),
        (COMPLETIONS, {"prompt": "a " * 2000}),
        (CHAT, {}),
    )
    prompts = [len(request.token_ids) for request in gateway.asked]
    assert gateway.max_tokens == [3000, 3000, 4096 - prompts[2], 4096 - prompts[3], 3000]
    told = [exchange.headers.get("x-warmkv-max-tokens") for exchange in exchanges]
    assert told == ["3000", None, str(4096 - prompts[2]), None, None]


@pytest.mark.parametrize("strict", [True, False])
def test_a_default_beyond_the_context_is_cut_without_a_word(tmp_path, strict):
    """Tell a client nothing of a limit that it did not ask for."""
    flags = ("gateway.default_output_tokens=3000", f"gateway.strict={strict}")
    long = {"prompt": "a " * 2000}
    gateway, (answer, refused) = ask(tmp_path, flags, (COMPLETIONS, long), (COMPLETIONS, {**long, "max_tokens": 3000}))
    assert gateway.max_tokens[0] == 4096 - len(gateway.asked[0].token_ids) < 3000
    assert (answer.status, "x-warmkv-max-tokens" in answer.headers) == (200, False)
    assert refused.status == (400 if strict else 200)


def test_a_thinking_budget_is_cut_with_max_tokens(tmp_path, monkeypatch):
    """Leave room for text: else all that is left would be thinking."""
    made = ResponseFormat.of
    monkeypatch.setattr(ResponseFormat, "of", lambda *args: replace(made(*args), thinking_ids=(5, 6)))
    flags = ("model.response_template=hermes", "gateway.max_output_tokens=2000")

    def thinking(tokens: int) -> dict[str, Any]:
        return {"thinking": {"type": "enabled", "budget_tokens": tokens}}

    gateway, answers = ask(
        tmp_path,
        flags,
        (MESSAGES, {"max_tokens": 16_000, **thinking(10_000)}),
        (CHAT, {"max_tokens": 16_000, "thinking_token_budget": 10_000}),
        (MESSAGES, {"max_tokens": 16_000, **thinking(1024)}),
        (CHAT, {"max_tokens": 1900, "thinking_token_budget": 1900}),
        (CHAT, {"thinking_token_budget": 10_000}),
    )
    sampled = [request.sampling for request in gateway.asked]
    assert [(one.max_tokens, one.thinking.tokens) for one in sampled] == [
        (2000, 1500),
        (2000, 1500),
        (2000, 1024),
        (1900, 1900),
        (2000, 1500),
    ]
    told = [answer.headers.get("x-warmkv-thinking-budget") for answer in answers]
    assert told == ["1500", "1500", None, None, "1500"]
    gateway, _ = ask(tmp_path, flags[:1], (MESSAGES, {"max_tokens": 16_000, **thinking(10_000)}))
    (sampling,) = (request.sampling for request in gateway.asked)
    assert sampling.thinking.tokens < sampling.max_tokens < 4096  # what the prompt leaves of the context


def test_an_endless_answer_may_exceed_the_context(tmp_path):
    policy = {"warmkv": {"policy": "streaming_llm@64"}}
    gateway, _ = ask(tmp_path, (), (COMPLETIONS, {"prompt": "a " * 200, "max_tokens": 5000, **policy}))
    assert gateway.max_tokens == [5000]


def test_a_prompt_cache_key_names_a_session_of_its_tenant(tmp_path):
    key = {"prompt_cache_key": "mine"}
    gateway, exchanges = ask(
        tmp_path, (), (CHAT, key), (COMPLETIONS, key), (CHAT, {"prompt_cache_key": "b"}), (CHAT, {})
    )
    first, second, other, none = (request.session for request in gateway.asked)
    assert first == second != other
    assert none == ""
    assert "mine" not in first
    assert [record.session for record in gateway.records] == [first, first, other, ""]
    assert not any("x-warmkv-ignored" in exchange.headers for exchange in exchanges)


@pytest.mark.parametrize("path", [MESSAGES, CHAT])
def test_a_top_k_beyond_all_vocabularies_is_a_number_of_the_engine(tmp_path, path):
    gateway, exchanges = ask(tmp_path, (), (path, {"top_k": 10**400}), (path, {"top_k": 40}))
    assert [exchange.status for exchange in exchanges] == [200, 200]
    assert [request.sampling.top_k for request in gateway.asked] == [2**31 - 1, 40]


def test_headers_of_agents_name_a_session_before_the_body_does(tmp_path):
    async def run():
        gateway = Asked(tmp_path)
        for headers, more in (
            ({}, {"metadata": {"user_id": "a"}}),
            ({"x-claude-code-session-id": "b"}, {"metadata": {"user_id": "a"}}),
            ({"session_id": "b"}, {}),
            ({"x-session-id": "a"}, {}),
            ({}, {"metadata": {"user_id": None}}),
        ):
            await Exchange(gateway, MESSAGES, body(gateway, MESSAGES, **more), headers).whole()
        return [record.session for record in gateway.records]

    first, second, third, fourth, none = asyncio.run(run())
    assert first == fourth != second == third
    assert none == ""


def test_a_template_gets_the_effort_and_the_variables_that_it_takes(tmp_path, monkeypatch):
    """Those that it does not take change nothing; the tiny model's takes none."""
    fields = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    _, (left_out,) = ask(tmp_path, (), (CHAT, fields))
    assert (left_out.status, left_out.headers["x-warmkv-ignored"]) == (
        200,
        "reasoning_effort, chat_template_kwargs.enable_thinking",
    )
    gateway, (refused, own) = ask(
        tmp_path, ("gateway.strict=true",), (CHAT, fields), (CHAT, {"warmkv": {"chat_template_kwargs": {"a": 1}}})
    )
    assert (refused.status, own.status, gateway.asked) == (400, 400, [])
    assert "chat_template_kwargs: this model's template takes none, not 'enable_thinking'" in refused.error

    template = gateway.tokenizer.chat_template
    takes = "{{ reasoning_effort }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}" + template
    monkeypatch.setattr(exchanges, "load_tokenizer", lambda model: with_template(load_tokenizer(model), takes))
    gateway, answers = ask(
        tmp_path,
        (),
        (CHAT, {"reasoning_effort": "minimal"}),
        (CHAT, {"reasoning_effort": "none"}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}),
        (CHAT, {"warmkv": {"chat_template_kwargs": {"enable_thinking": True}}}),
    )
    texts = [gateway.tokenizer.decode(request.token_ids).partition("<|im_start|>")[0] for request in gateway.asked]
    assert texts == ["low", "False", "True", "True"]
    assert not any("x-warmkv-ignored" in answer.headers for answer in answers)


def test_thinking_and_effort_that_the_template_does_not_take_are_listed(tmp_path, monkeypatch):
    """Thinking where the model has none; or, where it thinks by itself, that it is not to."""
    adaptive, disabled = {"thinking": {"type": "adaptive"}}, {"thinking": {"type": "disabled"}}
    enabled = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    effort = {"output_config": {"effort": "low"}}
    paths = (MESSAGES, MESSAGES + "/count_tokens")

    def listed(*flags: str) -> list[str | None]:
        asked = [*((MESSAGES, more) for more in (adaptive, enabled, disabled, effort)), (paths[1], adaptive | effort)]
        _, answers = ask(tmp_path, flags, *asked)
        assert {answer.status for answer in answers} == {200}
        return [answer.headers.get("x-warmkv-ignored") for answer in answers]

    budget, named = "thinking.budget_tokens", "output_config.effort"
    assert listed() == ["thinking", f"thinking, {budget}", None, named, f"thinking, {named}"]
    assert listed("model.response_template=hermes") == [None, budget, "thinking", named, named]
    template = Gateway(tmp_path).tokenizer.chat_template
    takes = "{{ reasoning_effort }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}" + template
    monkeypatch.setattr(exchanges, "load_tokenizer", lambda model: with_template(load_tokenizer(model), takes))
    assert listed() == [None, budget, None, None, None]


def test_a_model_tells_its_context_in_the_fields_of_every_api(server):
    ours, theirs = server.anthropic().models.retrieve("tiny"), server.openai().models.retrieve("tiny")
    assert (ours.max_input_tokens, ours.max_tokens) == (4096, 4096)  # of the answer, gateway.max_output_tokens at most
    assert (theirs.max_model_len, theirs.context_window) == (4096, 4096)
    assert server.anthropic().models.list().data == [ours]
    assert server.openai().models.list().data == [theirs]


def test_other_names_of_the_model(tmp_path):
    flags = ("gateway.models={claude-*: tiny, gpt-5: tiny}",)
    names = ("claude-sonnet", "gpt-5", "tiny", "gpt-4", "claude-*")  # a pattern is no name
    _, exchanges = ask(tmp_path, flags, *((CHAT, {"model": name}) for name in names))
    assert [exchange.status for exchange in exchanges] == [200, 200, 200, 404, 404]
    assert {exchange.json["model"] for exchange in exchanges[:3]} == {"tiny"}  # the one that answered

    async def listed() -> list[str]:
        gateway = Gateway(tmp_path, *flags)
        found = (await Exchange(gateway, "/v1/models", b"", method="GET").whole()).json["data"]
        one = await Exchange(gateway, "/v1/models/claude-opus", b"", method="GET").whole()
        return [*(model["id"] for model in found), one.json["id"]]

    assert asyncio.run(listed()) == ["tiny", "gpt-5", "claude-opus"]
    with pytest.raises(ConfigError, match=r"gateway.models: a is b, but the model that is served is tiny"):
        load(flags=("gateway.models={a: b}",))
