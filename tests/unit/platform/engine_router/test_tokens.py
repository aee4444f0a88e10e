"""Token ids of prompts: which server is asked for what, and what happens where it does not tell."""

import asyncio

import aiohttp
import pytest

from warmkv.platform.engine_router.tokens import Tokenizers, has_images, poster

A, B = "http://a", "http://b"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
KEY = {"authorization": "Bearer k", "x-other": "no"}


class Servers:
    """Answer posts as it is told to; an exception is raised."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    async def post(self, url, body, headers):
        self.asked.append((url, body, dict(headers)))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def tokens(servers, tokenizers, api="chat", path="/v1/chat/completions", asked=CHAT, engines=(A, B)):
    return asyncio.run(tokenizers.tokens(servers.post, engines, api, path, asked, KEY))


def test_servers_are_asked_in_turn_with_the_body_and_key_of_the_request():
    servers, tokenizers = Servers((200, {"tokens": [1, 2]}), (200, {"tokens": [3], "count": 1})), Tokenizers()
    assert tokens(servers, tokenizers) == [1, 2]
    assert tokens(servers, tokenizers, path="/prefix/v1/chat/completions/") == [3]
    key = {"authorization": "Bearer k"}
    assert servers.asked == [(f"{A}/tokenize", CHAT, key), (f"{B}/prefix/tokenize", CHAT, key)]


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_other_apis_are_rendered_by_servers_that_can(api):
    servers = Servers((404, None), (200, {"token_ids": [1]}), (200, {"token_ids": [2]}))
    tokenizers = Tokenizers()
    assert [tokens(servers, tokenizers, api, f"/v1/{api}") for _ in range(3)] == [(), [1], [2]]
    assert [url for url, _, _ in servers.asked] == [f"{host}/v1/{api}/render" for host in (A, B, B)]


UNKNOWN_MODEL = {"message": "The model `x` does not exist.", "type": "NotFoundError", "code": 404}


@pytest.mark.parametrize("answer", [{"error": UNKNOWN_MODEL}, {"object": "error", **UNKNOWN_MODEL}])
def test_a_server_that_lacks_the_model_is_asked_again(answer):
    servers, tokenizers = Servers((404, answer), (200, {"tokens": [1]})), Tokenizers()
    assert [tokens(servers, tokenizers, engines=(A,)) for _ in range(2)] == [(), [1]]


@pytest.mark.parametrize("answer", [None, {"detail": "Not Found"}, {"error": {"type": "Not Found"}}, {"error": "no"}])
def test_a_server_that_lacks_the_endpoint_is_not_asked_again(answer):
    servers, tokenizers = Servers((404, answer)), Tokenizers()
    assert [tokens(servers, tokenizers, engines=(A,)) for _ in range(2)] == [(), ()]


@pytest.mark.parametrize(
    ("status", "data", "found"),
    [(200, b"[1]", [1]), (404, b'{"error": {}}', {"error": {}}), (404, b"<html>", None), (500, b"", None)],
)
def test_answers_and_errors_are_read(status, data, found):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))
        await writer.drain()
        writer.close()

    async def scene():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/tokenize"
            assert await poster(session, 60)(url, {}, {}) == (status, found)
        server.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    "answer",
    [
        *(aiohttp.ClientConnectionError(), TimeoutError(), ValueError("no JSON"), (500, None), (200, None)),
        *((200, {"tokens": answer}) for answer in ([], ["a"], [1.5], [-1], [True], [1 << 32], "12")),
        (200, [1]),
    ],
)
def test_what_cannot_be_had_is_done_without_and_asked_again(answer):
    servers, tokenizers = Servers(answer, (200, {"tokens": [7]})), Tokenizers()
    assert tokens(servers, tokenizers) == ()
    assert tokens(servers, tokenizers) == [7]
    assert (tokenizers.asked, tokenizers.failed) == (2, 1)


def test_prompts_that_are_tokens_already_or_have_more_than_text_are_not_asked_for():
    servers, tokenizers = Servers(), Tokenizers()
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}
    assert tokens(servers, tokenizers, asked=image) == ()
    assert has_images(image)
    assert not has_images(CHAT)
    assert not has_images({"type": ["image"]})
    for prompt, found in (([1, 2], [1, 2]), (["a", "b"], ()), ([[1], [2]], ()), (None, ())):
        assert tokens(servers, tokenizers, "completions", "/v1/completions", {"prompt": prompt}) == found
    assert tokens(servers, tokenizers, engines=()) == ()
