"""Requests that the what-if service can replay for long: conversations with times as a service would have logged."""

from __future__ import annotations

import random
import time
from dataclasses import replace

from warmkv.prefixes.hashing import block_hashes, chain_root
from warmkv.prefixes.record import RequestRecord

CONVERSATIONS, TURN, BLOCK = 50, 64, 32  # how many go on at a time; tokens of a turn, and of a block


def requests_of(count: int, model: str, seed: int = 0) -> list[RequestRecord]:
    """Return requests of the last hours, whose latencies rise with what was new of their prompts."""
    draw, root = random.Random(seed), chain_root(b"race")
    prompts: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    found: list[RequestRecord] = []
    blank = RequestRecord(
        "", 0.0, "t", model, "chat", "full", BLOCK, 0, 16, (), status="ok", max_tokens=16, replica="replica"
    )
    for number in range(count):
        at = draw.randrange(CONVERSATIONS)
        if len(prompts[at]) > 16 * TURN:
            prompts[at] = []
        cached = len(prompts[at]) // BLOCK * BLOCK
        prompts[at] = prompts[at] + [draw.randrange(1 << 15) for _ in range(TURN)]
        hashes = tuple(block_hashes(prompts[at], BLOCK, root))
        prefill = 0.01 + (len(prompts[at]) - cached) * 1e-4
        found.append(
            replace(
                blank,
                id=str(number),
                arrival=time.time() - 3.0 * (count - number),
                input_tokens=len(prompts[at]),
                hashes=hashes,
                cached_tokens=cached,
                resident_bytes=1 << 20,
                prefill=prefill,
                ttft=prefill + 0.002,
                e2e=prefill + 0.002 + 15 * (0.005 + 1e-6 * len(prompts[at])),
            )
        )
    return found
