"""Our rule against those of Ray Serve LLM's routers in the simulator: from idle to overload, over both engines.

The live race takes minutes for one load, and two cores cannot keep several replicas busy. Here all rules route the
same closed-loop sessions to four simulated replicas: over vLLM, which has one pool of blocks, and over the own engine,
whose replicas fetch prefixes from each other under our rule. Recorded sessions of coding agents follow, if they are
there.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.engine.results import Results
from benchmarks.live.traffic import Traffic
from benchmarks.routing.live import AT_ONCE, HOTTEST, REPLICAS, TRAFFIC
from warmkv.config import Config, RoutingConfig, parse
from warmkv.policies import batching, routing
from warmkv.policies.routing import View
from warmkv.prefixes.hashing import block_hashes
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator import traces
from warmkv.simulator.steps.costs import StepCost, StepTimes
from warmkv.simulator.studies.replays.replay import run
from warmkv.simulator.studies.replays.variants import Variant
from warmkv.simulator.workload.requests import FollowUp, of_trace

BLOCK, TOKENS_PER_LINE = 32, 10
CACHE_TOKENS = 11_000  # of a replica: 32 MiB of the shipped model's
STEP = StepCost(0.012, 0.0004, 2e-7)  # about the shipped model's on a quarter of a core


@dataclass(frozen=True, slots=True)
class Case:
    """Sessions, and the replicas that serve them."""

    traffic: Traffic
    rate: float  # sessions that begin in a second
    engine: str = "vllm"
    memory: float = 1.0  # bytes of stored prefixes, as a share of CACHE_TOKENS

    def config(self, replicas: int = REPLICAS) -> Config:
        """Return the service: so many replicas, which together hold as much as REPLICAS do."""
        pool = CACHE_TOKENS * REPLICAS // replicas * 6 * 2 * 2 * 32 * 4
        # Over vLLM both are one pool; the own engine has slots beside what it stores.
        slots, stored = (pool // 2, pool // 2) if self.engine == "vllm" else (pool, int(self.memory * pool))
        return parse(
            {
                "engine": {"kind": self.engine, "kv_bytes": slots},
                "prefix_cache": {"block_size": BLOCK, "memory_bytes": stored, "default_ttl": "1h"},
                "cluster": {"replicas": replicas},
                "simulator": {
                    "model": {"layers": 6, "kv_heads": 2, "head_dim": 32, "dtype_bytes": 4},
                    "index_delay": 0.02,
                },
            }
        )


CASES = {
    "zipf_idle": Case(TRAFFIC, 3.0),
    "zipf": Case(TRAFFIC, 18.0),
    "hot": Case(replace(TRAFFIC, hottest=HOTTEST), 24.0),
    "pressure": Case(replace(TRAFFIC, prompts=120), 9.0),  # three times what all caches hold
    "own_zipf": Case(TRAFFIC, 18.0, "warmkv"),
    "own_hot": Case(replace(TRAFFIC, hottest=HOTTEST), 24.0, "warmkv"),
    "own_pressure": Case(replace(TRAFFIC, prompts=120), 9.0, "warmkv"),
    "own_half": Case(TRAFFIC, 9.0, "warmkv", memory=0.5),
}
AGENTS = {"agents": 64, "agents_pressure": 24}
"""GiB of stored prefixes of a replica that serves recorded sessions of coding agents."""
AGENT_SESSIONS = "agentic_coding_60_sessions.jsonl.gz"
AGENT_STEP = StepCost(0.006, 40e-6, 2e-9)  # about those of 8B parameters on a large GPU
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


def race(repeats: int, seed: int, quick: bool, folder: Path, results: Results, say: Callable[[str], None]) -> None:
    """Replay every case under all rules, then the recorded sessions if they are in the folder of traces."""
    for name, case in CASES.items():
        for repeat in range(repeats):
            shape = replace(case.traffic, rate=case.rate, sessions=20 if quick else 300)
            records, turns = sessions(shape, seed + repeat)
            ideal, _ = outcome(records, turns, "prefix_cost", AT_ONCE, case.config(1))
            left = what_is_left(records, turns, case)
            _measure(name, records, turns, STEP, case.config(), ideal, left, results)
        say(f"simulated: {name} replayed")
    path = folder / AGENT_SESSIONS
    if quick or not path.exists():
        say(f"simulated: {path.name} is left out")
        return
    trace = traces.read(path)
    for name, gib in AGENTS.items():
        requests = of_trace(trace, of_agents(REPLICAS, gib))
        ideal, _ = outcome(requests.records, requests.turns, "prefix_cost", AT_ONCE, of_agents(1, REPLICAS * gib))
        _measure(name, requests.records, requests.turns, AGENT_STEP, of_agents(REPLICAS, gib), ideal, None, results)
        say(f"simulated: {name} replayed")


def _measure(
    case: str,
    records: Sequence[RequestRecord],
    turns: Mapping[int, FollowUp],
    times: StepTimes,
    config: Config,
    ideal: float,
    left: Sequence[RequestRecord] | None,
    results: Results,
) -> None:
    """Replay sessions under all rules, and what is `left` of them under the bound."""
    found = {rule: outcome(records, turns, rule, times, config) for rule in ("prefix_cost", *PEERS)}
    if left is not None:
        found[BOUND] = outcome(left, turns, BOUND, times, config)
    for rule, (rate, ttft) in found.items():
        if rule != BOUND:
            results.add(f"{rule}_{case}_hit_rate_of_ideal", rate / ideal)
        for quantile in (50, 99):
            results.add(f"{rule}_{case}_ttft_p{quantile}_ms", float(np.percentile(ttft, quantile)) * 1e3)


def of_agents(replicas: int, gib: int) -> Config:
    """Return the service for the recorded sessions: the own engine with the KV of 8B parameters."""
    return parse(
        {
            "engine": {"kv_bytes": 100 << 30, "max_slots": 64},
            "prefix_cache": {"memory_bytes": gib << 30, "default_ttl": "1h"},
            "cluster": {"replicas": replicas},
            "simulator": {"model": {"layers": 32, "kv_heads": 8, "head_dim": 128, "dtype_bytes": 2}},
        }
    )


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


def what_is_left(records: Sequence[RequestRecord], turns: Mapping[int, FollowUp], case: Case) -> list[RequestRecord]:
    """Return requests of the tokens that these compute where all memory is one cache; none shares a prefix."""
    jobs = run(records, case.config(1), Variant(), AT_ONCE, turns=turns).jobs
    left = []
    for record, job in zip(records, jobs, strict=True):
        tokens = record.input_tokens - job.reused
        names = (f"{record.id} {at}".encode().ljust(32) for at in range(tokens // BLOCK))
        left.append(replace(record, input_tokens=tokens, hashes=tuple(names)))
    return left


def outcome(
    records: Sequence[RequestRecord], turns: Mapping[int, FollowUp], rule: str, times: StepTimes, config: Config
) -> tuple[float, Sequence[float]]:
    """Return the share of prompt tokens that were reused, and the seconds to the first tokens.

    Requests longer than what a replica can hold are refused under every rule, and left out.
    """
    with _ruled_by(rule):
        asked = run(records, config, Variant(), times, turns=turns).jobs
    jobs = [job for job in asked if job.replica]
    assert all(job.replica or job.too_large for job in asked), "queues were full"
    return sum(job.reused for job in jobs) / sum(job.prompt for job in jobs), [job.first - job.arrival for job in jobs]


@contextmanager
def _ruled_by(rule: str) -> Iterator[None]:
    """Let the default policy be another rule: a peer's is no setting of the service.

    Peers leave the order of waiting requests to vLLM, which takes those that come first; ours gives it priorities.
    """
    policies, delay = dict(routing.POLICIES), batching.delay
    if rule in PEERS:
        routing.POLICIES["prefix_cost"] = PEERS[rule]()
        batching.delay = lambda lacking, step_tokens: 0
    elif rule == BOUND:
        routing.POLICIES["prefix_cost"] = least_work
    try:
        yield
    finally:
        routing.POLICIES.update(policies)
        batching.delay = delay
