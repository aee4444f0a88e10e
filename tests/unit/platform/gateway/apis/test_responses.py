"""The Responses API through the real `openai` client, and the store of responses."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import openai
import pytest

from tests.unit.platform.exchanges import until
from tests.unit.platform.gateway.apis.test_tool_calls import SCHEMA, THOUGHT, TWO_CALLS, Scripted, call
from warmkv.platform.gateway.apis.responses import answers
from warmkv.platform.gateway.apis.responses import store as responses
from warmkv.platform.gateway.apis.responses.store import ResponseStore, StoredResponse
from warmkv.replicas.loading.tokenizer import load_tokenizer
from warmkv.replicas.protocol import TokenLogprobs

LONG = "for position in range(length):\n    total += position\n" * 40


def ask(server: Any, said: Any, key: str = "bob", **options: Any) -> Any:
    options = {"max_output_tokens": 8, "temperature": 0, "model": server.config.model.name, **options}
    return server.openai(key).responses.create(input=said, **options)


def chat(server: Any, *messages: tuple[str, str], **options: Any) -> Any:
    said = [{"role": role, "content": text} for role, text in messages]
    options = {"max_tokens": 8, "temperature": 0, "model": server.config.model.name, **options}
    return server.openai("bob").chat.completions.create(messages=said, **options)


def test_an_answer_is_that_of_the_same_chat(server):
    response = ask(server, "def main():", instructions="Be brief.", metadata={"a": "b"})
    same = chat(server, ("system", "Be brief."), ("user", "def main():"))
    assert response.output_text == same.choices[0].message.content
    assert (response.usage.input_tokens, response.usage.output_tokens) == (
        same.usage.prompt_tokens,
        same.usage.completion_tokens,
    )
    cut = same.choices[0].finish_reason == "length"
    assert response.status == ("incomplete" if cut else "completed")
    assert (response.incomplete_details.reason if cut else None) == ("max_output_tokens" if cut else None)
    assert (response.instructions, response.metadata, response.error) == ("Be brief.", {"a": "b"}, None)
    assert response.usage.warmkv["price"]["total"] > 0
    assert server.records[-2].api == "responses"


def test_input_as_items(server):
    said = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "def main():"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "pass", "annotations": []}],
        },
        {"role": "user", "content": "Go on."},
    ]
    same = chat(
        server, ("system", "Be brief."), ("user", "def main():"), ("assistant", "pass"), ("user", "Go on.")
    ).choices[0]
    assert ask(server, said).output_text == same.message.content


def test_the_stream_helper_reads_the_events(server):
    whole = ask(server, "def rotate(", key="streams", max_output_tokens=24)
    client, model = server.openai("streams"), server.config.model.name
    with client.responses.stream(model=model, input="def rotate(", max_output_tokens=24, temperature=0) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 0
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", whole.status),
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert client.responses.retrieve(last.id).output_text == whole.output_text


def test_a_final_response_of_the_stream_helper(server):
    """It needs the event of an answer that the model itself ended."""
    question, model = "# the code of harbor is 4821\nWhat is the code of harbor?", server.config.model.name
    whole = ask(server, question, max_output_tokens=400)
    assert whole.status == "completed"
    with server.openai().responses.stream(model=model, input=question, max_output_tokens=400, temperature=0) as stream:
        assert stream.get_final_response().output_text == whole.output_text


def test_a_conversation_goes_on_by_the_id_of_a_response(server):
    first = ask(server, LONG, key="goes on", instructions="Be brief.")
    second = ask(server, "And then?", key="goes on", previous_response_id=first.id)
    third = ask(server, "And then?", key="goes on", previous_response_id=second.id)
    turns = (("user", LONG), ("assistant", first.output_text), ("user", "And then?"))
    assert second.output_text == chat(server, *turns).choices[0].message.content  # without the instructions
    more = (("assistant", second.output_text), ("user", "And then?"))
    assert third.output_text == chat(server, *turns, *more).choices[0].message.content
    assert third.usage.input_tokens_details.cached_tokens > 0


def test_responses_are_read_and_deleted_by_their_tenant_alone(server):
    client, other = server.openai("mine"), server.openai("other")
    kept, unkept = (ask(server, "Hello", key="mine", store=store) for store in (True, False))
    assert client.responses.retrieve(kept.id) == kept
    for of, name in ((other, kept.id), (client, unkept.id), (client, "resp_none")):
        with pytest.raises(openai.NotFoundError):
            of.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError):
            of.responses.delete(name)
        with pytest.raises(openai.NotFoundError, match="previous_response_id: there is no response"):
            of.responses.create(model=server.config.model.name, input="x", previous_response_id=name)
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)


def test_deleting_a_response_ends_what_goes_on_from_it(server):
    first = ask(server, "Hello", key="deleting")
    second = ask(server, "And then?", key="deleting", previous_response_id=first.id)
    client = server.openai("deleting")
    client.responses.delete(first.id)
    assert client.responses.retrieve(second.id).id == second.id
    told = f"previous_response_id: there is no response {second.id}, or not all that it goes on from"
    with pytest.raises(openai.NotFoundError, match=told):
        ask(server, "And then?", key="deleting", previous_response_id=second.id)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "computer_call_output", "call_id": "x"}]}, "input.0.*computer_call_output"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.*item_reference"),
        ({"input": [{"role": "tool", "content": "x"}]}, r"input\.0\.role"),
        ({"background": True}, "background: this server does not support it"),
        ({"truncation": "auto"}, "truncation: this server does not support it"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "agents"}]}, "tools.0: a namespace has a name and tools"),
        (
            {"tools": [{"type": "namespace", "name": "agents", "tools": [{"type": "custom", "name": "x"}]}]},
            "tools.0.tools.0.type: Input should be 'function'",
        ),
        ({"text": {"format": {"type": "xml"}}}, r"text\.format: type 'xml' is not supported here"),
        ({"extra_body": {"warmkv": {"polcy": "full"}}}, "polcy"),
    ],
)
def test_what_is_refused(server, options, message):
    before = len(server.requests)
    with pytest.raises(openai.BadRequestError, match=message):
        ask(server, **{"said": options.pop("input", "x"), **options})
    assert len(server.requests) == before


def test_a_stream_that_fails_says_so(server):
    server.faults += [3] * (1 + server.config.gateway.retries)
    options = {"stream": True, "max_output_tokens": 200, "extra_body": {"warmkv": {"ignore_eos": True}}}
    *_, last = ask(server, "Hello", **options)
    assert last.type == "response.failed"
    assert "ConnectionError" in last.response.error.message


FUNCTION = {"type": "function", "name": "look_up", "parameters": SCHEMA}


def both_ways(gateway: Scripted, *requests: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The answers to requests that follow each other, and the events of the last one as a stream."""

    async def run() -> tuple[list[Any], list[Any]]:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="a", http_client=gateway.http)
        options: dict[str, Any] = {"model": "tiny", "tools": [FUNCTION]}
        answers: list[Any] = []
        for request in requests:
            more = {"previous_response_id": answers[-1].id} if answers else {}
            options |= {**request, **more}
            answers.append(await client.responses.create(**options))
        async with client.responses.stream(**options) as stream:
            return answers, [event async for event in stream]

    return asyncio.run(run())


def outline(response: Any) -> list[tuple[str, str]]:
    """Of every item its type and text."""
    return [
        (item.type, item.arguments if item.type == "function_call" else "".join(part.text for part in item.content))
        for item in response.output
    ]


def test_calls_and_thinking_are_items_whole_and_streamed(tmp_path):
    (whole,), events = both_ways(Scripted(tmp_path, THOUGHT + TWO_CALLS), {"input": "Find a and b."})
    assert outline(whole) == [
        ("reasoning", "Hm, a word."),
        ("message", "I look."),
        ("function_call", '{"word": "a"}'),
        ("function_call", '{"word": "b"}'),
        ("message", "Wait."),
    ]
    assert outline(events[-1].response) == outline(whole)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added, done = (
        [event.item.type for event in events if event.type == f"response.output_item.{kind}"]
        for kind in ("added", "done")
    )
    assert added == done == [item.type for item in whole.output]
    for kind, index in (("reasoning_text", 0), ("output_text", 1), ("function_call_arguments", 2)):
        pieces = [
            event.delta for event in events if event.type == f"response.{kind}.delta" and event.output_index == index
        ]
        assert "".join(pieces) == outline(whole)[index][1]
    assert len({item.id for item in whole.output}) == 5
    assert whole.output[2].call_id != whole.output[3].call_id


def test_a_text_format_is_the_constraint_of_the_answer(tmp_path):
    gateway = Scripted(tmp_path, '{"word": "a"}')
    text = {"format": {"type": "json_schema", "name": "found", "schema": SCHEMA, "strict": True}}
    (answer,), _ = both_ways(gateway, {"input": "Find a.", "tools": [], "text": text})
    assert answer.text.format.name == "found"
    same = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA, "strict": True}}
    gateway.chat(tools=[], response_format=same)
    assert gateway.requests[0].sampling.constraint is not None
    assert gateway.requests[0].sampling.constraint == gateway.requests[-1].sampling.constraint


def test_a_result_goes_on_from_its_call(tmp_path):
    gateway = Scripted(tmp_path, call("a"))
    first = both_ways(gateway, {"input": "Find a."})[0][0].output[0]
    result = {"type": "function_call_output", "call_id": first.call_id, "output": "It is here."}
    as_items = [{"role": "user", "content": "Find a."}, first.model_dump(), result]
    both_ways(gateway, {"input": as_items})
    by_items = gateway.requests[-1].token_ids
    other = Scripted(tmp_path, call("a"))

    async def by_id() -> None:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="a", http_client=other.http)
        options: dict[str, Any] = {"model": "tiny", "tools": [FUNCTION]}
        asked = await client.responses.create(input="Find a.", **options)
        output = {**result, "call_id": asked.output[0].call_id}
        with pytest.raises(openai.BadRequestError, match="No tool output found for function call call_"):
            await client.responses.create(input="And b?", previous_response_id=asked.id, **options)
        with pytest.raises(openai.BadRequestError, match="No tool call found for function call output with call_id x"):
            await client.responses.create(input=[{**output, "call_id": "x"}], previous_response_id=asked.id, **options)
        await client.responses.create(input=[output], previous_response_id=asked.id, **options)

    asyncio.run(by_id())
    assert len(other.requests) == 2
    assert other.requests[-1].token_ids == by_items
    assert "It is here." in load_tokenizer(gateway.config.model).decode(by_items)


SEARCH = {"type": "web_search", "external_web_access": False}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Helpers.",
    "tools": [FUNCTION, FUNCTION | {"name": "end"}],
}


def test_what_codex_sends_is_taken(tmp_path):
    """Functions in a namespace, a web search without the web, its own ids and metadata; nothing is stored."""
    gateway = Scripted(tmp_path, call("a").replace("look_up", "agents__look_up"))
    said = [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be brief."}],
        },
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "Find a."}]},
    ]
    more = {
        "tools": [FUNCTION | {"strict": False}, AGENTS, SEARCH],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
        "extra_body": {"client_metadata": {"turn_id": "1"}},
    }
    (answer,), events = both_ways(gateway, {"input": said, **more})
    assert [(item.name, item.namespace) for item in answer.output] == [("look_up", "agents")]
    assert [(item.name, item.namespace) for item in events[-1].response.output] == [("look_up", "agents")]
    assert {event.name for event in events if event.type == "response.function_call_arguments.done"} == {"look_up"}
    result = {"type": "function_call_output", "call_id": answer.output[0].call_id, "output": "Here."}
    both_ways(gateway, {"input": [*said, answer.output[0].model_dump(), result], **more})
    prompt = load_tokenizer(gateway.config.model).decode(gateway.requests[-1].token_ids)
    for shown in ('"name": "look_up"', '"name": "agents__look_up", "arguments"', '"description": "Helpers."', "Here."):
        assert shown in prompt
    assert prompt.count("Helpers.") == 1
    assert "web_search" not in prompt
    first = gateway.requests[0].token_ids
    assert gateway.requests[-1].token_ids[: len(first)] == first

    async def headers() -> str:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="a", http_client=gateway.http)
        raw = await client.responses.with_raw_response.create(model="tiny", input="Find a.", tools=[SEARCH])
        return str(raw.headers["x-warmkv-ignored"])

    assert asyncio.run(headers()) == "tools.web_search"


def kept(name: str, previous: str | None = None, size: int = 0) -> StoredResponse:
    asked = [{"name": name, "text": "x" * size}]
    return StoredResponse(name, b'{"output": []}', json.dumps(asked).encode(), previous)


def test_a_conversation_leaves_the_store_from_its_end(monkeypatch):
    monkeypatch.setattr(responses, "TENANT_BYTES", 1000)
    store = ResponseStore(lambda: 0.0)
    store.keep(b"a", kept("1"))
    store.keep(b"a", kept("2", "1"))
    store.keep(b"b", kept("1"))
    assert [item["name"] for item in store.history(b"a", "2")] == ["1", "2"]
    store.keep(b"a", kept("3", size=900))
    assert store.get(b"a", "2") is None
    assert store.history(b"a", "1") is not None
    assert store.history(b"b", "1") is not None
    store.keep(b"a", kept("4", size=1000))  # larger than all may be
    assert store.get(b"a", "4") is None
    store.keep(b"a", kept("5", "1"))
    assert store.delete(b"a", "1")
    assert not store.delete(b"a", "1")
    assert store.history(b"a", "5") is None  # what it went on from is gone


def test_responses_live_from_their_last_use_on():
    now = [0.0]
    store = ResponseStore(lambda: now[0])
    for name in ("used", "unused"):
        store.keep(b"a", kept(name))
    now[0] = responses.TTL_SECONDS
    assert store.get(b"a", "used") is not None
    now[0] += 1
    assert store.get(b"a", "unused") is None
    assert store.get(b"a", "used") is not None


def test_as_many_tenants_as_may_have_responses(monkeypatch):
    monkeypatch.setattr(responses, "MOST_TENANTS", 2)
    store = ResponseStore(lambda: 0.0)
    for tenant in (b"a", b"b", b"a", b"c"):
        store.keep(tenant, kept("1"))
    assert [store.get(tenant, "1") is not None for tenant in (b"a", b"b", b"c")] == [True, False, True]


def test_what_has_expired_goes_whoever_stores_next():
    now = [0.0]
    store = ResponseStore(lambda: now[0])
    store.keep(b"a", kept("1"))
    store.keep(b"b", kept("1"))
    now[0] = responses.TTL_SECONDS
    store.get(b"b", "1")
    now[0] += 1
    store.keep(b"c", kept("1"))
    assert list(store._tenants) == [b"b", b"c"]


def test_what_is_stored_takes_hardly_more_memory_than_its_limit_says():
    store, asked = ResponseStore(lambda: 0.0), [{"type": "message", "content": [{"text": str(n)}]} for n in range(9000)]
    tracemalloc.start()
    try:
        for name in map(str, range(3)):
            store.keep(b"a", StoredResponse(name, b'{"output": []}', json.dumps(asked).encode(), None))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used < 1.1 * sum(one.size for one in store.chain(b"a", "1")) * 3
    assert store.history(b"a", "1") == asked


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"a": "x" * 513}, "metadata.a: string too long. Expected a string with maximum length 512, but got a string"),
        ({"x" * 65: "a"}, "metadata: property name too long. Expected a property name with maximum length 64, but"),
        ({str(n): "a" for n in range(17)}, "metadata: at most 16 entries, not 17"),
    ],
)
def test_metadata_is_as_long_as_openai_takes_it(server, metadata, told):
    with pytest.raises(openai.BadRequestError, match=told):
        ask(server, "Hello", metadata=metadata)
    longest = {"x" * 64: "x" * 512}
    assert ask(server, "Hello", metadata=longest).metadata == longest


INCLUDED = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.mark.parametrize("prompt", ["def main():", "Hello"])
def test_log_probabilities_of_a_text_are_those_of_the_same_chat(server, prompt):
    whole = ask(server, prompt, **INCLUDED)
    same = chat(server, ("user", prompt), logprobs=True, top_logprobs=2).choices[0].logprobs.content
    found = whole.output[0].content[0].logprobs
    assert [(one.token, one.logprob, one.bytes) for one in found] == [
        (one.token, one.logprob, one.bytes) for one in same[: len(found)]
    ]
    assert all(len(one.top_logprobs) == 2 for one in found)
    assert "".join(one.token for one in found) == whole.output_text
    events = list(ask(server, prompt, stream=True, **INCLUDED))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert all("".join(one.token for one in event.logprobs) == event.delta for event in deltas)
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [(one.token, one.logprob) for one in done.logprobs] == [(one.token, one.logprob) for one in found]
    assert events[-1].response.output[0].content[0].logprobs == found
    assert ask(server, prompt, top_logprobs=2).output[0].content[0].logprobs == []
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        ask(server, prompt, top_logprobs=21)


def test_each_text_has_the_log_probabilities_of_its_own_tokens():
    """Not those of thinking and calls beside it."""
    pieces = [*"<think>Hm.</think>", "\n\nI ", "look.", *'<tool_call>{"a": 1}', "</tool_call>\n", "", "Wait", ".\n"]
    came = [[TokenLogprobs(number, -float(number)) for number in range(len(pieces))]]
    found = answers.TextLogprobs(lambda: came.pop() if came else [], lambda token: pieces[token])
    tokens = [[one["token"] for one in found.of(text)] for text in ("Hm.", "I look.", "Wait.")]
    assert tokens == [["H", "m", "."], ["\n\nI ", "look."], ["", "Wait", ".\n"]]


def test_gateways_that_do_not_answer_hold_up_no_others(tmp_path, monkeypatch):
    """More wait for another gateway than there are threads that parse; the rest is parsed meanwhile."""
    gateways: list[Any] = []
    gateways += [Scripted(tmp_path, "An answer.", others=gateways) for _ in range(2)]
    answered, asked = asyncio.Event(), list[str]()

    async def responses(self: Any, tenant: bytes, name: str) -> Any:
        asked.append(name)
        await answered.wait()
        raise TimeoutError

    monkeypatch.setattr(Scripted, "responses", responses)

    async def run() -> None:
        client = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="a", http_client=gateways[0].http, max_retries=0
        )
        waiting = [
            asyncio.ensure_future(client.responses.create(model="tiny", input="x", previous_response_id=f"resp_{at}"))
            for at in range(3)
        ]
        await until(lambda: len(asked) == 3)
        assert (await client.responses.create(model="tiny", input="x")).output_text == "An answer."
        answered.set()
        for one in waiting:
            with pytest.raises(openai.APIStatusError, match="Not all gateways told"):
                await one

    asyncio.run(run())


def test_asking_other_gateways_counts_towards_limits(tmp_path):
    """Count names of responses that are not there: they are as easily made up as requests."""
    limits = ("gateway.limits={requests_per_minute: 4}", "cluster.gateways=2")
    gateways: list[Any] = []
    gateways += [Scripted(tmp_path, "An answer.", "end", *limits, others=gateways) for _ in range(2)]

    async def run() -> None:
        client = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="a", http_client=gateways[0].http, max_retries=0
        )
        made = await client.responses.create(model="tiny", input="x")  # of two that each gateway grants
        for _ in range(3):
            assert (await client.responses.retrieve(made.id)).id == made.id  # it is here
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_none")
        with pytest.raises(openai.RateLimitError):
            await client.responses.retrieve("resp_none")
        with pytest.raises(openai.RateLimitError):
            await client.responses.delete("resp_none")

    asyncio.run(run())


def test_a_conversation_goes_on_in_any_gateway(tmp_path):
    """Each turn in another one than the turn before; what one has is fetched once, and deleted in all."""
    gateways: list[Any] = []
    gateways += [Scripted(tmp_path, f"Answer {number}.", others=gateways) for number in range(3)]

    async def run() -> list[str]:
        clients = [
            openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="a", http_client=one.http) for one in gateways
        ]
        stranger = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="b", http_client=gateways[2].http)
        previous: str | None = None
        made = list[str]()
        for turn in range(5):
            options = {} if previous is None else {"previous_response_id": previous}
            answer = await clients[turn % 3].responses.create(model="tiny", input=f"Question {turn}?", **options)
            previous = answer.id
            made.append(previous)
        assert (await clients[0].responses.retrieve(previous)).id == previous
        with pytest.raises(openai.NotFoundError):
            await stranger.responses.create(model="tiny", input="x", previous_response_id=previous)
        await clients[2].responses.delete(previous)
        for client in clients:
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(previous)
        return made

    assert len(set(asyncio.run(run()))) == 5
    text = load_tokenizer(gateways[1].config.model).decode(gateways[1].requests[-1].token_ids)
    expected = [said for turn in range(4) for said in (f"Question {turn}?", f"Answer {turn % 3}.")]
    places = [text.index(said, 0) for said in expected[:4]]
    assert places == sorted(places)
    assert all(said in text for said in [*expected, "Question 4?"])


def test_a_deletion_that_a_gateway_does_not_answer_can_be_tried_again(tmp_path, monkeypatch):
    """Forget the response in the gateway that has it, and keep it where its client was told to try again."""
    gateways: list[Any] = []
    gateways += [Scripted(tmp_path, "An answer.", others=gateways) for _ in range(2)]
    forget = Scripted.delete_response

    async def silent(self: Any, tenant: bytes, name: str) -> bool:
        await forget(self, tenant, name)
        raise TimeoutError

    async def run() -> None:
        asked, other = (
            openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="a", http_client=one.http, max_retries=0)
            for one in gateways
        )
        name = (await other.responses.create(model="tiny", input="x")).id
        with monkeypatch.context() as patch:
            patch.setattr(Scripted, "delete_response", silent)
            with pytest.raises(openai.APIStatusError, match="Not all gateways told") as refused:
                await asked.responses.delete(name)
        assert refused.value.status_code == 529
        assert (await asked.responses.retrieve(name)).id == name
        await asked.responses.delete(name)
        for client in (asked, other):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(name)

    asyncio.run(run())
