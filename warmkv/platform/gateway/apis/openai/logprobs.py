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


def of_text(
    found: Iterable[TokenLogprobs], decode: Decode, most: int, offset: int = 0, first: int | None = None
) -> tuple[dict[str, Any], int]:
    """Return those of a text, or of a piece of one that begins at the character `offset`; and where it ends.

    Beside each token stand the `most` probable ones. The `first` one of a prompt comes before, and has none.
    """
    told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(token: int, logprob: float | None, top: dict[str, float] | None) -> None:
        nonlocal offset
        told["tokens"].append(text := decode(token))
        told["token_logprobs"].append(logprob)
        told["top_logprobs"].append(top)
        told["text_offset"].append(offset)
        offset += len(text)

    if first is not None:
        add(first, None, None)
    for one in found:
        top = (*one.top[:most], (one.token, one.logprob))
        add(one.token, one.logprob, {decode(token): logprob for token, logprob in top})
    return told, offset


def of_prompt(found: Iterable[TokenLogprobs], decode: Decode, most: int) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: of the first token none, of others by token id, the prompt's own first.

    The rank of what is not among the `most` probable is not told.
    """

    def told(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": decode(token)}

    def all_of(one: TokenLogprobs) -> dict[str, Any]:
        top = {token: told(token, logprob, rank) for rank, (token, logprob) in enumerate(one.top[:most], 1)}
        own = top.pop(one.token, None) or told(one.token, one.logprob, None)
        return {str(token): it for token, it in {one.token: own, **top}.items()}

    return [None, *map(all_of, found)]
