"""Answers of a random model under constraints: valid where they ended, whatever happens to them on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.constraints.conftest import CHARACTERS, EOS, ids, text
from tests.unit.replicas.engine.test_engine import prompt
from tests.unit.replicas.engine.test_preemption import Clock
from warmkv.replicas.protocol import Constraint, Failed, GenerateRequest, UnservableRequestError

LIKELY = tuple((CHARACTERS.index(character), 4.0) for character in '"}],:0')
"""A bias towards the ends of strings and numbers, so that most random answers end."""

NAMES = st.text("abcdef", min_size=1, max_size=4)
LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.fixed_dictionaries({"type": st.just("integer"), "minimum": st.integers(-50, 0), "maximum": st.integers(1, 999)}),
    st.just({"type": "number", "minimum": -1, "exclusiveMaximum": 3}),
    st.fixed_dictionaries({"type": st.just("string"), "minLength": st.integers(0, 3), "maxLength": st.integers(3, 9)}),
    st.sampled_from(["^[a-c]{2,5}$", "x|yz", "^\\d+-\\d$"]).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.sampled_from(["date", "uuid", "ipv4"]).map(lambda form: {"type": "string", "format": form}),
    st.fixed_dictionaries(
        {"enum": st.lists(NAMES | st.integers(0, 99) | st.none(), min_size=1, max_size=4, unique=True)}
    ),
    st.fixed_dictionaries({"const": st.booleans() | NAMES}),
)


def composed(parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    @st.composite
    def objects(draw: Any) -> dict[str, Any]:
        properties = draw(st.dictionaries(NAMES, parts, min_size=1, max_size=3))
        required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": parts, "minItems": st.integers(0, 2), "maxItems": st.integers(2, 3)}
    )
    return st.one_of(objects(), arrays, st.lists(parts, min_size=1, max_size=3).map(lambda some: {"anyOf": some}))


def referring(part: dict[str, Any]) -> dict[str, Any]:
    return {"$defs": {"it": part}, "type": "array", "items": {"$ref": "#/$defs/it"}, "maxItems": 2}


VALUES = st.recursive(LEAVES, composed, max_leaves=5)
SCHEMAS = VALUES | VALUES.map(referring)


def request(constraint: Constraint | None, *, new: int = 80, **sampling: Any) -> GenerateRequest:
    sampling = {"temperature": 1.0, "seed": 1, "logit_bias": LIKELY, **sampling}
    return make_request(prompt(20), new=new, **{"constraint": constraint, **sampling})


@pytest.mark.parametrize(
    "schemas", [pytest.param(15, marks=pytest.mark.short), pytest.param(201, marks=pytest.mark.soak)]
)
def test_every_answer_that_ended_satisfies_its_schema(ending, compiler, schemas, soaked):
    ended, schemas = 0, soaked(schemas, least=60)

    @settings(
        max_examples=schemas // 3, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
    )
    @given(st.lists(SCHEMAS, min_size=3, max_size=3), st.integers(0, 99))
    def answers(given, seed):
        nonlocal ended
        driver = Driver(ending, compiler=compiler)
        constraints = [Constraint("json_schema", json.dumps(schema)) for schema in given]
        asked = [replace(request(one, seed=seed), id=str(number)) for number, one in enumerate(constraints)]
        free = replace(request(None, seed=seed), id="free")
        *told, _ = driver.run(*asked, free)
        for number, (schema, tokens) in enumerate(zip(given, told, strict=True)):
            end = driver.finished(str(number))
            if end.reason == "end":
                ended += 1
                value = json.loads(text(tokens))
                jsonschema.Draft202012Validator(schema).validate(value)
            else:
                assert (end.reason, end.output_tokens) == ("length", 80)

    answers()
    assert ended >= schemas // 2  # the others were cut by max_tokens


GRAMMAR = Constraint("regex", "([a-z]{3} [0-9]{3}\n){2,6}done")


@pytest.fixture(scope="module")
def whole(ending, compiler) -> list[int]:
    """The answer of a request that nothing happens to."""
    driver = Driver(ending, compiler=compiler)
    (tokens,) = driver.run(request(GRAMMAR))
    assert driver.finished("request").reason == "end"
    return tokens


def test_a_resumed_answer_goes_on_where_its_constraint_was(ending, compiler, whole):
    for cut in (1, 5, len(whole) - 1, len(whole)):
        driver = Driver(ending, compiler=compiler)
        assert driver.run(replace(request(GRAMMAR), resume=tuple(whole[:cut]))) == [whole]
        assert driver.finished("request").output_tokens == len(whole)  # complete: it ends without an end of text


def test_a_preempted_answer_and_those_beside_it_are_as_they_were(ending, compiler, whole):
    greedy = [replace(request(GRAMMAR), id=f"a{n}", tenant="a") for n in range(3)]
    waiting = replace(request(GRAMMAR), id="b", tenant="b")
    driver = Driver(ending, compiler=compiler, clock=Clock(), max_slots=3, preempt_seconds=5.0)
    driver.submit(*greedy)
    for _ in range(8):
        driver.engine.step()
    assert driver.run(waiting) == [whole]
    assert driver.engine.stats().preempted > 0
    assert [driver.tokens(one.id) for one in greedy] == [whole] * 3


def test_a_step_that_fails_is_repeated_with_the_same_masks(ending, compiler, whole):
    driver = Driver(ending, compiler=compiler)
    forward, calls = driver.engine.executor.forward, 0

    def failing(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise RuntimeError("a fault of the moment")
        return forward(*given)

    driver.engine.executor.forward = failing  # type: ignore[assignment]
    assert driver.run(request(GRAMMAR)) == [whole]


def test_max_tokens_cuts_and_the_end_of_text_comes_where_the_grammar_may_end(ending, compiler):
    driver = Driver(ending, compiler=compiler)
    always = ((EOS, 100.0),)  # the model would end at once
    number = Constraint("regex", "[0-9]{4,}")
    ends = replace(request(number, logit_bias=always), id="ends")
    cut = replace(request(number, logit_bias=always, new=3), id="cut")
    goes_on = replace(request(number, logit_bias=always, new=9, ignore_eos=True), id="goes on")
    later = replace(request(number, logit_bias=always, min_tokens=7), id="later")
    told = driver.run(ends, cut, goes_on, later)
    assert [len(tokens) for tokens in told] == [4, 3, 9, 7]
    assert all(text(tokens).isdecimal() for tokens in told)
    assert [driver.finished(name).reason for name in ("ends", "cut", "goes on", "later")] == [
        "end",
        "length",
        "length",
        "end",
    ]


def test_a_grammar_that_exceeds_its_limits_on_the_way_ends_alone(ending, compiler, whole):
    """It is its own fault: no other replica is tried, and the model counts as working."""
    driver = Driver(ending, compiler=compiler)
    bomb = Constraint("grammar", 'start: e\ne: e e | e e e | e "b" e | e "c" e | "a"')
    told = driver.run(
        replace(request(bomb, new=400, ignore_eos=True), id="bomb"),
        request(GRAMMAR),
    )
    assert told[1] == whole
    end = driver.told["bomb"][-1]
    assert isinstance(end, Failed)
    assert end.fault == "request"
    assert "items; max is 1000" in end.message
    assert not any(driver.engine.faults.counts.values())


def test_masks_are_computed_once_a_step_for_those_that_need_them(ending, compiler):
    driver = Driver(ending, compiler=compiler)
    begun: list[int] = []
    begin = driver.engine.executor._masks.begin
    driver.engine.executor._masks.begin = lambda matchers: begun.append(len(matchers)) or begin(matchers)  # type: ignore
    driver.run(make_request(prompt(20), new=5), replace(request(None), id="penalized"))
    assert begun == []
    driver.run(
        *(replace(request(Constraint("regex", "[a-z]{9}")), id=str(n)) for n in range(4)), make_request(prompt(9))
    )
    assert sum(begun) == 4 * 9
    assert max(begun) == 4
    assert len(begun) < 2 * 9


def test_a_constraint_without_a_matcher_is_refused(ending):
    with pytest.raises(UnservableRequestError, match="does not constrain answers"):
        Driver(ending).submit(request(GRAMMAR))


def test_cancelling_frees_a_constrained_answer(ending, compiler):
    driver = Driver(ending, compiler=compiler)
    driver.submit(request(GRAMMAR))
    for _ in range(4):
        driver.engine.step()
    driver.engine.cancel("request")
    assert driver.run(replace(request(GRAMMAR), id="next"))
    assert driver.finished("request").reason == "cancelled"
    assert ids("done") == driver.tokens("next")[-4:]
