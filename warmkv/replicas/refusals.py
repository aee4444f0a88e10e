"""Refuse requests alike in every engine: tokens that the model does not have, and more of them than may wait."""

from __future__ import annotations

from warmkv.replicas.completions import Completions
from warmkv.replicas.protocol import GenerateRequest, QueueFullError, UnservableRequestError


def check_tokens(request: GenerateRequest, vocabulary: int) -> None:
    """Raise UnservableRequestError for a prompt without tokens, and for tokens that are none of the vocabulary."""
    tokens, sampling = (*request.token_ids, *request.resume), request.sampling
    if not request.token_ids or min(tokens) < 0 or max(tokens) >= vocabulary:
        raise UnservableRequestError(f"a prompt needs tokens, each below the vocabulary of {vocabulary}")
    for name, named in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
    ):
        if unknown := [token for token in named if not 0 <= token < vocabulary]:
            raise UnservableRequestError(f"{name}: {unknown[0]} is not a token below {vocabulary}")


def check_queue(request: GenerateRequest, waiting: int, most: int, completions: Completions, now: float) -> None:
    """Raise QueueFullError if as many requests wait as may, with the seconds until there is room.

    One that is resumed always may: its client has a part of the answer, and was given a place elsewhere.
    """
    if waiting >= most and not request.resume:
        seconds = completions.seconds(waiting - most + 1, now)
        raise QueueFullError(f"{waiting} requests are waiting already (engine.max_queue)", waiting, seconds)
