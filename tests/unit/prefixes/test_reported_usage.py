"""Usage as the APIs report it, read into one form."""

import pytest

from warmkv.prefixes.reported_usage import usage_of
from warmkv.prefixes.usage import Usage

ANTHROPIC = {"input_tokens": 10, "cache_read_input_tokens": 300, "cache_creation_input_tokens": 90, "output_tokens": 5}


@pytest.mark.parametrize(
    ("reported", "usage"),
    [
        (ANTHROPIC, Usage(10, 300, {"5m": 90}, 5)),
        (
            ANTHROPIC | {"cache_creation": {"ephemeral_5m_input_tokens": 20, "ephemeral_1h_input_tokens": 70}},
            Usage(10, 300, {"5m": 20, "1h": 70}, 5),
        ),
        ({"input_tokens": 10, "output_tokens": 5, "cache_read_input_tokens": None}, Usage(10, 0, {}, 5)),
        ({"prompt_tokens": 400, "completion_tokens": 5}, Usage(400, 0, {}, 5)),
        ({"prompt_tokens": 400, "prompt_tokens_details": {"cached_tokens": 300}}, Usage(100, 300)),
        (
            {"input_tokens": 400, "input_tokens_details": {"cached_tokens": 300}, "output_tokens": 5},
            Usage(100, 300, {}, 5),
        ),
        (
            {"prompt_tokens": 400, "cache_read_input_tokens": 300, "cache_creation_input_tokens": 90},
            Usage(10, 300, {"5m": 90}),
        ),
    ],
)
def test_usage_of_all_apis(reported, usage):
    assert usage_of(reported) == usage


@pytest.mark.parametrize(
    ("reported", "reason"),
    [
        ({}, "input_tokens must be a number of tokens, not None"),
        ({"prompt_tokens": True}, "prompt_tokens must be"),
        ({"prompt_tokens": -1}, "prompt_tokens must be"),
        (
            {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 6}},
            "6 tokens read and 0 written of a prompt of 5",
        ),
        (ANTHROPIC | {"cache_read_input_tokens": "many"}, "cache_read_input_tokens must be"),
    ],
)
def test_impossible_counts_are_refused(reported, reason):
    with pytest.raises(ValueError, match=reason):
        usage_of(reported)
