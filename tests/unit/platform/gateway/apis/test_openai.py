"""The OpenAI-compatible API through the real `openai` client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.polling import until
from warmkv.models import tiny
from warmkv.replicas.loading.tokenizer import load_tokenizer

LONG = "for position in range(length):\n    total += position\n" * 40


def chat(server: Any, content: Any, key: str = "bob", **options: Any) -> Any:
    options = {"max_tokens": 6, "temperature": 0, "model": server.config.model.name, **options}
    return server.openai(key).chat.completions.create(messages=[{"role": "user", "content": content}], **options)


def test_chat_whole_and_streamed_agree(server):
    whole = chat(server, "def main():", max_tokens=12)
    chunks = list(chat(server, "def main():", max_tokens=12, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_whole_blocks_are_reused_without_marks(server):
    first = chat(server, LONG + "a", key="auto").usage
    second = chat(server, LONG + "b", key="auto").usage
    assert first.prompt_tokens_details.cached_tokens == 0
    cached = second.prompt_tokens_details.cached_tokens
    assert cached > 0
    assert cached % 64 == 0
    assert second.prompt_tokens == first.prompt_tokens
    assert second.warmkv["price"]["total"] < first.warmkv["price"]["total"]


def test_plain_completion(server):
    client, model = server.openai(), server.config.model.name
    whole = client.completions.create(model=model, prompt="import os\nimport ", max_tokens=8, temperature=0)
    chunks = client.completions.create(
        model=model, prompt="import os\nimport ", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.object == "text_completion"


def test_seed_and_stop(server):
    def draw(seed: int) -> str:
        return chat(server, "def main():", temperature=1.0, seed=seed, max_tokens=20).choices[0].message.content

    assert draw(3) == draw(3)
    text = chat(server, "def main():", max_tokens=20).choices[0].message.content
    stop = text[len(text) // 2 :][:2]
    stopped = chat(server, "def main():", max_tokens=20, stop=stop).choices[0]
    assert stopped.message.content == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_system_and_developer_are_one_role(server):
    def prompt(role: str) -> int:
        return (
            server.openai()
            .chat.completions.create(
                model=server.config.model.name,
                max_tokens=1,
                messages=[{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            )
            .usage.prompt_tokens
        )

    assert prompt("system") == prompt("developer")


def test_an_answer_can_be_sent_back_as_it_came(server):
    first = chat(server, "def main():").choices[0].message
    messages = [{"role": "user", "content": "def main():"}, first, {"role": "user", "content": "go on"}]
    second = server.openai().chat.completions.create(
        model=server.config.model.name, max_tokens=2, messages=messages, temperature=None, logprobs=False, n=1
    )
    assert second.usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 129}, "n"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"top_logprobs": 2}, "top_logprobs: only allowed when logprobs is true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"16777216": 1}}, "logit_bias: 16777216 is not a token"),
        ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids"),
        ({"extra_body": {"min_tokens": 7}}, "min_tokens: 7 are more than max_tokens, 6"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"extra_body": {"truncate_prompt_tokens": 5}}, "truncate_prompt_tokens: this server does not support it"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream"),
        ({"extra_body": {"warmkv": {"polcy": "full"}}}, "polcy"),
    ],
)
def test_what_is_refused(server, options, message):
    with pytest.raises(openai.BadRequestError, match=message):
        chat(server, "x", **options)


def test_sampling_fields_reach_the_replica(server):
    fields = {"min_p": 0.1, "repetition_penalty": 1.1, "top_k": 5, "min_tokens": 2, "stop_token_ids": [3]}
    penalties = {"frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {"7": -100}}
    chat(server, "def main():", **penalties, extra_body={**fields, "ignore_eos": True})
    sampling = server.requests[-1].sampling
    assert {name: getattr(sampling, name) for name in ("min_p", "repetition_penalty", "top_k", "min_tokens")} == {
        name: value for name, value in fields.items() if name != "stop_token_ids"
    }
    assert (sampling.stop_token_ids, sampling.logit_bias, sampling.ignore_eos) == ((3,), ((7, -100.0),), True)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_chat(server, stream):
    options = {"max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    made = chat(server, "def main():", stream=stream, **options)
    choices = [chunk.choices[0] for chunk in made] if stream else made.choices
    found = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    text = chat(server, "def main():", max_tokens=5).choices[0].message.content
    assert "".join(token.token for token in found).startswith(text)
    for token in found:  # greedy
        assert len(token.top_logprobs) == 2
        assert token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
        assert (token.token, token.bytes) == (token.top_logprobs[0].token, list(token.token.encode()))


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_text(server, stream):
    client, prompt = server.openai(), "import os\nimport "
    options = {"model": server.config.model.name, "prompt": prompt, "max_tokens": 5, "temperature": 0}
    made = client.completions.create(**options, logprobs=1, stream=stream)
    choices = [chunk.choices[0] for chunk in made] if stream else made.choices
    found = [choice.logprobs for choice in choices if choice.logprobs]
    tokens, offsets = [token for one in found for token in one.tokens], [at for one in found for at in one.text_offset]
    assert "".join(tokens).startswith(client.completions.create(**options).choices[0].text)
    assert offsets == [len("".join(tokens[:at])) for at in range(len(tokens))]
    for one in found:
        for token, logprob, top in zip(one.tokens, one.token_logprobs, one.top_logprobs, strict=True):
            assert top == {token: logprob}


@pytest.fixture(scope="module")
def plain(server):
    """Returns what transformers' plain forward makes of token ids: log-probabilities of all but the first."""
    model = AutoModelForCausalLM.from_pretrained(tiny.PATH, dtype=torch.float32)

    def logprobs(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)

    return logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_what_likelihood_tasks_ask_for(server, plain, stream):
    """lm-eval: `echo` with `logprobs`, of several prompts as ids, and one token that it drops."""
    tokenizer, client = load_tokenizer(server.config.model), server.openai("likelihood")
    texts = ["import os\nimport sys\n", LONG[:300], LONG[:300] + "x"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    options = {"model": server.config.model.name, "temperature": 0, "echo": True, "logprobs": 1, "seed": 1234}
    for new, prompts in ((1, ids), (0, texts)):
        made = client.completions.create(**options, prompt=prompts, max_tokens=new, stream=stream)
        chunks = [chunk.choices[0] for chunk in made] if stream else made.choices
        for number, own in enumerate(ids):
            choices = [choice for choice in chunks if choice.index == number]
            assert "".join(choice.text for choice in choices).startswith(texts[number])
            found = [choice.logprobs for choice in choices if choice.logprobs]
            tokens = [token for one in found for token in one.tokens]
            values = [value for one in found for value in one.token_logprobs]
            tops = [top for one in found for top in one.top_logprobs]
            offsets = [at for one in found for at in one.text_offset]
            assert tokens[: len(own)] == [tokenizer.decode([token]) for token in own]
            assert len(tokens) == len(own) + new
            assert (values[0], tops[0]) == (None, None)
            assert offsets == [len("".join(tokens[:at])) for at in range(len(tokens))]
            expected = plain(own)
            likely = [row[token].item() for row, token in zip(expected, own[1:], strict=True)]
            assert values[1 : len(own)] == pytest.approx(likely, abs=2e-3)
            for at, (top, row) in enumerate(zip(tops[1 : len(own)], expected, strict=True), 1):
                assert max(top.values()) == pytest.approx(row.max().item(), abs=2e-3)
                assert top[tokens[at]] == values[at]
    assert [record.cached_tokens for record in server.records[-3:]] == [0, 0, 0]  # nothing is read that has no logits


def test_a_prompts_log_probabilities_by_vllms_name(server, plain):
    ids = load_tokenizer(server.config.model)("import os\nimport sys\n")["input_ids"]
    options = {"model": server.config.model.name, "max_tokens": 2, "extra_body": {"prompt_logprobs": 2}}
    completion = server.openai().completions.create(**options, prompt=ids, n=2)
    expected = plain(ids)
    assert len(completion.choices) == 2
    for choice in completion.choices:
        first, *others = choice.prompt_logprobs
        assert (first, choice.logprobs) == (None, None)
        for token, row, told in zip(ids[1:], expected, others, strict=True):
            assert next(iter(told)) == str(token)
            assert told[str(token)]["logprob"] == pytest.approx(row[token].item(), abs=2e-3)
            ranked = sorted((one["rank"], int(other)) for other, one in told.items() if one["rank"])
            assert [other for _, other in ranked] == row.topk(2)[1].tolist()
            assert told[str(token)]["decoded_token"] == load_tokenizer(server.config.model).decode([token])
    whole = chat(server, "Hello", **options)
    assert len(whole.prompt_logprobs) == whole.usage.prompt_tokens
    assert whole.usage.warmkv["cache"]["reason"] == "disabled"
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs: not in a stream"):
        chat(server, "Hello", stream=True, extra_body={"prompt_logprobs": 0})


def test_more_log_probabilities_of_prompts_than_an_answer_holds_are_refused(server):
    before = len(server.requests)
    ids = [[5] * 700] * 20
    options = {"model": server.config.model.name, "prompt": ids, "echo": True, "logprobs": 20, "max_tokens": 0}
    with pytest.raises(openai.BadRequestError, match=r"294000 log-probabilities .* are more than 262144"):
        server.openai().completions.create(**options)
    assert len(server.requests) == before


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt"),
        ([[]], "prompt"),
        (["a", ""], "prompt"),
        ([1, "a"], "prompt"),
        ([[1], [-1]], "prompt"),
        ([[1, True]], "prompt"),
        ([10**12], "prompt"),
        ([5, 4096 * 4096], "there is no token 16777216 among the"),
        ([[1, 2]] * 600, "1200 answers .* are more than 1024"),
    ],
)
def test_prompts_that_are_refused(server, prompt, message):
    before = len(server.requests)
    with pytest.raises(openai.BadRequestError, match=message):
        server.openai().completions.create(model=server.config.model.name, prompt=prompt, n=2)
    assert len(server.requests) == before


def priced(usage: Any) -> float:
    return usage.warmkv["price"]["total"]


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_compute_their_prompt_once_and_pay_for_it_once(server, stream):
    options = {"temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 12, "key": f"several {stream}"}
    before = len(server.requests), len(server.records)
    if stream:
        *chunks, last = chat(server, LONG, stream=True, stream_options={"include_usage": True}, **options)
        usage, texts, reasons = last.usage, ["", "", ""], [None] * 3
        for choice in (chunk.choices[0] for chunk in chunks):
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert len({chunk.id for chunk in chunks}) == 1
    else:
        whole = chat(server, LONG, **options)
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        texts, usage = [choice.message.content for choice in whole.choices], whole.usage
        reasons = [choice.finish_reason for choice in whole.choices]
    alone = [chat(server, LONG, key="alone", temperature=1.0, seed=3 + index, max_tokens=12) for index in range(3)]
    assert texts == [answer.choices[0].message.content for answer in alone]
    assert reasons == [answer.choices[0].finish_reason for answer in alone]
    assert usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert usage.completion_tokens == sum(answer.usage.completion_tokens for answer in alone)
    sent, records = server.requests[before[0] :][:3], server.records[before[1] :][:3]
    assert len({request.id for request in sent}) == 3
    blocks = usage.prompt_tokens // 64 * 64
    assert sorted(record.cached_tokens for record in records) == [0, blocks, blocks]
    assert [request.replica for request in sent] == [None, "only", "only"]
    assert sum(record.usage.prompt for record in records) == usage.prompt_tokens
    prices = server.config.prices
    bill = usage.prompt_tokens * prices.input + usage.completion_tokens * prices.output
    assert priced(usage) == pytest.approx(bill / 1e6)


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_as_lists_and_as_token_ids(server, stream):
    """What lm-eval sends; more prompts than are answered at a time."""
    client, model = server.openai(), server.config.model.name
    texts = [f"import {name}\nimport " for name in "abcdefghijklmnopqrs"]
    ids = [load_tokenizer(server.config.model)(text)["input_ids"] for text in texts]
    options = {"model": model, "max_tokens": 4, "temperature": 0, "stream": stream}

    def answers(**more: Any) -> list[str]:
        made = client.completions.create(**options, **more)
        if not stream:
            assert [choice.index for choice in made.choices] == list(range(len(made.choices)))
            return [choice.text for choice in made.choices]
        pieces = [(chunk.choices[0].index, chunk.choices[0].text) for chunk in made]
        return ["".join(text for number, text in pieces if number == index) for index in range(len(set(dict(pieces))))]

    expected = [answers(prompt=text)[0] for text in texts]
    assert answers(prompt=texts) == expected
    assert answers(prompt=ids) == expected
    assert answers(prompt=ids[0], echo=True) == [texts[0] + expected[0]]
    assert answers(prompt=texts[:2], echo=True, n=2) == [
        text + answer for text, answer in zip(texts[:2], expected[:2], strict=True) for _ in range(2)
    ]


def test_an_answer_that_fails_takes_the_others_with_it(server):
    server.faults += [-1, *[0] * (1 + server.config.gateway.retries)]
    before = len(server.records)
    with pytest.raises(openai.InternalServerError):
        chat(server, "def main():", n=2, extra_body={"warmkv": {"ignore_eos": True}}, max_tokens=4000)
    until(lambda: len(server.records) == before + 2)
    assert sorted(record.status for record in server.records[before:]) == ["cancelled", "error"]


def test_other_errors_are_typed(server):
    with pytest.raises(openai.NotFoundError):
        chat(server, "x", model="other")
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 4096 tokens"):
        chat(server, "x " * 9000)


def test_a_stream_that_loses_its_replica_is_the_same_to_its_client(server):
    options = {"stream": True, "max_tokens": 20, "temperature": 0.7, "seed": 5}
    before = [chunk.choices[0] for chunk in chat(server, "def rotate(", **options)]
    server.faults += [2, 4]
    after = [chunk.choices[0] for chunk in chat(server, "def rotate(", **options)]
    assert server.faults == []
    text = "".join(choice.delta.content or "" for choice in before)
    assert "".join(choice.delta.content or "" for choice in after) == text
    assert after[-1].finish_reason == before[-1].finish_reason


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_what_cannot_be_continued_ends_with_an_error_chunk(server, api):
    server.faults += [3] * (1 + server.config.gateway.retries)
    options = {"stream": True, "max_tokens": 200, "extra_body": {"warmkv": {"ignore_eos": True}}}
    if api == "chat":
        chunks = chat(server, "Hello", **options)
    else:
        chunks = server.openai().completions.create(model=server.config.model.name, prompt="Hello", **options)
    seen = []
    choices = (seen.append(chunk.choices[0]) for chunk in chunks)
    with pytest.raises(openai.APIError, match="ConnectionError"):
        list(choices)
    assert seen
    assert all(choice.finish_reason is None for choice in seen)
