"""Log-probabilities of prompts, against transformers' plain forward."""

from __future__ import annotations

import pytest
import torch

from tests.unit.replicas.conftest import VOCABULARY, Driver, make_request, replace_eos
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.replicas.engine import engine as engines
from warmkv.replicas.loading.last_layer import DrawnOnly
from warmkv.replicas.protocol import Failed, PromptLogprobs, Started, TokenLogprobs


def told(driver: Driver, name: str = "request") -> list[TokenLogprobs]:
    """Return what came of a prompt, all of it before its answer starts."""
    events = driver.told[name]
    before = events[: next(at for at, event in enumerate(events) if isinstance(event, Started))]
    assert all(isinstance(event, PromptLogprobs) for event in before)
    return [one for event in before for one in event.logprobs]


def check(found: list[TokenLogprobs], tokens: list[int], reference, top: int) -> None:
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)
    assert [one.token for one in found] == tokens[1:]
    for one, row in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(row[one.token].item(), abs=1e-4)
        assert len(one.top) == top
        assert [value for _, value in one.top] == pytest.approx(row.topk(top)[0].tolist(), abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("new", "policy"), [(0, "full"), (1, "full"), (4, "snapkv@0.5")])
def test_they_are_those_of_a_plain_forward(models, references, family, new, policy):
    """Whatever the prompt's answer keeps of it, and whoever shares its steps; 40 tokens in steps of 16."""
    driver = Driver(models[family])
    tokens, other = prompt(40), prompt(23, seed=5)
    scored = make_request(tokens, new=new, policy=policy, prompt_logprobs=2)
    beside = make_request(other, new=6, name="beside")
    also = make_request(other, new=1, name="also", prompt_logprobs=0)
    driver.run(beside, scored, also)
    check(told(driver), tokens, references[family], 2)
    check(told(driver, "also"), other, references[family], 0)
    assert told(driver, "beside") == []
    alone = Driver(models[family])
    assert [len(driver.tokens("beside")), driver.tokens("request")] == [6, alone.run(scored)[0]]


def test_a_cached_prefix_is_computed_again_and_stays_cached(models, references):
    driver, tokens = Driver(models["llama"]), prompt(40)
    driver.run(make_request(tokens, new=1, name="before"))
    driver.run(make_request(tokens, new=1, prompt_logprobs=1))
    driver.run(make_request(tokens, new=1, name="after"))
    check(told(driver), tokens, references["llama"], 1)
    assert [driver.started(name).cached_tokens for name in ("before", "request", "after")] == [0, 0, 39]
    assert driver.run(make_request([5], new=1, name="one", prompt_logprobs=1))
    assert told(driver, "one") == []


def test_a_pass_holds_the_logits_of_a_few_positions(models, references, monkeypatch):
    """However many prompts there are, and however long: by the shapes of what is computed."""
    monkeypatch.setattr(engines, "positions_at_once", lambda vocabulary, dtype_bytes: 5)
    driver = Driver(models["llama"])
    shapes: list[int] = []
    forward = driver.engine.executor.forward

    def seen(*args):
        logits = forward(*args)
        shapes.append(len(logits))
        return logits

    driver.engine.executor.forward = seen
    prompts = {name: prompt(17 + at, seed=at) for at, name in enumerate("abc")}
    driver.run(*[make_request(tokens, new=0, name=name, prompt_logprobs=1) for name, tokens in prompts.items()])
    assert max(shapes) <= 5 + len(prompts)  # and those that are drawn from
    for name, tokens in prompts.items():
        check(told(driver, name), tokens, references["llama"], 1)


def test_every_token_has_one_where_the_answer_ends_at_once(models):
    """Clients drop the last entry as that of the one token they asked for."""
    first = Driver(models["llama"]).run(make_request(prompt(20), new=1))[0][0]
    driver = Driver(replace_eos(models["llama"], first))
    driver.run(make_request(prompt(20), new=1, logprobs=1, prompt_logprobs=1))
    driver.run(make_request(prompt(20), new=1, logprobs=1, name="answer alone"))
    (ending,) = driver.finished("request").logprobs
    assert (driver.finished("request").reason, ending.token) == ("end", first)
    assert driver.finished("answer alone").logprobs == ()


def test_a_prompt_whose_logits_are_no_numbers_fails_alone(models, monkeypatch):
    driver = Driver(models["llama"])
    forward, bad = driver.engine.executor.forward, VOCABULARY - 1

    def spoiled(ids, positions, state):
        logits = forward(ids, positions, state)
        if isinstance(state, DrawnOnly):
            logits[(ids[0, state.places] == bad).nonzero()] = float("nan")
        return logits

    monkeypatch.setattr(driver.engine.executor, "forward", spoiled)
    good = prompt(12)
    assert bad not in good
    driver.run(
        make_request([1, bad, 2, 3], new=1, name="bad", prompt_logprobs=0),
        make_request(good, new=1, prompt_logprobs=0),
    )
    (end,) = (event for event in driver.told["bad"] if isinstance(event, Failed))
    assert end.fault == "request"
    assert len(told(driver)) == len(good) - 1
