"""Usage as APIs report it: of the Messages API, of OpenAI's APIs, and as LiteLLM writes both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warmkv.prefixes.usage import Usage

WRITTEN = {"ephemeral_5m_input_tokens": "5m", "ephemeral_1h_input_tokens": "1h"}
DEFAULT_TTL = "5m"  # of writes that are reported without their TTL


def usage_of(reported: Mapping[str, Any]) -> Usage:
    """Read a `usage` object of any of the APIs. Raises ValueError where it has no counts, or impossible ones.

    In the Messages API `input_tokens` are what was neither read nor written; elsewhere the prompt's total has both.
    """
    anthropic = "prompt_tokens" not in reported and any(
        name in reported for name in ("cache_read_input_tokens", "cache_creation_input_tokens", "cache_creation")
    )
    prompt = _count(reported, "prompt_tokens" if "prompt_tokens" in reported else "input_tokens", required=True)
    output = _count(reported, "completion_tokens") or _count(reported, "output_tokens")
    details = _mapping(reported, "prompt_tokens_details") or _mapping(reported, "input_tokens_details")
    read = _count(reported, "cache_read_input_tokens") or _count(details, "cached_tokens")
    written = _count(reported, "cache_creation_input_tokens") or _count(details, "cache_creation_tokens")
    by_ttl = _mapping(reported, "cache_creation") or _mapping(details, "cache_creation_token_details")
    return split(prompt + (read + written if anthropic else 0), output, read, written_of(by_ttl, written))


def written_of(by_ttl: Mapping[str, Any], total: int = 0) -> dict[str, int]:
    """Return tokens written by TTL; what of the total has no TTL counts as 5m, the API's default."""
    found = {ttl: _count(by_ttl, name) for name, ttl in WRITTEN.items()}
    if total > (named := sum(found.values())):
        found[DEFAULT_TTL] += total - named
    return {ttl: tokens for ttl, tokens in found.items() if tokens}


def split(prompt: int, output: int, read: int, written: Mapping[str, int]) -> Usage:
    """Return the usage of a prompt of that many tokens. Raises ValueError if more of it was cached than it has."""
    rest = prompt - read - sum(written.values())
    if rest < 0:
        raise ValueError(f"{read} tokens read and {sum(written.values())} written of a prompt of {prompt}")
    return Usage(input=rest, read=read, written=written, output=output)


def _mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _count(values: Mapping[str, Any], name: str, *, required: bool = False) -> int:
    value = values.get(name)
    if value is None and not required:
        return 0
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be a number of tokens, not {value!r:.50}")
    return value
