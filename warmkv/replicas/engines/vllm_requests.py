"""A request as vLLM takes it: its sampling parameters, what vLLM cannot do for it, and how it is sent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from typing import Any

from warmkv.config import Capabilities
from warmkv.replicas.protocol import MOST_TOP_K, Constraint, Failed, GenerateRequest, UnservableRequestError
from warmkv.replicas.refusals import check_tokens

STRUCTURED = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}
"""Kinds of constraints by their fields of vLLM's StructuredOutputsParams, where these take the text as it is."""


def check(request: GenerateRequest, capabilities: Capabilities, max_context: int, vocabulary: int) -> None:
    """Raise UnservableRequestError for what vLLM can never compute.

    Penalties on what another replica drew are lost: where that is better than an error the gateway decides.
    """
    if fault := capabilities.lacks(replace(request.needs, resumed_penalties=False)):
        raise UnservableRequestError(fault)
    check_tokens(request, vocabulary)
    prompt, new = len(request.token_ids), request.sampling.max_tokens
    if prompt + max(new, 1) > max_context:
        raise UnservableRequestError(
            f"{prompt} prompt tokens and max_tokens {new} exceed the context of {max_context} tokens"
        )


def sampling_fields(request: GenerateRequest, eos_ids: Collection[int]) -> dict[str, Any]:
    """Return fields of vLLM's SamplingParams, but for structured outputs.

    What ends the answer is given as stop tokens: vLLM reports which one it was. Text and stop strings are warmkv's own.
    Tokens that another replica drew are part of the prompt: the seed stands for other draws behind them, and frequency
    and presence penalties do not count them.
    """
    sampling, drawn = request.sampling, len(request.resume)
    return {
        "max_tokens": max(1, sampling.max_tokens - drawn),
        "min_tokens": max(0, min(sampling.min_tokens, sampling.max_tokens) - drawn),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": min(sampling.top_k, MOST_TOP_K),
        "min_p": sampling.min_p,
        "seed": sampling.seed & (1 << 63) - 1,
        "stop_token_ids": sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}),
        "ignore_eos": True,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "logprobs": sampling.logprobs,
        "detokenize": False,
    }


def structured_fields(constraint: Constraint) -> dict[str, Any]:
    """Return fields of vLLM's StructuredOutputsParams."""
    if constraint.kind == "json_object":
        return {"json_object": True}
    if constraint.kind == "choice":
        return {"choice": json.loads(constraint.text)}
    return {STRUCTURED[constraint.kind]: constraint.text}


def generate(
    llm: Any, request: GenerateRequest, salt: str, eos_ids: Collection[int], priority: int
) -> AsyncIterator[Any]:
    """Send vLLM a request and yield its outputs, each with what is new. Raises vLLM's errors (`failure`).

    Of those that wait, the one with the least `priority` begins first.
    """
    from vllm import SamplingParams as VllmSampling
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    constraint = request.sampling.constraint
    parameters = VllmSampling(
        **sampling_fields(request, eos_ids),
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(**structured_fields(constraint)) if constraint else None,
    )
    outputs: AsyncIterator[Any] = llm.generate(
        tokens_input([*request.token_ids, *request.resume], cache_salt=salt), parameters, request.id, priority=priority
    )
    return outputs


def failure(error: Exception, *, engine_lives: bool) -> Failed:
    """Return how an answer ends by an error of `generate`.

    vLLM raises a refusal as it is and wraps what else went wrong. If its engine lives on, a value that it could not
    handle was the request's; if not, every request in flight ends by the error.
    """
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineGenerateError

    if isinstance(error, VLLMClientError):
        return Failed(str(error), "refused")
    cause = error.__cause__ if isinstance(error, EngineGenerateError) else None
    cause = cause or error
    is_requests = engine_lives and isinstance(cause, ValueError | TypeError | OverflowError)
    return Failed(f"{type(cause).__name__}: {cause}", "request" if is_requests else "replica")
