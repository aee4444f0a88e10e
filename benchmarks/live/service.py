"""The service that is raced: on a local Ray of this process, with the configuration that is given."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.live.traffic import Sample, Session, play

SETTLE_SECONDS = 2.5  # in which every replica has reported its state again


def ask_all(url: str, model: str, sessions: Sequence[Session], say: Callable[[str], None]) -> list[Sample]:
    """Play the sessions; says how far it is, and fails if a request does."""
    total = sum(len(session.turns) for session in sessions)

    def told(done: int) -> None:
        if done % 50 == 0:
            say(f"{done} of {total} requests answered")

    samples = asyncio.run(play(url, model, sessions, told))
    if failed := [sample.error for sample in samples if sample.error]:
        raise RuntimeError(f"{len(failed)} requests failed; the first: {failed[0]}")
    return samples


def replicas(url: str, operator_key: str) -> dict[str, Any]:
    """What every replica holds and has done, once it has reported the end of the last request."""
    time.sleep(SETTLE_SECONDS)
    request = Request(f"{url}/v1/warmkv/replicas", headers={"x-api-key": operator_key})
    with urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)["replicas"]
    return found


def progress() -> Callable[[str], None]:
    """Return lines on standard error with the seconds since now; what is said again in a row is not written."""
    start, last = time.perf_counter(), ""

    def say(what: str) -> None:
        nonlocal last
        if what != last:
            print(f"[{time.perf_counter() - start:6.1f} s] {what}", file=sys.stderr, flush=True)
        last = what

    return say
