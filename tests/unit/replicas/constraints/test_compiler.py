"""Constraints compiled: what they allow, what is refused and why, and what is kept."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from tests.tokenizers import PurePython
from tests.unit.replicas.constraints.conftest import EOS, TOKENIZER, ids
from warmkv.models import tiny
from warmkv.replicas.constraints import compiler as compiling
from warmkv.replicas.constraints.compiler import Compiler, ConstraintError
from warmkv.replicas.protocol import Constraint, ConstraintKind

OBJECT = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["a", "b"]}, "n": {"type": "integer", "minimum": 0, "maximum": 20}},
        "required": ["name"],
        "additionalProperties": False,
    }
)
GBNF = 'root ::= "SELECT " column\ncolumn ::= [a-z]+ ("," [a-z]+)*'

CASES: list[tuple[ConstraintKind, str, list[str], list[str]]] = [
    (
        "json_schema",
        OBJECT,
        ['{"name": "a", "n": 20}', '{"name":"b"}', '{\n    "name": "a"\n}'],
        ['{"n": 1}', '{"name": "c"}', '{"name": "a", "n": 21}', '{"name":  "a"}', '{"name": "a"} ', "a"],
    ),
    ("json_object", "", ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a": }', "{}{}"]),
    ("regex", "(yes|no)!{1,2}", ["yes!", "no!!"], ["maybe", "yes", "no!!!"]),
    ("choice", '["red", "\\"blue\\n", "reddish"]', ["red", '"blue\n', "reddish"], ["re", "blue", "redd"]),
    ("grammar", 'start: "a" b?\nb: /[0-9]+/', ["a", "a12"], ["b", "1", "a1b"]),
    ("grammar", GBNF, ["SELECT a", "SELECT a,bc"], ["SELECT", "select a", "SELECT a,"]),
]


@pytest.mark.parametrize(("kind", "text", "good", "bad"), CASES, ids=lambda value: str(value)[:20])
def test_texts_that_satisfy_it_may_end_and_others_may_not(compiler, kind, text, good, bad):
    for said, expected in [*((one, True) for one in good), *((one, False) for one in bad)]:
        matcher = compiler.matcher(Constraint(kind, text))
        assert all(map(matcher.consume_token, [*ids(said), EOS])) == expected, said


def nested(depth: int) -> str:
    return "{" + '"properties": {"a": {' * depth + "}}" * depth + "}"


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json_schema", "{", "property name|JSON|EOF"),
        ("json_schema", "[1]", "a JSON schema is an object"),
        ("json_schema", '{"type": "text"}', "text"),
        ("json_schema", '{"not": {"type": "object"}}', "not"),
        ("json_schema", '{"$ref": "#/$defs/absent"}', "absent"),
        ("json_schema", '{"$ref": "#"}', "nothing satisfies it|NoExtension"),
        ("json_schema", nested(150), "recursion"),
        ("regex", "[ab", "unclosed character class"),
        ("regex", "a" * 200_000, "200000 characters are more than 131072"),
        ("choice", "[]", "no text to choose"),
        ("grammar", "no grammar", "neither Lark .* nor GBNF"),
        ("grammar", 'start: "a" missing', "missing"),
        ("grammar", 'root ::= "a" missing', "missing"),
        ("grammar", "root ::= " + "(" * 9000, "recursion|Expected"),
        ("grammar", "root ::= a\n" + "a ::= b\n" * 300, "301 rules of GBNF are more than 16384 and 256"),
        ("grammar", "start: <|special|>", "special"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_compiled_is_refused_with_a_reason(compiler, kind, text, why):
    with pytest.raises(ConstraintError, match=why) as refused:
        compiler.matcher(Constraint(kind, text))
    assert len(str(refused.value)) < 2000


def test_equal_constraints_are_compiled_once_and_few_are_kept(monkeypatch):
    compiled: list[Constraint] = []
    compile_ = compiling._compile
    monkeypatch.setattr(compiling, "_compile", lambda one, tokenizer: compiled.append(one) or compile_(one, tokenizer))
    compiler = Compiler(SimpleNamespace(backend_tokenizer=TOKENIZER), eos_ids=[EOS])
    wanted = [Constraint("regex", f"a{{{n}}}b") for n in range(1, compiling.MOST_CACHED + 2)]
    first = compiler.matcher(wanted[0])
    assert first.consume_token(ids("a")[0])
    assert not compiler.matcher(wanted[0]).consume_token(ids("b")[0])  # of its own: no "a" was taken
    for one in wanted:
        compiler.matcher(one)
    assert compiled == wanted
    assert compiler.cached == compiling.MOST_CACHED
    compiler.matcher(wanted[0])
    assert compiled == [*wanted, wanted[0]]


def test_constraints_that_are_kept_are_bounded_in_characters_too(monkeypatch):
    monkeypatch.setattr(compiling, "MOST_CACHED_CHARACTERS", 100)
    compiler = Compiler(SimpleNamespace(backend_tokenizer=TOKENIZER), eos_ids=[EOS])
    for count, cached in ((40, 1), (41, 2), (42, 2), (101, 0), (10, 1)):
        assert compiler.matcher(Constraint("choice", f'["{"a" * (count - 4)}"]')).consume_token(ids("a")[0])
        assert compiler.cached == cached


def test_a_tokenizer_in_python_is_refused_by_name():
    with pytest.raises(ConstraintError, match="tokenizers library"):
        Compiler(PurePython(TOKENIZER)).matcher(Constraint("json_object"))


def test_work_beyond_the_limits_is_refused_before_a_token_is_drawn():
    """Tokens of many characters reach far into a grammar: the first mask would be too much work."""
    words = Compiler(SimpleNamespace(backend_tokenizer=Tokenizer.from_file(str(tiny.PATH / "tokenizer.json"))))
    variants = [
        {"type": "object", "properties": {f"p{i}": {"type": "integer"}, "q": {"const": i}}, "required": ["q"]}
        for i in range(400)
    ]
    words.matcher(Constraint("json_schema", json.dumps({"anyOf": variants[:100]})))
    with pytest.raises(ConstraintError, match="items; max is 1000"):
        words.matcher(Constraint("json_schema", json.dumps({"anyOf": variants})))
