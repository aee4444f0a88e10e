"""Synthetic traffic: sessions as people and agents hold them with a model, written as an access log.

Every session resends its whole history with each turn and waits for the answer before it thinks about the next one.
The settings, and where their figures come from, stand in `sessions.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from warmkv.config import Config
from warmkv.prefixes.breakpoints import BreakpointError, breakpoints, check_marks, read_candidates
from warmkv.prefixes.hashing import block_hashes, chain_root, prefix_key
from warmkv.prefixes.record import Candidate, Mark, RequestRecord
from warmkv.simulator.workload.sessions import Workload, WorkloadError
from warmkv.terminal import text_output

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
DAY = 86_400.0
GRID = 60.0  # seconds between the points at which a day's rate is known
Z90 = 1.2815515655446004  # the standard normal's 90th percentile


def generate(settings: Workload, seed: np.random.SeedSequence, config: Config) -> list[RequestRecord]:
    """Generate records in the order of arrival, the first session starting near time 0; no timings and no usage.

    Marks stand at the end of the system prompt and at the end of every prompt, so that a turn reads what the turn
    before it wrote; block size, minimum length and lookback are the configuration's. Each concern (arrivals, turns,
    lengths, popularity, think times, contents) draws from its own stream: changing one leaves the others as they were.

    Raises WorkloadError if the configuration does not know the TTLs of the marks.
    """
    prefixes = (settings.system_prompts or settings.tool_sets) > 0
    marked = [settings.system_ttl] * (prefixes + (settings.documents > 0))
    cache = config.prefix_cache
    try:
        check_marks([*marked, settings.history_ttl], cache.ttls, cache.max_breakpoints)
    except BreakpointError as error:
        raise WorkloadError(str(error)) from None
    streams = [np.random.default_rng(child) for child in seed.spawn(10)]
    of_arrivals, of_turns, of_questions, of_answers, of_systems, of_thoughts, of_contents, *of_pools = streams
    of_tools, of_documents, of_passages = of_pools

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

    def pool(count: int, tokens: float, sigma: float, draws: int, rng: np.random.Generator) -> list[Ints]:
        return shared_texts(count, tokens * scale, sigma, draws, settings, rng)

    sessions, sigma = settings.sessions, settings.pool_sigma
    systems = pool(settings.system_prompts, settings.system_tokens, settings.system_sigma, sessions, of_systems)
    tools = pool(settings.tool_sets, settings.tool_tokens, sigma, sessions, of_tools)
    documents = pool(settings.documents, settings.document_tokens, sigma, sessions, of_documents)
    each = settings.passages
    passages = pool(settings.passage_pool, settings.passage_tokens, sigma, each * len(opening), of_passages)

    records = []
    for session in range(settings.sessions):
        part = slice(firsts[session], firsts[session] + turns[session])
        shared = [np.concatenate([tools[session], systems[session]]), documents[session]]
        records += _session(
            f"{session:06d}",
            float(starts[session]),
            [tokens for tokens in shared if len(tokens)],
            passages[part.start * each : part.stop * each],
            users[part],
            answers[part],
            thoughts[part],
            settings,
            of_contents,
            config,
        )
    records.sort(key=lambda record: record.arrival)
    return records


def mix(parts: Mapping[str, Workload], seed: np.random.SeedSequence, config: Config) -> list[RequestRecord]:
    """Mix several workloads, in the order of arrival; ids begin with their names. Raises WorkloadError."""
    records = [
        replace(record, id=f"{name}-{record.id}")
        for (name, settings), child in zip(parts.items(), seed.spawn(len(parts)), strict=True)
        for record in generate(settings, child, config)
    ]
    records.sort(key=lambda record: record.arrival)
    return records


def write(records: Iterable[RequestRecord], path: Path) -> int:
    """Write an access log, to standard output for `-`; return the number of its lines. Raises OSError."""
    count = 0
    with text_output(path) as out:
        for record in records:
            out.write(record.to_json() + "\n")
            count += 1
    return count


def session_starts(settings: Workload, rng: np.random.Generator) -> Floats:
    """Draw when sessions begin: Gamma gaps whose mean fits them into the hours, shorter at the peak of the day."""
    if not settings.sessions:
        return np.empty(0)
    mean = settings.hours * 3600 / settings.sessions
    if settings.cv == 0 or mean == 0:
        gaps = np.full(settings.sessions, mean)
    else:
        gaps = rng.gamma(settings.cv**-2, mean * settings.cv**2, settings.sessions)
    return at_daily_rate(np.cumsum(gaps) - gaps[:1], settings.swing, settings.peak_hour)


def at_daily_rate(times: Floats, swing: float, peak_hour: float) -> Floats:
    """Move times of a steady rate so that the rate is 1 + swing * cos(2 pi (hour - peak) / 24) times as high.

    This stretches time itself: gaps keep their distribution relative to the rate, and a day its mean.
    """
    if not swing or not len(times):
        return times
    turn, peak = 2 * math.pi / DAY, peak_hour * 3600
    clock = np.arange(0.0, times[-1] + DAY, GRID)
    elapsed = clock + swing / turn * (np.sin(turn * (clock - peak)) + math.sin(turn * peak))
    moved: Floats = np.interp(times, elapsed, clock)
    return moved


def session_turns(settings: Workload, rng: np.random.Generator) -> Ints:
    more = settings.turns_mean - 1
    if not more:
        return np.ones(settings.sessions, dtype=np.int64)
    shape = settings.turns_shape
    turns: Ints = 1 + rng.negative_binomial(shape, shape / (shape + more), settings.sessions)
    return turns


def lengths(mean: Floats, sigma: float, rng: np.random.Generator) -> Ints:
    """Draw lognormal token counts with these means, at least 1."""
    drawn = mean * np.exp(sigma * rng.standard_normal(len(mean)) - sigma**2 / 2)
    counts: Ints = np.maximum(1, np.rint(drawn)).astype(np.int64)
    return counts


def think_times(settings: Workload, count: int, rng: np.random.Generator) -> Floats:
    """Draw seconds from an answer to the next turn: lognormal, with one spread below the median and another above it.

    No single lognormal has the three published percentiles; two halves that meet at the median have them exactly.
    """
    z = rng.standard_normal(count)
    below = math.log(settings.think_p50 / settings.think_p10) / Z90
    above = math.log(settings.think_p90 / settings.think_p50) / Z90
    times: Floats = settings.think_scale * settings.think_p50 * np.exp(np.where(z < 0, below, above) * z)
    return times


def shared_texts(
    count: int, tokens: float, sigma: float, draws: int, settings: Workload, rng: np.random.Generator
) -> list[Ints]:
    """Draw texts from a pool of `count` by a Zipf law; return the tokens of each draw, empty if the pool is."""
    if not count or not draws:
        return [np.empty(0, dtype=np.int64)] * draws
    sizes = lengths(np.full(count, tokens), sigma, rng)
    weights = np.arange(1, count + 1) ** -settings.zipf
    chosen = rng.choice(count, size=draws, p=weights / weights.sum())
    texts = [rng.integers(settings.vocabulary, size=size) for size in sizes]
    return [texts[number] for number in chosen]


def _session(
    name: str,
    start: float,
    shared: Sequence[Ints],
    passages: Sequence[Ints],
    users: Ints,
    answers: Ints,
    thoughts: Floats,
    settings: Workload,
    contents: np.random.Generator,
    config: Config,
) -> list[RequestRecord]:
    """Generate the requests of one session. All prompts are beginnings of one text, so its blocks are hashed once."""
    cache, size = config.prefix_cache, config.prefix_cache.block_size
    text, ends = _transcript(
        shared, passages, users, answers, contents.integers(settings.vocabulary, size=int(users.sum() + answers.sum()))
    )
    first_ends = np.cumsum([len(tokens) for tokens in shared]).tolist()
    first_ttls = [settings.system_ttl] * len(shared)
    root = chain_root(b"generated", config.model.name, str(size))
    hashes = tuple(block_hashes(text, size, root))

    records = []
    arrival = start
    for turn in range(len(users)):
        prompt = ends[2 * turn]
        blocks = [*first_ends, *ends[: 2 * turn + 1]]
        ttls = [*first_ttls, *[None] * (2 * turn), settings.history_ttl]
        marks = breakpoints(blocks, ttls, cache.min_tokens)
        reads = read_candidates(blocks, marks)
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


def _transcript(
    shared: Sequence[Ints], passages: Sequence[Ints], users: Ints, answers: Ints, contents: Ints
) -> tuple[NDArray[np.uint32], list[int]]:
    """Write all that is said in a session, and the ends of question, answer, question, ... in it."""
    each = len(passages) // len(users)
    parts, ends, at, used = list(shared), [], sum(map(len, shared)), 0
    for turn, (question, answer) in enumerate(zip(users.tolist(), answers.tolist(), strict=True)):
        found = passages[turn * each : (turn + 1) * each]
        parts += [*found, contents[used : used + question + answer]]
        used += question + answer
        at += sum(map(len, found)) + question
        ends += [at, at + answer]
        at += answer
    return np.concatenate(parts).astype("<u4"), ends
