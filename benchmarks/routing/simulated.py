"""Our rule against those of Ray Serve LLM's routers in the simulator: replicas over vLLM from idle to overload.

The live race takes minutes for one load, and two cores cannot keep several replicas busy. Here all rules route the
same closed-loop sessions to four simulated replicas with vLLM's one pool of blocks.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import numpy as np

from benchmarks.engine.results import Results
from benchmarks.live.traffic import Traffic
from benchmarks.routing.live import AT_ONCE, HOTTEST, REPLICAS, TRAFFIC
from warmkv.config import Config, RoutingConfig, parse
from warmkv.policies import routing
from warmkv.policies.routing import View
from warmkv.prefixes.hashing import block_hashes
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.steps.costs import StepCost, StepTimes
from warmkv.simulator.studies.replays.replay import run
from warmkv.simulator.studies.replays.variants import Variant
from warmkv.simulator.workload.requests import FollowUp

BLOCK, TOKENS_PER_LINE = 32, 10
CACHE_TOKENS = 11_000  # of a replica: 32 MiB of the shipped model's
STEP = StepCost(0.012, 0.0004, 2e-7)  # about the shipped model's on a quarter of a core
CASES: dict[str, tuple[Traffic, float]] = {  # sessions, and how many begin in a second
    "zipf_idle": (TRAFFIC, 3.0),
    "zipf": (TRAFFIC, 18.0),
    "hot": (replace(TRAFFIC, hottest=HOTTEST), 24.0),
    "pressure": (replace(TRAFFIC, prompts=120), 9.0),  # three times what all caches hold
}
MATCH_RATE = 0.1  # of a prompt below which the prefix router looks for the emptiest replica

Sessions = tuple[list[RequestRecord], dict[int, FollowUp]]
Policy = Callable[[View, RoutingConfig, Random], list[str]]


class PrefixAffinity:
    """Rank as PrefixCacheAffinityRouter (ray 2.60) by default: the longest match of all that was sent, however loaded.

    Of several replicas the one with the shortest queue gets a request. It is never told what was evicted.
    """

    def __init__(self) -> None:
        self._sent: dict[str, set[bytes]] = {}

    def __call__(self, view: View, config: RoutingConfig, rng: Random) -> list[str]:
        sent = {name: self._sent.setdefault(name, set()) for name in view.replicas}
        depths = {
            name: sum(1 for _ in itertools.takewhile(known.__contains__, view.hashes)) for name, known in sent.items()
        }
        most, fewest = max(depths.values()), min(map(len, sent.values()))
        if most < MATCH_RATE * max(1, len(view.hashes)):
            chosen = [name for name in view.replicas if len(sent[name]) == fewest]
        else:
            chosen = [name for name in view.replicas if depths[name] == most]
        rng.shuffle(chosen)
        rest = [name for name in view.replicas if name not in chosen]
        order = [*sorted(chosen, key=lambda name: view.load.get(name, 0)), *rest]
        sent[order[0]].update(view.hashes)
        return order


class KVAware:
    """Rank as KVAwareRouter (ray 2.60), which asks Dynamo's selection service, with its defaults: by KV events.

    The replica with the least work in blocks gets a request: those to compute for it and for others there that have no
    token yet, and the distinct blocks of all that would be in flight there. Of a replica's requests in flight `View`
    knows the number: they are taken to be those that were sent last.
    """

    def __init__(self) -> None:
        self._sent: dict[str, deque[Sequence[bytes]]] = {}

    def __call__(self, view: View, config: RoutingConfig, rng: Random) -> list[str]:
        def work(name: str) -> float:
            running = self._sent.setdefault(name, deque())
            while len(running) > view.load.get(name, 0):
                running.popleft()
            computed = len(view.hashes) - view.warm.get(name, (0, 0, 0))[0] + view.prefill.get(name, 0)
            return computed + len(set(view.hashes).union(*running))

        order = sorted(rng.sample(view.replicas, len(view.replicas)), key=work)
        self._sent[order[0]].append(view.hashes)
        return order


def least_work(view: View, config: RoutingConfig, rng: Random) -> list[str]:
    """Rank by the blocks that wait to be computed, then by requests."""
    names = rng.sample(view.replicas, len(view.replicas))
    return sorted(names, key=lambda name: (view.prefill.get(name, 0), view.load.get(name, 0)))


PEERS: dict[str, Callable[[], Policy]] = {"affinity": PrefixAffinity, "kv_aware": KVAware}
BOUND = "bound"
"""No rule that decides at arrival is likely to beat it: prompts find on every replica what one cache of all the memory
holds."""


def race(repeats: int, seed: int, quick: bool, results: Results, say: Callable[[str], None]) -> None:
    """Replay every case under all rules."""
    for case, (traffic, rate) in CASES.items():
        for repeat in range(repeats):
            shape = replace(traffic, rate=rate, sessions=20 if quick else 300)
            records, turns = sessions(shape, seed + repeat)
            ideal, _ = _outcome(records, turns, "prefix_cost", AT_ONCE, replicas=1)
            _, ttft = _outcome(what_is_left(records, turns), turns, BOUND, STEP)
            for quantile in (50, 99):
                results.add(f"{BOUND}_{case}_ttft_p{quantile}_ms", float(np.percentile(ttft, quantile)) * 1e3)
            for rule in ("prefix_cost", *PEERS):
                rate_found, ttft = _outcome(records, turns, rule, STEP)
                results.add(f"{rule}_{case}_hit_rate_of_ideal", rate_found / ideal)
                for quantile in (50, 99):
                    results.add(f"{rule}_{case}_ttft_p{quantile}_ms", float(np.percentile(ttft, quantile)) * 1e3)
        say(f"simulated: {case} replayed")


def sessions(traffic: Traffic, seed: int) -> Sessions:
    """Draw sessions that resend what was said with every turn; each turn follows the answer before it."""
    rng = random.Random(seed)
    lengths = [TOKENS_PER_LINE * rng.randint(*traffic.system_lines) for _ in range(traffic.prompts)]
    weights = [(number + 1) ** -traffic.zipf for number in range(traffic.prompts)]
    if traffic.hottest is not None:
        rest = sum(weights[1:])
        weights = [traffic.hottest, *((1 - traffic.hottest) * weight / rest for weight in weights[1:])]
    begins, words, records, turns = 0.0, itertools.count(1_000_000), list[RequestRecord](), dict[int, FollowUp]()
    for session in range(traffic.sessions):
        begins += rng.expovariate(traffic.rate)
        system = rng.choices(range(traffic.prompts), weights)[0]
        said = [system] * lengths[system]
        for turn in range(rng.randint(*traffic.turns)):
            said += itertools.islice(words, TOKENS_PER_LINE * rng.randint(1, 8))
            output = rng.randint(*traffic.answer_tokens)
            name, hashes = f"{session}.{turn}", tuple(block_hashes(said, BLOCK, b"simulated"))
            if turn:
                turns[len(records)] = FollowUp(len(records) - 1, rng.expovariate(1 / traffic.think))
            records.append(RequestRecord(name, begins, "", "", "chat", "full", BLOCK, len(said), output, hashes))
            said += itertools.islice(words, output)
    return records, turns


def what_is_left(records: Sequence[RequestRecord], turns: dict[int, FollowUp]) -> list[RequestRecord]:
    """Return requests of the tokens that these compute where all memory is one cache; none shares a prefix."""
    jobs = run(records, settings(1), Variant(), AT_ONCE, turns=turns).jobs
    left = []
    for record, job in zip(records, jobs, strict=True):
        tokens = record.input_tokens - job.reused
        names = (f"{record.id} {at}".encode().ljust(32) for at in range(tokens // BLOCK))
        left.append(replace(record, input_tokens=tokens, hashes=tuple(names)))
    return left


def settings(replicas: int) -> Config:
    """Return the service: so many replicas that together hold as much as all."""
    half = CACHE_TOKENS * REPLICAS // replicas * 6 * 2 * 2 * 32 * 4 // 2
    return parse(
        {
            "engine": {"kind": "vllm", "kv_bytes": half},
            "prefix_cache": {"block_size": BLOCK, "memory_bytes": half, "default_ttl": "1h"},
            "cluster": {"replicas": replicas},
            "simulator": {
                "model": {"layers": 6, "kv_heads": 2, "head_dim": 32, "dtype_bytes": 4},
                "index_delay": 0.02,
            },
        }
    )


def _outcome(
    records: Sequence[RequestRecord],
    turns: dict[int, FollowUp],
    rule: str,
    times: StepTimes,
    replicas: int = REPLICAS,
) -> tuple[float, Sequence[float]]:
    """Return the share of prompt tokens that were reused, and the seconds to the first tokens."""
    with _ruled_by(rule):
        jobs = run(records, settings(replicas), Variant(), times, turns=turns).jobs
    assert all(job.replica for job in jobs)
    return sum(job.reused for job in jobs) / sum(job.prompt for job in jobs), [job.first - job.arrival for job in jobs]


@contextmanager
def _ruled_by(rule: str) -> Iterator[None]:
    """Let the default policy be another rule: a peer's is no setting of the service."""
    policies = dict(routing.POLICIES)
    if rule in PEERS:
        routing.POLICIES["prefix_cost"] = PEERS[rule]()
    elif rule == BOUND:
        routing.POLICIES["prefix_cost"] = least_work
    try:
        yield
    finally:
        routing.POLICIES.update(policies)
