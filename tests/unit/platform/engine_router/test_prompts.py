"""Bodies of requests: whose prefix they are, and what of them is changed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.platform.engine_router.prompts import (
    prompt_of,
    read_body,
    root_of,
    salt_of,
    tenant_salt,
    with_salt,
    without_reports,
)

VALUES = st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.just({"a": [{}, "}"]})
BODIES = st.dictionaries(st.sampled_from(["model", "messages", "cache_salt", "é", "}"]), VALUES, max_size=3)


@given(BODIES, st.sampled_from(["utf-8", "utf-16", "utf-8-sig"]), st.booleans(), st.sampled_from(["", " \n"]))
def test_a_salt_is_added_and_nothing_else_is_changed(asked, encoding, ascii_only, space):
    text = json.dumps(asked, ensure_ascii=ascii_only) + space
    try:
        data = text.encode(encoding)
    except UnicodeEncodeError:  # half of a surrogate pair
        return
    known = read_body(data)
    assert known == asked
    salted = with_salt(data, known, "ab12")
    assert json.loads(salted) == asked | {"cache_salt": "ab12"}
    assert salt_of(json.loads(salted)) == "ab12"
    if encoding == "utf-8" and asked and "cache_salt" not in asked:
        assert salted.startswith(data.rstrip()[:-1] + b",")


@pytest.mark.parametrize("data", [b"", b"no json", b"[1]", b"1", b"\xff"])
def test_what_is_no_object_is_left_alone(data):
    assert read_body(data) is None


def test_the_later_of_two_salts_counts_as_it_does_for_servers():
    data = b'{"cache_salt": "a", "cache_salt": "b", "x": 1}'
    assert json.loads(with_salt(data, read_body(data), "c")) == {"cache_salt": "c", "x": 1}


def test_a_wish_for_reports_is_taken_out_and_nothing_else():
    for data in (b'{"prompt": "x"}', b'{"vllm_xargs": {"a": 1}}', b'{"vllm_xargs": ["kv_cache_report_mode"]}'):
        assert without_reports(data, read_body(data)) == (data, read_body(data))
    data = b'{"prompt": "x", "vllm_xargs": {"kv_cache_report_mode": "full", "a": [1]}}'
    changed, asked = without_reports(data, read_body(data))
    assert json.loads(changed) == asked == {"prompt": "x", "vllm_xargs": {"a": [1]}}


def test_salts_follow_from_the_key_and_the_secret():
    bearer, other = {"authorization": "Bearer k"}, {"authorization": "Bearer l"}
    salt = tenant_salt("secret", bearer, {})
    assert salt == tenant_salt("secret", {"x-api-key": "k"}, {})
    assert tenant_salt("secret", {}, {}) == tenant_salt("secret", {}, {"cache_salt": 5})
    others = [
        tenant_salt("secret", other, {}),
        tenant_salt("secret", {}, {}),
        tenant_salt("other", bearer, {}),
        tenant_salt("secret", bearer, {"cache_salt": "own"}),
        tenant_salt("secret", other, {"cache_salt": salt}),
    ]
    assert len({salt, *others}) == 6
    assert len(salt) <= 128  # vLLM takes no longer ones, and none with slashes
    assert salt.isalnum()
    assert root_of(salt) != root_of(others[0])
    assert root_of(None) == root_of("")


def test_prompts_of_other_salts_and_models_share_no_block():
    asked = {"model": "m", "prompt": "x" * 2000, "prompt_cache_key": "s"}
    prompts = [prompt_of({}, asked | more, 64) for more in ({}, {"cache_salt": "a"}, {"model": "n"})]
    assert [prompt.session for prompt in prompts] == [b"s"] * 3
    assert len({key for prompt in prompts for key in prompt.text}) == sum(len(prompt.text) for prompt in prompts) > 20


def test_a_session_is_named_by_a_header_or_by_the_body():
    headers, user = {"x-claude-code-session-id": "h"}, {"metadata": {"user_id": "u"}}
    key = {"prompt_cache_key": "k"}
    named = [({}, {}), ({}, user), ({}, user | key), (headers, user | key), ({}, {"prompt_cache_key": 3})]
    assert [prompt_of(*each, 64).session for each in named] == [b"", b"u", b"k", b"h", b""]
