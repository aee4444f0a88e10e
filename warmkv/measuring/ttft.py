"""Time to the first token, through the engine as a request takes it: cold, and with most of the prompt stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from warmkv.measuring.clock import Stopwatch
from warmkv.measuring.plan import MeasureError
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes import hashing
from warmkv.prefixes.record import Candidate, Mark
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.engine.scheduler import EngineEvent
from warmkv.replicas.protocol import Failed, GenerateRequest, SamplingParams, Started, UnservableRequestError

WARM_SHARE = 0.9
"""Of a warm request's prompt, up to a breakpoint that an earlier request stored."""
ROOT = hashing.chain_root(b"warmkv", "measuring")


@dataclass(frozen=True, slots=True)
class FirstToken:
    seconds: float  # from submission to the first token
    prefill: float  # of them, from admission to the drawn token
    reused: int  # prompt tokens that were not computed


@dataclass(frozen=True, slots=True)
class Pair:
    cold: FirstToken
    warm: FirstToken


def warm_up(engine: Engine, spec: PolicySpec) -> None:
    """Serve a short request under a policy, so that no measured one pays for first-time set-up.

    Raises MeasureError if the engine cannot serve the policy on this model.
    """
    tokens = min(64, engine.max_context // 2)
    first_token(engine, request(engine, [0] * tokens, spec, 4))


def cold_and_warm(
    engine: Engine, spec: PolicySpec, tokens: int, new_tokens: int, ttl: str, random: np.random.Generator
) -> Pair:
    """Measure an unseen prompt, then another that shares WARM_SHARE of it, stored under the TTL of that name.

    Raises MeasureError.
    """
    shared = round(WARM_SHARE * tokens)
    first, second = (random.integers(0, engine.model.vocabulary, tokens) for _ in ("cold", "warm"))
    second[:shared] = first[:shared]
    cold, warm = (
        first_token(engine, request(engine, ids.tolist(), spec, new_tokens, (shared, ttl))) for ids in (first, second)
    )
    return Pair(cold, warm)


def first_token(engine: Engine, asked: GenerateRequest) -> FirstToken:
    """Submit a request to an idle engine, step until its first token, then cancel it. Raises MeasureError."""
    told: list[EngineEvent] = []
    watch = Stopwatch(engine.model.device)
    try:
        engine.submit(asked, told.append)
    except UnservableRequestError as error:
        raise MeasureError(f"policy {asked.policy.label}: {error}") from None
    while not told or isinstance(told[-1], Started):
        if not engine.step() and not told:
            raise MeasureError(f"policy {asked.policy.label}: the engine does not admit {asked.id}")
    seconds = watch.seconds()
    engine.cancel(asked.id)
    engine.step()
    started = told[0]
    if not isinstance(started, Started) or isinstance(told[1], Failed):
        raise MeasureError(f"policy {asked.policy.label}: {told[-1]}")
    return FirstToken(seconds, started.prefill_seconds, started.cached_tokens)


def request(
    engine: Engine, tokens: Sequence[int], spec: PolicySpec, new_tokens: int, mark: tuple[int, str] | None = None
) -> GenerateRequest:
    """Build a request of these tokens; `mark` is the position and TTL name of a breakpoint, as a client sets it."""
    size = engine.store.block_size
    hashes = hashing.block_hashes(tokens, size, ROOT)
    marks: tuple[Mark, ...] = ()
    reads: tuple[Candidate, ...] = ()
    if mark is not None:
        position, ttl = mark
        key = hashing.prefix_key(tokens, position, size, hashes, ROOT)
        marks, reads = (Mark(position, ttl, key),), (Candidate(position, key),)
    return GenerateRequest(
        id="measured",
        token_ids=tuple(tokens),
        hashes=tuple(hashes),
        sampling=SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True),
        policy=spec,
        marks=marks,
        reads=reads,
    )
