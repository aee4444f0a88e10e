"""Penalties, bias, min_p and what may not end yet, against the obvious loop in float64; log-probabilities."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.replicas.conftest import VOCABULARY, Driver, make_request, replace_eos
from tests.unit.replicas.engine.test_engine import prompt
from tests.unit.replicas.engine.test_sampling import draws
from warmkv.replicas.engine.logits_processors import LogitsProcessor, process
from warmkv.replicas.engine.sampling import draw, sample
from warmkv.replicas.engine.scheduler import Sequence
from warmkv.replicas.protocol import LEAST_LOGPROB, SamplingParams, ThinkingBudget, UnservableRequestError

TOKENS, EOS = 8, 7
PARAMETERS = st.fixed_dictionaries(
    {
        "frequency_penalty": st.sampled_from([0.0, 0.5, -1.0, 2.0]),
        "presence_penalty": st.sampled_from([0.0, 0.7, -2.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5]),
        "min_tokens": st.sampled_from([0, 3]),
        "stop_token_ids": st.sampled_from([(), (1,)]),
        "logit_bias": st.sampled_from([(), ((0, 5.0), (3, -100.0)), ((EOS, 1.5),)]),
    }
)
ROWS = st.lists(
    st.tuples(
        st.lists(st.floats(-9, 9, width=32), min_size=TOKENS, max_size=TOKENS),
        PARAMETERS,
        st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=6),  # the prompt
        st.lists(st.integers(0, TOKENS - 1), max_size=6),  # the answer so far
        st.none() | st.lists(st.booleans(), min_size=TOKENS, max_size=TOKENS),  # what a constraint rules out
    ),
    min_size=1,
    max_size=4,
)


def obvious(logits, sampling, prompt, drawn, banned):
    """The definition, token by token."""
    changed = []
    for token, value in enumerate(logits):
        value += sum(bias for other, bias in sampling.logit_bias if other == token)
        if len(drawn) < sampling.min_tokens and token in (EOS, *sampling.stop_token_ids):
            value = -math.inf
        if token in prompt or token in drawn:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        value -= sampling.frequency_penalty * drawn.count(token)
        value -= sampling.presence_penalty * (token in drawn)
        changed.append(-math.inf if banned and banned[token] else value)
    return changed


class Unmoved:
    """Stands for a matcher, whose mask a test gives."""

    def consume_token(self, token: int) -> bool:
        return True

    def is_stopped(self) -> bool:
        return False


def processed(rows) -> list[list[float]]:
    processors = []
    for _, parameters, said, drawn, banned in rows:
        request = make_request(said, **parameters)
        one = LogitsProcessor.of(request, [EOS], Unmoved() if banned else None)
        for token in drawn if one else ():
            assert one.take(token) == ""
        processors.append(one)
    masks: Future[torch.Tensor] = Future()
    if found := [banned for *_, banned in rows if banned]:
        masks.set_result(torch.tensor(found))
    return process(processors, torch.tensor([row[0] for row in rows]), masks if found else None).tolist()


@given(ROWS)
def test_each_row_is_changed_by_its_own_request_as_defined(rows):
    for row, changed in zip(rows, processed(rows), strict=True):
        logits, parameters, said, drawn, banned = row
        expected = obvious(logits, SamplingParams(1, **parameters), said, drawn, banned)
        assert changed == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert processed([row])[0] == changed  # bit for bit, whoever shares the step


@pytest.mark.parametrize("penalty", [1e-39, 1e-300])
def test_logits_stay_finite_under_a_tiny_repetition_penalty(penalty):
    """Take one that is zero in float32, or by which a quotient is infinite; tokens of the prompt may be banned, too."""
    parameters = {"repetition_penalty": penalty, "min_tokens": 1}
    (changed,) = processed([([5.0] * (TOKENS - 1) + [-5.0], parameters, [2, EOS], [], None)])
    assert changed[EOS] == -math.inf
    assert max(changed) == changed[2] < math.inf
    assert changed[:2] == [5.0, 5.0]


def test_the_probability_of_every_token_left_is_at_least_min_p_of_the_highest():
    logits, rows = torch.tensor([2.0, 1.9, 1.0, 0.0, -3.0]), 4000
    for temperature, min_p in ((1.0, 0.3), (0.5, 0.3), (1.0, 0.95), (1.0, 1.0)):
        weights = [math.exp(float(value) / temperature) for value in logits.double()]
        kept = [weight for weight in weights if weight >= min_p * weights[0]]
        uniform = [row / rows for row in range(rows)]
        same = ([value] * rows for value in (temperature, 1.0, 0, min_p))
        drawn = sample(logits.expand(rows, -1), draws(*same, uniform))
        shares = torch.bincount(drawn, minlength=5) / rows
        expected = [weight / sum(kept) if weight in kept else 0.0 for weight in weights]
        assert shares.tolist() == pytest.approx(expected, abs=2 / rows)


def test_what_is_ruled_out_is_not_drawn_by_the_highest_number_either():
    """In float32 the highest number below one is one, and the whole mass lies before what is ruled out."""
    logits = torch.full((1, 50), -math.inf)
    logits[0, 20:30] = torch.linspace(0, 1, 10)
    for top_p in (0.5, 1.0):
        assert 20 <= sample(logits, draws([1.0], [top_p], [0], [0.0], [1 - 2**-53])).item() < 30


MIXED = [
    {"temperature": 0.9, "seed": 3, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.2, "seed": 4, "frequency_penalty": 0.9, "presence_penalty": 0.2, "logit_bias": ((5, 3.0),)},
    {"temperature": 0.7, "seed": 5, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "seed": 6, "logprobs": 3, "min_tokens": 4},
]


def test_an_answer_is_the_same_alone_and_among_others(models):
    # No token comes twice in a prompt, as in test_resume: which of equal keys is kept would hang on the last bit.
    said = [[(11 * at + 3 + 7 * number) % VOCABULARY for at in range(20 + number)] for number in range(len(MIXED))]
    requests = [make_request(said[n], new=20, name=str(n), **sampling) for n, sampling in enumerate(MIXED)]
    alone = [Driver(models["llama"]).run(request)[0] for request in requests]
    assert Driver(models["llama"]).run(*requests) == alone
    assert Driver(models["llama"], max_slots=2).run(*reversed(requests)) == alone[::-1]
    plain = [
        replace(one, sampling=SamplingParams(20, one.sampling.temperature, seed=one.sampling.seed)) for one in requests
    ]
    assert all(Driver(models["llama"]).run(one)[0] != own for one, own in zip(plain[:4], alone[:4], strict=True))


def test_log_probabilities_are_those_of_the_model_whatever_is_drawn(models):
    seen: list[torch.Tensor] = []
    driver = Driver(models["llama"])
    driver.engine.executor.watch_logits = lambda sequences, logits: seen.append(logits[0].double())
    request = make_request(prompt(20), new=6, logprobs=2, temperature=2.0, seed=1, logit_bias=((4, 9.0),))
    (tokens,) = driver.run(request)
    told = driver.logprobs("request")
    assert [one.token for one in told] == tokens
    for one, logits in zip(told, seen, strict=True):
        expected = logits.log_softmax(-1)
        assert one.logprob == pytest.approx(expected[one.token].item(), abs=1e-5)
        values, best = expected.topk(2)
        assert [token for token, _ in one.top] == best.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_log_probabilities_have_a_floor(models):
    request = make_request(prompt(5), logprobs=1)
    sequence = Sequence(request, None, None, 0.0, None)  # type: ignore[arg-type]
    assert draw([sequence], torch.tensor([[0.0, -math.inf, 20000.0]])) == [2]
    assert sequence.logprobs is not None
    assert sequence.logprobs.top == ((2, 0.0),)
    sequence.request = replace(request, resume=(1,))
    draw([sequence], torch.tensor([[0.0, -math.inf, 20000.0]]))
    assert (sequence.logprobs.token, sequence.logprobs.logprob) == (1, LEAST_LOGPROB)  # what another replica drew


def test_an_answer_ends_at_a_stop_token_and_not_before_min_tokens(models):
    (free,) = Driver(models["llama"]).run(make_request(prompt(30), new=12))
    at = next(i for i in range(2, 12) if free[i] not in free[:i])
    driver = Driver(models["llama"])
    assert driver.run(make_request(prompt(30), new=12, stop_token_ids=(free[at],))) == [free[:at]]
    assert (driver.finished("request").reason, driver.finished("request").output_tokens) == ("stop", at + 1)
    for ends in ({"stop_token_ids": (free[at],)}, {}):
        driver = Driver(models["llama"] if ends else replace_eos(models["llama"], free[at]))
        (tokens,) = driver.run(make_request(prompt(30), new=12, min_tokens=at + 2, **ends))
        assert len(tokens) >= at + 2
        assert free[at] not in tokens[: at + 2]


@pytest.mark.parametrize("field", [{"stop_token_ids": (VOCABULARY,)}, {"logit_bias": ((-1, 1.0),)}])
def test_token_ids_beyond_the_vocabulary_are_refused_by_field(models, field):
    with pytest.raises(UnservableRequestError, match=f"{next(iter(field))}: .* is not a token below {VOCABULARY}"):
        Driver(models["llama"]).submit(make_request(prompt(6), **field))


class Operations(TorchDispatchMode):
    """Counts operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_plain_step_calls_nothing_new():
    """The operations of a greedy draw: the highest logit, whether it is finite, and one way to the host."""

    def operations(**sampling: object) -> list[str]:
        request = make_request(prompt(5), **sampling)
        sequence = Sequence(request, None, None, 0.0, None, LogitsProcessor.of(request, [], None))  # type: ignore[arg-type]
        with Operations() as counted:
            draw([sequence], torch.zeros(1, VOCABULARY))
        return [name for name in counted.called if "zeros" not in name]

    plain = operations()
    assert sum("aten.max" in name for name in plain) == 1
    assert len(plain) <= 8
    assert operations(stop_token_ids=(3,), seed=4) == plain
    for used in ({"logprobs": 0}, {"min_tokens": 1}, {"presence_penalty": 1.0}, {"logit_bias": ((1, 1.0),)}):
        assert len(operations(**used)) > len(plain)


OPEN, CLOSE = 90, 91


def thoughts(tokens: list[int], *, is_open: bool) -> int:
    """Return how many tokens stand within thinking."""
    found = 0
    for token in tokens:
        if token in (OPEN, CLOSE):
            is_open = token == OPEN
        else:
            found += is_open
    return found


@pytest.mark.parametrize("budget", [0, 3])
@pytest.mark.parametrize("is_open", [False, True])
def test_thinking_ends_where_its_budget_is_used_up(models, budget, is_open):
    """Whatever the model, bias and penalties would rather have; thinking that begins again counts on."""
    said, ended = prompt(20), 0
    for seed in range(6):
        options = {"new": 30, "temperature": 1.5, "seed": seed, "logit_bias": ((OPEN, 6.0), (CLOSE, -100.0))}
        options["thinking"] = ThinkingBudget(budget, OPEN, CLOSE, is_open)
        alone = Driver(models["llama"])
        (tokens,) = alone.run(make_request(said, repetition_penalty=1.3, **options))
        assert thoughts(tokens, is_open=is_open) <= budget
        closings = [at for at, token in enumerate(tokens) if token == CLOSE]
        assert all(thoughts(tokens[:at], is_open=is_open) == budget for at in closings)  # not before
        ended += len(closings)
        request = make_request(said, repetition_penalty=1.3, **options)
        taken = Driver(models["llama"]).run(replace(request, resume=tuple(tokens[:7])))[0]
        assert taken == tokens  # also where another replica goes on
        other = make_request(prompt(9), new=30, name="other", logit_bias=((OPEN, 6.0),))
        both = Driver(models["llama"])
        assert both.run(request, other)[0] == tokens
        assert CLOSE not in both.tokens("other")
    assert ended > 3


@pytest.mark.parametrize("others", [(), (None,)])
def test_a_constraint_has_thinking_end_where_it_allows_that(others):
    """Draw from what goes on with a character of several tokens, within which thinking may not end."""

    def changed(banned: list[bool]) -> list[float]:
        request = make_request([2], thinking=ThinkingBudget(0, 0, 1, is_open=True), min_tokens=1, stop_token_ids=(1,))
        one = LogitsProcessor.of(request, [EOS], Unmoved())
        masks: Future[torch.Tensor] = Future()
        masks.set_result(torch.tensor([banned]))
        logits = torch.full((1 + len(others), TOKENS), 3.0)
        first, *rest = process([one, *others], logits, masks).tolist()
        assert rest == [[3.0] * TOKENS for _ in others]
        return first

    only = [-math.inf] * TOKENS
    assert changed([False] * TOKENS) == [*only[:1], 0.0, *only[2:]]
    assert changed([token != 4 for token in range(TOKENS)]) == [*only[:4], 3.0, *only[5:]]
