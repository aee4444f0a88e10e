"""The real SDKs' clients. To make one takes 25 ms, most of it for TLS that nobody speaks here: a URL's share one."""

from __future__ import annotations

import functools

import anthropic
import openai


def anthropic_client(url: str, key: str, retries: int = 0) -> anthropic.Anthropic:
    """Return a client of the Messages API at `url`, for the tenant of `key`."""
    return _anthropic(url).with_options(api_key=key, max_retries=retries)


def openai_client(url: str, key: str, retries: int = 0) -> openai.OpenAI:
    """Return a client of the chat completions at `url`, for the tenant of `key`."""
    return _openai(url).with_options(api_key=key, max_retries=retries)


@functools.cache
def _anthropic(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="nobody")


@functools.cache
def _openai(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="nobody")
