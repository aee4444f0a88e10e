"""Log-probabilities of tokens as chat and plain completions tell them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from warmkv.replicas.protocol import TokenLogprobs

Decode = Callable[[int], str]


def of_chat(found: Iterable[TokenLogprobs], decode: Decode) -> dict[str, Any]:
    """Return those of a message, or of a piece of one."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        text = decode(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        {**told(one.token, one.logprob), "top_logprobs": [told(token, logprob) for token, logprob in one.top]}
        for one in found
    ]
    return {"content": content, "refusal": None}


def of_text(found: Iterable[TokenLogprobs], decode: Decode, offset: int) -> tuple[dict[str, Any], int]:
    """Return those of a text, or of a piece of one, that begins `offset` characters behind the prompt; and its end."""
    told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for one in found:
        text = decode(one.token)
        told["tokens"].append(text)
        told["token_logprobs"].append(one.logprob)
        told["top_logprobs"].append({decode(token): logprob for token, logprob in (*one.top, (one.token, one.logprob))})
        told["text_offset"].append(offset)
        offset += len(text)
    return told, offset
