"""Prefixes of texts: equal beginnings have equal names, marks lie where they were, and nothing else counts."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from warmkv.prefixes import prompt_text
from warmkv.prefixes.prompt_text import Scale, parts_of

MARK = {"type": "ephemeral", "ttl": "1h"}
BODY = {
    "model": "m",
    "tools": [{"name": "bash", "input_schema": {"type": "object"}}],
    "system": [{"type": "text", "text": "You are. " * 99, "cache_control": MARK}],
    "messages": [
        {"role": "user", "content": "Do it. " * 50},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": str(n), "name": "bash", "input": {}} for n in "ab"],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "x"},
                {
                    "type": "tool_result",
                    "tool_use_id": "b",
                    "content": "y" * 300,
                    "cache_control": {"type": "ephemeral"},
                },
            ],
        },
    ],
}


def plan(body, size=16, scale=4.0):
    return prompt_text.plan(parts_of(body), b"root", size, scale)


def changed(change):
    body = copy.deepcopy(BODY)
    change(body)
    return body


def test_marks_lie_behind_their_blocks_and_calls_are_one_position():
    parts = parts_of(BODY)
    assert [part.ttl for part in parts] == [None, "1h", None, None, None, None, "5m"]
    assert [part.run for part in parts][3:] == ["tool_use"] * 2 + ["tool_result"] * 2
    tokens, found = plan(BODY)
    text = b"".join(part.text for part in parts)
    assert (tokens, len(found.hashes)) == (len(text) // 4, len(text) // 64)
    assert [(mark.position, mark.ttl) for mark in found.marks] == [
        (len(b"".join(part.text for part in parts[:2])) // 4, "1h"),
        (tokens, "5m"),
    ]
    assert {mark.key for mark in found.marks} <= {read.key for read in found.reads}


def test_a_mark_that_moves_on_leaves_prefixes_as_they_are():
    def next_turn(body):
        del body["messages"][2]["content"][1]["cache_control"]
        body["messages"] += [{"role": "assistant", "content": "Done."}]
        body["messages"] += [{"role": "user", "content": [{"type": "text", "text": "More?", "cache_control": MARK}]}]

    before, after = plan(BODY)[1], plan(changed(next_turn))[1]
    assert after.hashes[: len(before.hashes)] == before.hashes
    assert {mark.key for mark in before.marks} <= {read.key for read in after.reads}


def test_what_changes_changes_all_after_it():
    other = changed(lambda body: body["system"][0].update(text="You were. " * 99))
    assert not set(plan(BODY)[1].hashes[1:]) & set(plan(other)[1].hashes)
    other = changed(lambda body: body["tools"].append({"name": "more"}))
    assert plan(BODY)[1].hashes[0] != plan(other)[1].hashes[0]


def test_the_billing_line_is_no_part_of_a_prefix():
    def billed(number):
        line = {"type": "text", "text": f"x-anthropic-billing-header: v; cch={number};"}
        return changed(lambda body: body["system"].insert(0, line))

    assert plan(billed(1)) == plan(billed(2)) == plan(BODY)


def test_images_count_as_their_digests():
    def body(data):
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data * 9000}}
        return {"messages": [{"role": "user", "content": [image]}]}

    assert plan(body("a")).tokens == plan(body("b")).tokens < 60
    assert parts_of(body("a")) != parts_of(body("b"))


def test_all_apis_have_prompts():
    for body in (
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        {"prompt": "hi"},
        {"input": "hi", "instructions": "be"},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, {"type": "function_call"}]},
    ):
        assert len(parts_of(body)) == (1 if "prompt" in body else 2)
    assert parts_of({"messages": 5, "tools": 7, "system": None}) == [prompt_text.Part(b"user\0005\0")]


@given(st.lists(st.text(max_size=40), max_size=8), st.lists(st.text(max_size=40), max_size=8), st.floats(1, 9))
def test_equal_beginnings_have_equal_blocks(texts, more, scale):
    def found(texts):
        return plan({"messages": [{"role": "user", "content": text} for text in texts]}, 4, scale)

    one, two = found(texts)[1].hashes, found(texts + more)[1].hashes
    assert two[: len(one)] == one


def test_the_first_long_prompt_settles_what_a_token_stands_for():
    scale, parts = Scale(), parts_of(BODY)
    size = sum(len(part.text) for part in parts)
    assert not scale.learn("m", parts, 1023)
    assert scale.of("m") == 4.0
    assert scale.learn("m", parts, 1024)
    assert scale.of("m") == round(size / 1024, 3)
    assert not scale.learn("m", parts, 2048)
    assert not scale.learn("other", parts, size * 10), "the text cannot be what was counted"
    image = {"role": "user", "content": [{"type": "image", "source": {"data": "x" * 2000}}]}
    assert not scale.learn("other", parts_of(BODY | {"messages": [image]}), 1024)
    assert scale.of("other") == 4.0
    assert Scale(5.0).of("m") == 5.0
