"""Which API a path is of, in which form its errors are told, and whether it is for operators."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from warmkv.platform.gateway.paths import APIS, api_of, of_operators, path_of, speaks_openai

VERSION, KEY, BEARER = {"anthropic-version": "2023-06-01"}, {"x-api-key": "a"}, {"authorization": "Bearer a"}


def test_paths_have_one_of_few_names():
    assert [api_of(path) for path in APIS] == list(APIS.values())
    assert api_of("/llm/v1/messages/") == "messages"  # as a client calls it whose address is wrong
    assert api_of("/v1/models/a/b") == "models"
    assert {api_of(path) for path in ("/", "/v1", "/v1/messages/x", "/healthz", "/secret")} == {"other"}


def test_operators_have_paths_of_warmkv_s_own_but_that_of_a_tenant_s_prefixes():
    for path in ("/v1/warmkv/policy", "/v1/warmkv/policy/history", "/v1/warmkv/nothing", "/v1/warmkv/x/v1/messages"):
        assert (api_of(path), of_operators(path)) == ("warmkv", True)
        assert of_operators(path_of({"path": f"/llm{path}", "root_path": "/llm"}))
    assert (api_of("/v1/warmkv/prefixes"), of_operators("/v1/warmkv/prefixes")) == ("prefixes", False)
    for path in ("/v1/warmkv", "/v1/messages", "/x/v1/warmkv/policy"):
        assert not of_operators(path)


@pytest.mark.parametrize(
    ("path", "headers", "openai_form"),
    [
        *((path, BEARER, True) for path in ("/v1/models", "/v1/models/a/b", "/v1/nothing", "/healthz")),
        *((path, BEARER | VERSION, False) for path in ("/v1/models", "/v1/nothing")),
        *((path, KEY, False) for path in ("/v1/models", "/v1/models/x")),
        *((path, {}, False) for path in ("/v1/models", "/v1/nothing")),
        *((path, KEY | VERSION, True) for path in ("/v1/chat/completions", "/v1/responses/x", "/v1/embeddings")),
        *((path, BEARER, False) for path in ("/v1/messages", "/v1/messages/count_tokens")),
        *((path, BEARER, False) for path in ("/v1/warmkv/policy", "/v1/warmkv/prefixes")),
        ("/prefix/v1/models", {"authorization": "bearer a"}, True),
        ("/v1/models", {"authorization": "Basic a"}, False),
    ],
)
def test_the_form_is_that_of_the_path_or_of_the_headers(path, headers, openai_form):
    assert speaks_openai(path, Headers(headers)) == openai_form
