"""Response templates of families: calls, thinking and text, whole, cut anywhere, broken and cut off."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from warmkv.config import ConfigError
from warmkv.config.model import ResponseTemplate
from warmkv.platform.gateway.apis.chat_parsing.families import FAMILIES, family_of
from warmkv.platform.gateway.apis.chat_parsing.format import ResponseFormat
from warmkv.platform.gateway.apis.chat_parsing.parser import READ, PartParser
from warmkv.platform.gateway.apis.chat_parsing.parts import Part, Text, Thinking, ToolCall, merged
from warmkv.platform.gateway.apis.tokens import Piece

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "times": {"type": "integer"}}},
        },
    }
    for name in ("look_up", "add")
]
NAMES = {"look_up", "add"}


@functools.cache
def loaded(family: str) -> Any:
    return load_response_template(dict(FAMILIES[family].template))


def parse(
    family: str, text: str, cuts: Iterable[int] = (), *, complete: bool = True, prefix: str = "", parallel: bool = True
) -> list[Part]:
    """The parts of a text that comes in pieces."""
    names = NAMES if FAMILIES[family].undelimited else None
    parser = PartParser(loaded(family), prefix, TOOLS, names, parallel)
    found = list[Part]()
    for start, stop in itertools.pairwise([0, *cuts, len(text)]):
        found += parser.feed(text[start:stop])
    return merged(found + parser.finish(complete=complete))


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments))


LOOK, ADD, NONE = call("look_up", word="a <b>"), call("add", times=2, word="x\ny"), call("add")

# What models of each family write, and what it is.
WRITTEN: dict[str, list[tuple[str, list[Part]]]] = {
    "hermes": [
        ('<tool_call>\n{"name": "look_up", "arguments": {"word": "a <b>"}}\n</tool_call>', [LOOK]),
        (
            'Let me see.\n\n<tool_call>\n{"name": "look_up", "arguments": {"word": "a <b>"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "add", "arguments": {"times": 2, "word": "x\\ny"}}\n</tool_call>\nDone.',
            [Text("Let me see."), LOOK, ADD, Text("Done.")],
        ),
        ("<think>\nTwo <b>\n\n</think>\n\n2 < 3 \n", [Thinking("Two <b>"), Text("2 < 3 \n")]),
        ('<think>Hm</think><tool_call>{"name": "add"}</tool_call>', [Thinking("Hm"), NONE]),
    ],
    "qwen3_coder": [
        (
            "I look.\n<tool_call>\n<function=look_up>\n<parameter=word>\na <b>\n</parameter>\n</function>\n"
            "</tool_call>\n"
            "<tool_call>\n<function=add>\n<parameter=times>\n2\n</parameter>\n<parameter=word>\nx\ny\n</parameter>\n"
            "</function>\n</tool_call>",
            [Text("I look."), LOOK, ADD],
        ),
        ("<tool_call>\n<function=add>\n</function>\n</tool_call>\nDone.", [NONE, Text("Done.")]),
    ],
    "glm4_moe": [
        (
            "<think>Hm</think>I look.<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>a <b></arg_value>\n"
            "</tool_call>"
            "<tool_call>add\n<arg_key>times</arg_key>\n<arg_value>2</arg_value>\n<arg_key>word</arg_key>\n"
            "<arg_value>x\ny</arg_value>\n</tool_call>\nDone.",
            [Thinking("Hm"), Text("I look."), LOOK, ADD, Text("Done.")],
        ),
        ("<tool_call>add</tool_call>", [NONE]),
    ],
    "glm4": [
        ('look_up\n{"word": "a <b>"}', [LOOK]),
        (
            'look_up\n{"word": "a <b>"}<|assistant|>add\n{"times": 2, "word": "x\\ny"}<|observation|>',
            [LOOK, ADD],
        ),
        ("\nadd\nis a word", [Text("\nadd\nis a word")]),
    ],
    "llama3": [
        ('{"name": "look_up", "parameters": {"word": "a <b>"}}', [LOOK]),
        (
            '<|python_tag|>{"name": "look_up", "parameters": {"word": "a <b>"}}; '
            '{"name": "add", "parameters": {"times": 2, "word": "x\\ny"}}',
            [LOOK, ADD],
        ),
        ('Say {"name": "add"}; or not.', [Text('Say {"name": "add"}; or not.')]),
        ('{"word": "a"}', [Text('{"word": "a"}')]),
    ],
    "gemma3": [
        ('{"name": "look_up", "parameters": {"word": "a <b>"}}', [LOOK]),
        (
            'Sure:\n```json\n{"name": "look_up", "parameters": {"word": "a <b>"}}\n```\n```tool_code\n'
            '{"name": "add", "parameters": {"times": 2, "word": "x\\ny"}}\n```\nDone.',
            [Text("Sure:"), LOOK, ADD, Text("Done.")],
        ),
        ('```json\n{"b": 1}\n```', [Text('```json\n{"b": 1}\n```')]),
    ],
    "function_gemma": [
        (
            "I look.<start_function_call>call:look_up{word:<escape>a <b><escape>}<end_function_call>"
            "<start_function_call>call:add{times:2,word:<escape>x\ny<escape>}<end_function_call>Done.",
            [Text("I look."), LOOK, ADD, Text("Done.")],
        ),
    ],
    "mistral": [
        (
            'I look.[TOOL_CALLS] [{"name": "look_up", "arguments": {"word": "a <b>"}, "id": "abcdefghi"}, '
            '{"name": "add", "arguments": {"times": 2, "word": "x\\ny"}}]',
            [Text("I look."), LOOK, ADD],
        ),
        (
            '[THINK]Hm[/THINK]I look.[TOOL_CALLS]look_up[ARGS]{"word": "a <b>"}'
            '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"times": 2, "word": "x\\ny"}',
            [Thinking("Hm"), Text("I look."), LOOK, ADD],
        ),
        ('[TOOL_CALLS]look_up{"word": "a <b>"}', [LOOK]),
    ],
    "gpt_oss": [
        (
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>"
            '{"word": "a <b>"}<|call|>',
            [Thinking("Hm"), Text("I look."), LOOK],
        ),
        (
            '<|channel|>commentary to=functions.look_up<|message|>{"word": "a <b>"}<|call|><|start|>assistant '
            'to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"times": 2, "word": "x\\ny"}<|call|>',
            [LOOK, ADD],
        ),
        (
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>2 <| 3<|return|>",
            [Thinking("Hm"), Text("2 <| 3")],
        ),
    ],
    "think": [("<think>\nHm\n</think>\n\nYes.", [Thinking("Hm"), Text("Yes.")])],
}
EXAMPLES = [
    pytest.param(family, text, parts, id=f"{family}-{number}")
    for family, examples in WRITTEN.items()
    for number, (text, parts) in enumerate(examples)
]

# What begins as a call and is none: it stays text as it is.
BROKEN = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"word": }}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": "word"}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"times": NaN}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"word": "\\ud800"}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "no name", "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n["add"]\n</tool_call> and on'),
    ("hermes", "<tool_call>\n" + "[" * 100_000 + "\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=times>\n2\n</function>\n</tool_call>"),
    ("glm4_moe", "<tool_call>add\n<arg_key>times</arg_key>\n<arg_value>2</tool_call>"),
    ("glm4", 'nobody\n{"word": "a"}'),
    ("glm4", 'add\n{"word": }'),
    ("llama3", '{"name": "nobody", "parameters": {}}'),
    ("llama3", '{"name": "add", "parameters": {'),
    ("gemma3", '```json\n{"name": "nobody", "parameters": {}}\n``` there'),
    ("function_gemma", "<start_function_call>call:add{word:<escape>a}<end_function_call>"),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}}, {"name": ]'),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"word": }'),
    ("gpt_oss", "<|channel|>commentary to=functions.add<|message|>{<|call|>"),
]


def test_the_settings_name_the_table():
    assert {*FAMILIES, "none"} == set(get_args(ResponseTemplate))
    assert set(WRITTEN) == set(FAMILIES)


@pytest.mark.parametrize(("family", "text", "parts"), EXAMPLES)
def test_what_models_write_is_read(family, text, parts):
    assert parse(family, text) == parts


@pytest.mark.parametrize(("family", "text", "parts"), EXAMPLES)
def test_cuts_at_every_character_change_nothing(family, text, parts):
    assert parse(family, text, range(1, len(text))) == parts
    for cut in range(1, len(text)):
        assert parse(family, text, [cut]) == parts


@pytest.mark.parametrize(("family", "text", "parts"), EXAMPLES)
def test_transformers_finds_the_same_calls(family, text, parts):
    """Compare where no string of JSON has another type by the schema, which transformers would give it."""
    message = parse_response(text, loaded(family), prefix="", tools=TOOLS)
    values = itertools.chain(*(value for field, value in message.items() if field.startswith("tool_calls")))
    functions = [value["function"] for value in values]
    ours = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)]
    assert [(f["name"], f.get("arguments", f.get("parameters", {}))) for f in functions] == ours


EITHER = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "times": {"type": ["string", "integer"]},
                    "word": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    }
]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"times": "0042", "word": "None"}}</tool_call>'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"times": "0042", "word": "None"}}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"times": "0042", "word": "None"}'),
        ("glm4", 'add\n{"times": "0042", "word": "None"}'),
        ("llama3", '{"name": "add", "parameters": {"times": "0042", "word": "None"}}'),
        ("gemma3", '```json\n{"name": "add", "parameters": {"times": "0042", "word": "None"}}\n```'),
        ("gpt_oss", '<|channel|>commentary to=functions.add<|message|>{"times": "0042", "word": "None"}<|call|>'),
        (
            "function_gemma",
            "<start_function_call>call:add{times:<escape>0042<escape>,word:<escape>None<escape>}<end_function_call>",
        ),
    ],
)
def test_a_string_of_json_stays_one_where_the_schema_allows_other_types(family, text):
    parser = PartParser(loaded(family), "", EITHER, {"add"})
    assert parser.feed(text) + parser.finish(complete=True) == [call("add", times="0042", word="None")]


@pytest.mark.parametrize(("family", "text", "parts"), EXAMPLES)
def test_an_answer_cut_off_anywhere_has_whole_calls_only(family, text, parts):
    calls = [part for part in parts if isinstance(part, ToolCall)]
    for length in range(len(text)):
        found = parse(family, text[:length], complete=False)
        known = [part for part in found if isinstance(part, ToolCall)]
        assert known == calls[: len(known)]
        whole = [part for part in parse(family, text[:length]) if isinstance(part, ToolCall)]
        assert known == whole[: len(known)]


def test_a_call_that_is_cut_off_is_text():
    text = 'I look.\n<tool_call>\n{"name": "add", "arguments": {"word": "a'
    assert parse("hermes", text, complete=False) == [Text(text)]
    whole = text + '"}}\n'  # only its end mark is missing
    assert parse("hermes", whole, complete=False) == [Text(whole)]
    assert parse("hermes", whole, complete=True) == [Text("I look."), call("add", word="a")]


@pytest.mark.parametrize(("family", "text"), BROKEN)
@pytest.mark.parametrize("complete", [True, False])
def test_what_is_no_call_stays_text(family, text, complete):
    assert parse(family, text, complete=complete) == [Text(text)]
    if len(text) < 1000:
        assert parse(family, text, range(1, len(text)), complete=complete) == [Text(text)]


def test_text_goes_on_behind_a_broken_call():
    text = 'a\n<tool_call>\n{"name": }\n</tool_call>\nb <tool_call>{"name": "add"}</tool_call>'
    assert parse("hermes", text) == [Text('a\n<tool_call>\n{"name": }\n</tool_call>\nb'), NONE]


def test_without_parallel_calls_the_answer_is_over_behind_the_first():
    (_, (text, parts), *_) = WRITTEN["hermes"]
    for cuts in ([], range(1, len(text))):
        assert parse("hermes", text, cuts, parallel=False) == parts[:2]
    text, parts = WRITTEN["mistral"][0]
    assert parse("mistral", text, parallel=False) == parts[:2]


@pytest.mark.parametrize("prefix", ["<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\nWell, "])
def test_thinking_that_the_prompt_begins_goes_on(prefix):
    for cuts in ([], range(1, 10)):
        assert parse("hermes", "Hm</think>\n\nYes", cuts, prefix=prefix) == [Thinking("Hm"), Text("Yes")]


def test_thinking_that_the_prompt_has_ended_is_over():
    prefix = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert parse("hermes", "Yes", prefix=prefix) == [Text("Yes")]


def test_a_call_that_the_prompt_begins_is_whole():
    prefix = '<|im_start|>assistant\n<tool_call>\n{"name": '
    assert parse("hermes", '"add"}\n</tool_call>', prefix=prefix) == [NONE]
    assert parse("hermes", '"add", ]}\n</tool_call>', prefix=prefix) == [Text('"add", ]}\n</tool_call>')]


@pytest.mark.parametrize("family", sorted(WRITTEN))
@pytest.mark.parametrize("piece", ["word ", "\n", "<", "{", "}; ", "a"])
def test_what_is_held_of_long_text_is_short(family, piece):
    """Whatever might begin a call: what waits for more, and what is searched again, does not grow."""
    parser, said = PartParser(loaded(family), "", TOOLS), 0
    for _ in range(1200):
        said += sum(len(part.text) for part in parser.feed(piece))
        waiting = len(parser._regions._buffer) - parser._regions._pos
        assert waiting < 200
        assert len(parser._regions._buffer) + len(parser._regions._body) < 3 * READ
    said += sum(len(part.text) for part in parser.finish(complete=True))
    assert said == len(piece) * 1200


# Written by a model and read again: the streamed parts put together are the whole.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(st.sampled_from('ab<{}"\\ \n;é'), max_size=6),
    lambda children: st.lists(children, max_size=2) | st.dictionaries(st.text("ab", max_size=2), children, max_size=2),
    max_leaves=5,
)
SAID = st.text(st.sampled_from("ab<{ \n|["), min_size=1, max_size=8).map(lambda text: f"x{text}y")
CALLS = st.builds(
    lambda name, arguments: ToolCall(name, json.dumps(arguments, ensure_ascii=False)),
    st.sampled_from(sorted(NAMES)),
    st.dictionaries(st.text("ab", min_size=1, max_size=2), JSON, max_size=2),
)
WRITERS: dict[str, Callable[[Part], str]] = {
    "hermes": lambda part: {
        Text: lambda: part.text,
        Thinking: lambda: f"<think>\n{part.text}\n</think>\n\n",
        ToolCall: lambda: f'\n<tool_call>\n{{"name": "{part.name}", "arguments": {part.arguments}}}\n</tool_call>\n',
    }[type(part)](),
    "mistral": lambda part: {
        Text: lambda: part.text,
        Thinking: lambda: f"[THINK]{part.text}[/THINK]",
        ToolCall: lambda: f"[TOOL_CALLS]{part.name}[ARGS]{part.arguments}",
    }[type(part)](),
    "gpt_oss": lambda part: {
        Text: lambda: f"<|start|>assistant<|channel|>final<|message|>{part.text}<|end|>",
        Thinking: lambda: f"<|start|>assistant<|channel|>analysis<|message|>{part.text}<|end|>",
        ToolCall: lambda: (
            "<|start|>assistant<|channel|>commentary "
            f"to=functions.{part.name} <|constrain|>json<|message|>{part.arguments}<|call|>"
        ),
    }[type(part)](),
}


@st.composite
def answers(draw: Any) -> tuple[str, list[Part]]:
    family = draw(st.sampled_from(sorted(WRITERS)))
    parts: list[Part] = [Thinking(draw(SAID))] if draw(st.booleans()) else []
    parts += [Text(draw(SAID))] if draw(st.booleans()) else []
    parts += draw(st.lists(CALLS, max_size=3))
    if family != "mistral" and draw(st.booleans()):
        parts.append(Text(draw(SAID)))
    return family, merged(parts)


@settings(max_examples=40)
@given(answers(), st.lists(st.integers(0, 400), max_size=12), st.integers(0, 400))
def test_the_pieces_of_a_stream_are_the_whole(answer, cuts, end):
    family, parts = answer
    text = "".join(map(WRITERS[family], parts))
    assert parse(family, text) == parts
    assert parse(family, text, sorted(cut for cut in cuts if cut < len(text))) == parts
    cut_off = text[:end]
    cuts = sorted(cut for cut in cuts if cut < len(cut_off))
    assert parse(family, cut_off, cuts, complete=False) == parse(family, cut_off, complete=False)


# Which template a tokenizer's answers are read with.


def tokenizer(chat_template: Any = None, response_template: Any = None, special: Sequence[str] = ()) -> Any:
    added = {100 + number: AddedToken(text, special=True) for number, text in enumerate(special)}
    return SimpleNamespace(chat_template=chat_template, response_template=response_template, added_tokens_decoder=added)


@pytest.mark.parametrize(
    ("chat_template", "family"),
    [
        ("<|start|>assistant<|channel|>final<|message|>", "gpt_oss"),
        ("<|assistant|><think><tool_call>{{ name }}<arg_key>", "glm4_moe"),
        ("<|im_start|><tool_call><function=", "qwen3_coder"),
        ("<|im_start|><tool_call></tool_call><think>", "hermes"),
        ("<start_of_turn><start_function_call>", "function_gemma"),
        ("[INST][/INST][TOOL_CALLS]", "mistral"),
        ("<|start_header_id|>{{ tools }}", "llama3"),
        ("<|assistant|><|observation|>", "glm4"),
        ("<start_of_turn>", "gemma3"),
        ("<｜Assistant｜><think>\n", "think"),
    ],
)
def test_a_family_is_known_by_its_chat_template(chat_template, family):
    assert family_of(chat_template) is FAMILIES[family]


def test_a_model_that_shows_nothing_of_the_kind_writes_text():
    for chat_template in (None, "", "{{ messages }}", "<|start_header_id|>{{ messages }}"):
        assert ResponseFormat.of(tokenizer(chat_template)) is None


def test_the_tokenizers_own_template_comes_first_and_a_named_one_before_it():
    own = {"start_anchor": "A:", "fields": {"content": {}, "tool_calls": {"open": "<c>", "close": "</c>"}}}
    chat = {"default": "x", "tool_use": "<|im_start|><tool_call>"}
    assert list(ResponseFormat.of(tokenizer(chat, own)).template.fields) == ["content", "tool_calls"]
    assert ResponseFormat.of(tokenizer(chat)).template.fields["tool_calls"].close_literals == ["</tool_call>"]
    assert ResponseFormat.of(tokenizer(chat, own), "mistral").template.fields["tool_calls"].close_literals is None
    assert ResponseFormat.of(tokenizer(chat, own), "none") is None


@pytest.mark.parametrize("own", [{}, {"fields": {"content": {}}}, {"start_anchor": "A", "fields": {"x": {"open": ""}}}])
def test_a_template_of_the_tokenizer_that_is_none_is_refused_with_a_way_out(own):
    with pytest.raises(ConfigError, match=r"model\.response_template"):
        ResponseFormat.of(tokenizer("x", own))
    assert ResponseFormat.of(tokenizer("x", own), "hermes") is not None


def test_only_models_that_think_are_read_without_tools():
    plain, thinks = (
        ResponseFormat.of(tokenizer(f"<|im_start|><tool_call>{think}")) for think in ("", "<think></think>")
    )
    assert plain.expected("") is None
    assert plain.expected("", TOOLS) is not None
    assert thinks.expected("") is not None
    text = '<think>Hm</think><tool_call>{"name": "add"}</tool_call>'
    parser = thinks.expected("").parser()
    found = parser.feed(text) + parser.finish(complete=True)
    assert merged(found) == [Thinking("Hm"), Text('<tool_call>{"name": "add"}</tool_call>')]


def test_special_tokens_are_shown_where_they_are_delimiters():
    special = ["[TOOL_CALLS]", "</s>", "[ARGS]", "[INST]"]
    assert ResponseFormat.of(tokenizer("[TOOL_CALLS]", special=special)).shown_ids == (100, 102)


def test_what_a_user_writes_does_not_begin_the_answer():
    format_ = ResponseFormat.of(tokenizer("<|im_start|><tool_call><think>"))
    anchor = "<|im_start|>assistant\n"
    prompt = [Piece("<|im_start|>user\n", "template"), Piece(f"{anchor}<think>", "content", 0)]
    assert format_.answer_begun([*prompt, Piece(f"<|im_end|>\n{anchor}", "template")]).endswith(anchor)
    begun = [*prompt, Piece(f"<|im_end|>\n{anchor}<think>\n", "template"), Piece("Well", "content", 1)]
    assert format_.answer_begun(begun).endswith(f"{anchor}<think>\nWell")
    assert format_.answer_begun([Piece("<unlike><think>\n", "template")]) == "<unlike><think>\n"
