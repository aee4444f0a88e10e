"""Synthetic traffic: sessions as people hold them with a chat model, written as an access log.

Every session resends its whole history with each turn and waits for the answer before it thinks about the next one.
The figures are those published for ShareGPT (lengths) and BurstGPT (turns and think times).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from warmkv.config import Config
from warmkv.prefixes.breakpoints import BreakpointError, breakpoints, check_marks, read_candidates
from warmkv.prefixes.hashing import block_hashes, chain_root, prefix_key
from warmkv.prefixes.record import Candidate, Mark, RequestRecord
from warmkv.simulator.sessions import ShareGPTLike, WorkloadError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Z90 = 1.2815515655446004  # the standard normal's 90th percentile


def generate(settings: ShareGPTLike, seed: np.random.SeedSequence, config: Config) -> list[RequestRecord]:
    """Records in the order of arrival, the first session starting near time 0; no timings and no usage.

    Marks stand at the end of the system prompt and at the end of every prompt, so that a turn reads what the turn
    before it wrote; block size, minimum length and lookback are the configuration's. Each concern (arrivals, turns,
    lengths, popularity, think times, contents) draws from its own stream: changing one leaves the others as they were.

    Raises WorkloadError if the configuration does not know the TTLs of the marks.
    """
    marked = [settings.system_ttl] if settings.system_prompts else []
    cache = config.prefix_cache
    try:
        check_marks([*marked, settings.history_ttl], cache.ttls, cache.max_breakpoints)
    except BreakpointError as error:
        raise WorkloadError(str(error)) from None
    streams = [np.random.default_rng(child) for child in seed.spawn(7)]
    of_arrivals, of_turns, of_questions, of_answers, of_systems, of_thoughts, of_contents = streams

    starts = session_starts(settings, of_arrivals)
    turns = session_turns(settings, of_turns)
    firsts = np.concatenate([[0], np.cumsum(turns)[:-1]]) if len(turns) else turns  # index of each first turn
    opening = np.zeros(int(turns.sum()), dtype=bool)
    opening[firsts] = True
    scale = settings.length_scale
    user_mean = np.where(opening, settings.first_user, settings.user)
    answer_mean = np.where(opening, settings.first_answer, settings.answer)
    users = lengths(user_mean * scale, settings.user_sigma, of_questions)
    answers = lengths(answer_mean * scale, settings.answer_sigma, of_answers)
    thoughts = think_times(settings, len(opening), of_thoughts)
    systems, chosen = _system_prompts(settings, of_systems)

    records = []
    for session in range(settings.sessions):
        part = slice(firsts[session], firsts[session] + turns[session])
        system = systems[chosen[session]] if len(systems) else np.empty(0, dtype=np.int64)
        records += _session(
            f"{session:06d}",
            float(starts[session]),
            system,
            users[part],
            answers[part],
            thoughts[part],
            settings,
            of_contents,
            config,
        )
    records.sort(key=lambda record: record.arrival)
    return records


def write(records: Iterable[RequestRecord], path: Path) -> int:
    """Write an access log; the number of its lines. Raises OSError."""
    count = 0
    with path.open("w", encoding="utf-8") as out:
        for record in records:
            out.write(record.to_json() + "\n")
            count += 1
    return count


def session_starts(settings: ShareGPTLike, rng: np.random.Generator) -> Floats:
    """When sessions begin: Gamma gaps with the mean that fits them into the hours."""
    if not settings.sessions:
        return np.empty(0)
    mean = settings.hours * 3600 / settings.sessions
    if settings.cv == 0 or mean == 0:
        gaps = np.full(settings.sessions, mean)
    else:
        gaps = rng.gamma(settings.cv**-2, mean * settings.cv**2, settings.sessions)
    starts: Floats = np.cumsum(gaps) - gaps[:1]
    return starts


def session_turns(settings: ShareGPTLike, rng: np.random.Generator) -> Ints:
    more = settings.turns_mean - 1
    if not more:
        return np.ones(settings.sessions, dtype=np.int64)
    shape = settings.turns_shape
    turns: Ints = 1 + rng.negative_binomial(shape, shape / (shape + more), settings.sessions)
    return turns


def lengths(mean: Floats, sigma: float, rng: np.random.Generator) -> Ints:
    """Lognormal token counts with these means, at least 1."""
    drawn = mean * np.exp(sigma * rng.standard_normal(len(mean)) - sigma**2 / 2)
    counts: Ints = np.maximum(1, np.rint(drawn)).astype(np.int64)
    return counts


def think_times(settings: ShareGPTLike, count: int, rng: np.random.Generator) -> Floats:
    """Seconds from an answer to the next turn: lognormal, with one spread below the median and another above it.

    No single lognormal has the three published percentiles; two halves that meet at the median have them exactly.
    """
    z = rng.standard_normal(count)
    below = math.log(settings.think_p50 / settings.think_p10) / Z90
    above = math.log(settings.think_p90 / settings.think_p50) / Z90
    times: Floats = settings.think_scale * settings.think_p50 * np.exp(np.where(z < 0, below, above) * z)
    return times


def _system_prompts(settings: ShareGPTLike, rng: np.random.Generator) -> tuple[list[Ints], Ints]:
    """The tokens of the shared system prompts, and which one each session has."""
    count = settings.system_prompts
    if not count:
        return [], np.zeros(settings.sessions, dtype=np.int64)
    sizes = lengths(np.full(count, settings.system_tokens * settings.length_scale), settings.system_sigma, rng)
    weights = np.arange(1, count + 1) ** -settings.zipf
    chosen = rng.choice(count, size=settings.sessions, p=weights / weights.sum())
    return [rng.integers(settings.vocabulary, size=size) for size in sizes], chosen


def _session(
    name: str,
    start: float,
    system: Ints,
    users: Ints,
    answers: Ints,
    thoughts: Floats,
    settings: ShareGPTLike,
    contents: np.random.Generator,
    config: Config,
) -> list[RequestRecord]:
    """The requests of one session. All prompts are beginnings of one text, so its blocks are hashed once."""
    cache, size = config.prefix_cache, config.prefix_cache.block_size
    said = np.column_stack([users, answers]).ravel()  # user, answer, user, answer, ...
    text = np.concatenate([system, contents.integers(settings.vocabulary, size=int(said.sum()))]).astype("<u4")
    ends = (len(system) + np.cumsum(said)).tolist()
    first_ends, first_ttls = ([len(system)], [settings.system_ttl]) if len(system) else ([], [])
    root = chain_root(b"generated", config.model.name, str(size))
    hashes = tuple(block_hashes(text, size, root))

    records = []
    arrival = start
    for turn in range(len(users)):
        prompt = ends[2 * turn]
        blocks = [*first_ends, *ends[: 2 * turn + 1]]
        ttls = [*first_ttls, *[None] * (2 * turn), settings.history_ttl]
        marks = breakpoints(blocks, ttls, cache.min_tokens)
        reads = read_candidates(blocks, marks, cache.lookback)
        records.append(
            RequestRecord(
                id=f"{name}-{turn}",
                arrival=arrival,
                tenant="generated",
                model=config.model.name,
                api="messages",
                policy=config.compression.policy.label,
                block_size=size,
                input_tokens=prompt,
                output_tokens=int(answers[turn]),
                hashes=hashes[: prompt // size],
                marks=tuple(Mark(m.position, m.ttl, prefix_key(text, m.position, size, hashes, root)) for m in marks),
                reads=tuple(Candidate(at, prefix_key(text, at, size, hashes, root)) for at in reads),
            )
        )
        arrival += float(answers[turn]) / settings.tokens_per_second + float(thoughts[turn])
    return records
