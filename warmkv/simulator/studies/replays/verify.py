"""Whether a replay of a live run gives what the live run gave, request by request and in its latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from warmkv.config import Config
from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.record_builder import columns_of
from warmkv.simulator.latency.calibration import Judgement, judge
from warmkv.simulator.steps.costs import StepTimes
from warmkv.simulator.studies.replays.log_fit import measured, measured_times, simulated_times
from warmkv.simulator.studies.replays.replay import run
from warmkv.simulator.studies.replays.variants import Variant

LEAST_EQUAL_HITS, MOST_HIT_ERROR = 0.99, 0.005
MOST_TIME_ERROR: Mapping[str, float] = {"p50": 0.10, "p90": 0.20}
JUDGED = ("ttft", "e2e")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Shares are of requests that were served in both; times are judged on those that the log has times of."""

    requests: int
    refused: int  # by the simulated cluster: the live one served them
    equal_hits: float  # share with as many reused tokens
    equal_bills: float  # share billed alike
    equal_slots: float  # share whose slot took as many bytes
    live_hit_tokens: int  # of requests that were served in both
    simulated_hit_tokens: int
    evictions: int  # in the simulation; a log does not tell
    expirations: int
    stored_bytes: int  # of the prefix cache at the end, in the simulation
    times: Judgement | None

    @property
    def hit_error(self) -> float:
        """Return the error of reused tokens, as a share of the live run's."""
        if not self.live_hit_tokens:
            return float(self.simulated_hit_tokens > 0)
        return self.simulated_hit_tokens / self.live_hit_tokens - 1

    @property
    def misses(self) -> list[str]:
        """List in words what is farther off than a replay should be."""
        found = []
        if self.refused:
            found.append(f"{self.refused} requests are refused that were served")
        if self.equal_hits < LEAST_EQUAL_HITS:
            found.append(f"hit tokens are equal for {self.equal_hits:.1%} of the requests")
        if abs(self.hit_error) > MOST_HIT_ERROR:
            found.append(f"hit tokens are {self.hit_error:+.2%} in total")
        if self.times is not None:
            for metric in JUDGED:
                for figure, most in MOST_TIME_ERROR.items():
                    if abs(error := self.times.error[metric][figure]) > most:
                        found.append(f"{metric.upper()} {figure} is {error:+.0%}")
        return found


def verify(records: Sequence[RequestRecord], config: Config, times: StepTimes) -> Verdict:
    """Replay a log as it was, each request on the replica that it was on, and compare.

    Raises VariantError if the log names a TTL or policy that the configuration does not know.
    """
    done = run(records, config, Variant(), times, as_placed=True)
    jobs, logged = done.jobs, columns_of(records)
    served = jobs.served()
    timed = served[measured(logged)[served]]
    reused, cached = jobs.column("reused")[served], logged.cached_tokens[served]
    billed = zip(done.usages, map(logged.usage_of, served.tolist()), strict=True)
    count = max(1, len(served))
    return Verdict(
        requests=len(records),
        refused=len(records) - len(served),
        equal_hits=int((reused == cached).sum()) / count,
        equal_bills=sum(usage == told for usage, told in billed) / count,
        equal_slots=int((jobs.slot_bytes[served] == logged.resident_bytes[served]).sum()) / count,
        live_hit_tokens=int(cached.sum()),
        simulated_hit_tokens=int(reused.sum()),
        evictions=done.outcome.removals.evicted,
        expirations=done.outcome.removals.expired,
        stored_bytes=done.outcome.stored.value,
        times=judge(measured_times(logged.take(timed)), simulated_times(jobs, timed)) if len(timed) else None,
    )
