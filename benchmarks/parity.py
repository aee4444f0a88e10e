"""Does the replay of a live run give what the live run gave? Records one, on two replicas, and replays its access log.

See README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # started as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

if TYPE_CHECKING:
    from benchmarks.report import Figure
    from warmkv.simulator.studies.replays.verify import Verdict

POLICIES = ("full", "snapkv@0.3", "streaming_llm@0.5")


@dataclass(frozen=True, slots=True)
class Run:
    sessions: int = 70
    rate: float = 0.6  # sessions that begin in a second: with more, two cores are what requests wait for
    memory: str = "12MiB"  # of each replica's prefix cache: less than the sessions want
    seed: int = 0
    quick: bool = False
    engine: str = "warmkv"
    replicas: int = 2  # which share the machine

    @property
    def kv_bytes(self) -> str:
        """Return the room of running requests; vLLM's, which prefixes share, is the least for its longest prompt."""
        return "auto" if self.engine == "warmkv" else "12MiB"

    @property
    def policies(self) -> Sequence[str]:
        return POLICIES if self.engine == "warmkv" else POLICIES[:1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Record and replay; 1 if a figure misses its target (not with --quick), 2 for wrong arguments."""
    run, path = _parse(arguments)
    import torch

    from benchmarks import report
    from benchmarks.live.service import progress
    from warmkv.measuring import machine

    identity, say = machine.identity(torch.device("cpu")), progress()
    with tempfile.TemporaryDirectory() as folder:
        verdict, live = _record_and_replay(run, Path(folder) / "access.jsonl", say)
    figures = _figures(verdict, live, run)
    notes = [*verdict.misses]
    if path is not None:
        commit = os.environ.get("WARMKV_COMMIT") or machine.commit()
        settings = {name: getattr(run, name) for name in run.__slots__}
        report.write(path, report.document(identity, machine.versions(), commit, settings, figures, notes))
    report.show(f"parity of a live run of {verdict.requests} requests and its replay", figures, notes)
    return 1 if not run.quick and any(each.met is False for each in figures) else 0


def _record_and_replay(run: Run, log: Path, say: Any) -> tuple[Verdict, Mapping[str, Any]]:
    from benchmarks.live import service, traffic
    from warmkv.config import parse
    from warmkv.platform.local import running
    from warmkv.simulator.studies.replays import step_times
    from warmkv.simulator.studies.replays.replay import recorded_policy
    from warmkv.simulator.studies.replays.verify import verify
    from warmkv.simulator.workload import access_log

    config = parse(
        {
            "cluster": {"replicas": run.replicas},
            "engine": {"threads": 1, "kind": run.engine, "kv_bytes": run.kv_bytes},
            "prefix_cache": {"memory_bytes": run.memory},
            "gateway": {"port": 0, "access_log": str(log)},
            "routing": {"transfer": False},  # what is fetched is not in the log
        }
    )
    shape = traffic.Traffic(sessions=run.sessions, rate=run.rate, policies=run.policies, tenants=2, seed=run.seed)
    sessions = traffic.plan(shape)
    with running(config, say) as live:
        service.ask_all(live.url, config.model.name, sessions, say)
        held = service.replicas(live.url, live.operator_key)
    records = access_log.read(log).requests
    say("replaying")
    times, _ = step_times.choose_cost(records, config, recorded_policy(), "log")
    return verify(records, config, times), held


def _figures(verdict: Verdict, live: Mapping[str, Any], run: Run) -> list[Figure]:
    from benchmarks.report import figure
    from warmkv.simulator.studies.replays.verify import JUDGED, LEAST_EQUAL_HITS, MOST_HIT_ERROR, MOST_TIME_ERROR

    def off(simulated: float, key: str) -> float:
        return abs(simulated - sum(replica[key] for replica in live.values()))

    exactly = 0 if run.engine == "warmkv" else None  # vLLM overwrites a block when it needs one, and tells of it then
    found = [
        figure("requests", [verdict.requests], 200, "higher"),
        figure("equal_hits", [verdict.equal_hits], LEAST_EQUAL_HITS, "higher"),
        figure("hit_tokens_error", [abs(verdict.hit_error)], MOST_HIT_ERROR, "lower"),
        figure("equal_bills", [verdict.equal_bills], None, "higher"),
        figure("equal_slot_bytes", [verdict.equal_slots], None, "higher"),
        figure("evictions", [verdict.evictions], None, "higher"),
        figure("evictions_off", [off(verdict.evictions, "evicted")], exactly, "lower"),
        figure("resident_bytes_off", [off(verdict.stored_bytes, "store_bytes")], exactly, "lower"),
    ]
    times = verdict.times
    assert times is not None
    for metric in JUDGED:
        for quantile, most in MOST_TIME_ERROR.items():
            found.append(figure(f"{metric}_{quantile}_error", [abs(times.error[metric][quantile])], most, "lower"))
    for metric, quantiles in times.measured.items():
        found += [figure(f"{metric}_{name}_live_seconds", [value], None, "lower") for name, value in quantiles.items()]
    return found


def _parse(arguments: Sequence[str] | None) -> tuple[Run, Path | None]:
    parser = argparse.ArgumentParser(prog="parity", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="few requests: whether it runs, not how well")
    parser.add_argument("--sessions", type=int, metavar="N", help="70 by default, about 240 requests")
    parser.add_argument("--rate", type=float, metavar="N", help="sessions that begin in a second (0.6)")
    parser.add_argument("--memory", metavar="BYTES", help="of each replica's prefix cache (12MiB)")
    parser.add_argument("--seed", type=int, help="of the sessions (0)")
    parser.add_argument("--replicas", type=int, metavar="N", help="which share the machine's cores (2)")
    parser.add_argument("--engine", choices=("warmkv", "vllm"), help="of the replicas; vllm runs in .venv-vllm")
    options = parser.parse_args(arguments)
    run = Run(sessions=8, rate=2.0, quick=True) if options.quick else Run()
    given = {name: getattr(options, name) for name in ("sessions", "rate", "memory", "seed", "engine", "replicas")}
    run = replace(run, **{name: value for name, value in given.items() if value is not None})
    if run.sessions < 1 or run.rate <= 0 or run.replicas < 1:
        parser.error("at least one session, a positive rate and a replica are needed")
    return run, options.json


if __name__ == "__main__":
    sys.exit(main())
