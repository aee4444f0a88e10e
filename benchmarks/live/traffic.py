"""Sessions of many turns that share system prompts, played against a service through the `anthropic` SDK.

The plan is drawn before the first request is sent, so every contestant gets the same questions at the same times; what
differs are the answers that a session's later turns carry along, and only if the service answers differently.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from warmkv.models.tiny import corpus


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is drawn. Lengths are in lines of source code of about ten tokens each, times in seconds."""

    sessions: int = 60
    rate: float = 1.0  # sessions that begin in a second (Poisson)
    turns: tuple[int, int] = (2, 5)
    think: float = 1.5  # mean time from an answer to the next question (exponential)
    prompts: int = 12  # system prompts, of which the n-th most popular is taken n**-zipf as often as the first
    zipf: float = 1.1
    hottest: float | None = None  # share of all sessions that take the first prompt, whatever `zipf` says
    system_lines: tuple[int, int] = (40, 90)
    question_lines: tuple[int, int] = (1, 8)
    answer_tokens: tuple[int, int] = (8, 32)
    policies: tuple[str, ...] = ("full",)
    tenants: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    question: str
    answer_tokens: int
    think: float  # seconds before it is asked


@dataclass(frozen=True, slots=True)
class Session:
    begins: float
    key: str
    policy: str
    system: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A request as its client saw it. `error` is empty if it was answered."""

    session: int
    turn: int
    asked: float  # seconds after the first session could begin
    ttft: float = 0.0
    e2e: float = 0.0
    usage: dict[str, Any] | None = None
    error: str = ""


def plan(traffic: Traffic) -> list[Session]:
    """Return the sessions, by when they begin."""
    rng = random.Random(traffic.seed)
    lines = [line for text in corpus.texts("heldout") for line in text.splitlines() if 20 < len(line) < 80]
    systems = ["\n".join(rng.sample(lines, rng.randint(*traffic.system_lines))) for _ in range(traffic.prompts)]
    weights = [(number + 1) ** -traffic.zipf for number in range(traffic.prompts)]
    if traffic.hottest is not None:
        rest = sum(weights[1:])
        weights = [traffic.hottest, *((1 - traffic.hottest) * weight / rest for weight in weights[1:])]
    begins, sessions = 0.0, []
    for _ in range(traffic.sessions):
        begins += rng.expovariate(traffic.rate)
        prompt = rng.choices(range(traffic.prompts), weights)[0]
        turns = tuple(
            Turn(
                "\n".join(rng.sample(lines, rng.randint(*traffic.question_lines))),
                rng.randint(*traffic.answer_tokens),
                rng.expovariate(1 / traffic.think) if number else 0.0,
            )
            for number in range(rng.randint(*traffic.turns))
        )
        tenant = f"tenant-{prompt % traffic.tenants}"
        sessions.append(Session(begins, tenant, rng.choice(traffic.policies), systems[prompt], turns))
    return sessions


async def play(
    url: str, model: str, sessions: Sequence[Session], progress: Callable[[int], None] = lambda done: None
) -> list[Sample]:
    """Ask everything; a session whose request fails ends there. Samples are in the order in which they were asked."""
    import anthropic

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # which Ray would print
    clients = {
        key: anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0, timeout=120)
        for key in {session.key for session in sessions}
    }
    samples: list[Sample] = []
    start = time.perf_counter()

    async def one(number: int, session: Session) -> None:
        await asyncio.sleep(max(0.0, start + session.begins - time.perf_counter()))
        history: list[dict[str, Any]] = []
        for at, turn in enumerate(session.turns):
            await asyncio.sleep(turn.think)
            history.append({"role": "user", "content": turn.question})
            asked = time.perf_counter()
            try:
                text, ttft, usage = await _ask(clients[session.key], model, session, history, turn)
            except anthropic.APIError as error:
                samples.append(Sample(number, at, asked - start, error=f"{type(error).__name__}: {error}"))
                return
            e2e = time.perf_counter() - asked
            samples.append(Sample(number, at, asked - start, ttft - asked, e2e, usage))
            progress(len(samples))
            history.append({"role": "assistant", "content": text or "."})

    try:
        async with asyncio.TaskGroup() as group:
            for number, session in enumerate(sessions):
                group.create_task(one(number, session))
    finally:
        for client in clients.values():
            await client.close()
    return sorted(samples, key=lambda sample: sample.asked)


async def _ask(
    client: Any, model: str, session: Session, history: list[dict[str, Any]], turn: Turn
) -> tuple[str, float, dict[str, Any]]:
    """Return the text, when its first part came, and the usage.

    The system prompt and the last question are breakpoints.
    """
    text, first, usage = "", 0.0, {}
    last = {"type": "text", "text": turn.question, "cache_control": {"type": "ephemeral"}}
    events = await client.messages.create(
        model=model,
        max_tokens=turn.answer_tokens,
        system=[{"type": "text", "text": session.system, "cache_control": {"type": "ephemeral"}}],
        messages=[*history[:-1], {"role": "user", "content": [last]}],
        stream=True,
        extra_body={"temperature": 0, "warmkv": {"policy": session.policy, "ignore_eos": True}},
    )
    async for event in events:
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            first = first or time.perf_counter()
            text += event.delta.text
        elif event.type == "message_delta":
            usage = event.usage.model_dump()
    return text, first or time.perf_counter(), usage
