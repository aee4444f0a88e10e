"""Errors in the form and the words of the API that a client speaks, on paths that several APIs have as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from tests.unit.platform.asgi import Gateway, as_flag
from warmkv.platform.tenants import hash_key

TENANTS = as_flag("gateway.tenants", [{"name": "team", "key_sha256": hash_key("right")}])


@pytest.fixture(scope="module")
def closed(serve: Callable[..., Any]) -> Any:
    return serve("engine.threads=1", TENANTS)


def test_clients_of_openai_are_told_of_keys_in_its_words(closed):
    for call in (
        lambda client: client.models.list(),
        lambda client: client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}]),
        lambda client: client.embeddings.create(model="tiny", input="x"),
    ):
        with pytest.raises(openai.AuthenticationError) as caught:
            call(closed.openai("wrong"))
        error = caught.value
        assert (error.code, error.body["message"]) == ("invalid_api_key", "Incorrect API key provided.")
        assert error.body["request_id"] == error.response.headers["request-id"]
    with pytest.raises(anthropic.AuthenticationError, match="invalid bearer token") as caught:
        closed.anthropic("wrong").models.list()
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_a_missing_key_and_a_wrong_token_are_told_apart(tmp_path):
    gateway = Gateway(tmp_path, TENANTS)
    missing = gateway.call("POST", "/v1/chat/completions")
    assert missing.body["error"]["message"].startswith("You didn't provide an API key")
    assert missing.body["error"]["code"] is None
    assert gateway.call("POST", "/v1/messages").error == "authentication_error: x-api-key header is required"
    wrong = gateway.call("POST", "/v1/messages", authorization="Bearer wrong")
    assert wrong.error == "authentication_error: invalid bearer token"
    assert gateway.messages("wrong").error == "authentication_error: invalid x-api-key"
    assert gateway.call("GET", "/v1/models", authorization="Bearer right").status == 200


def test_a_model_that_is_not_there(server):
    for call in (
        lambda client: client.models.retrieve("nope"),
        lambda client: client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call(server.openai())
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert caught.value.body["message"] == "The model 'nope' does not exist; this server has tiny."
    with pytest.raises(anthropic.NotFoundError) as caught:
        server.anthropic().models.retrieve("nope")
    assert caught.value.body["error"] == {"type": "not_found_error", "message": "model: nope (this server has tiny)"}


def test_embeddings_are_refused_in_words(server):
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai().embeddings.create(model="tiny", input="x")
    told = "this server makes no embeddings: its model writes text (POST /v1/embeddings)"
    assert caught.value.body["message"] == told


def test_a_limit_has_the_code_of_openai(tmp_path):
    gateway = Gateway(tmp_path, "gateway.limits.requests_per_minute=1")
    assert gateway.completion("a").status == 200
    refused = gateway.completion("a")
    assert (refused.status, refused.body["error"]["code"]) == (429, "rate_limit_exceeded")
