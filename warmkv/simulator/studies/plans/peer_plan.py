"""A peer's plan for the same trace: NVIDIA AIConfigurator's, from measured kernels and the means of the trace.

It sizes vLLM for prompts and answers of one length that come at an even rate, so tails and bursts are not in it. Its
command `aiconfigurator` comes with the package `aisimulate` of the Python package index.
"""

from __future__ import annotations

import csv
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warmkv.gpus import Gpu
from warmkv.simulator.studies.plans.sizing import HOURS, Search, Sized, SizingTrial
from warmkv.simulator.studies.sweeps.tune import TuneConstraint
from warmkv.simulator.workload.requests import Requests

COMMAND = "aiconfigurator"
TABLE = "agg/best_config_topn.csv"
"""Of prefill and decode on the same GPUs, the best first."""
PATIENCE = 600.0  # seconds


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """What the peer would deploy on a kind of GPU, or why it does not say."""

    gpu: str
    refused: str = ""
    gpus: int = 0
    gpus_per_replica: int = 0
    ttft: float = 0.0  # seconds, of a request of the mean length
    tpot: float = 0.0
    dollars_month: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Means:
    """A trace as the peer takes it."""

    prompt: int  # tokens
    answer: int
    reused: int  # of the prompt
    rate: float  # requests a second


def means_of(requests: Requests, hit_rate: float) -> Means:
    """Return the means of a trace; `hit_rate` of its prompt tokens are reused."""
    records = requests.records
    count = len(records)
    prompt = sum(record.input_tokens for record in records) / count
    answer = sum(record.output_tokens for record in records) / count
    seconds = max(record.arrival for record in records) - min(record.arrival for record in records)
    return Means(max(1, round(prompt)), max(2, round(answer)), round(hit_rate * prompt), count / max(seconds, 1.0))


def beside(search: Search, sized: Sized, requests: Requests, model: Path) -> list[tuple[PeerPlan, SizingTrial | None]]:
    """Return the peer's plan for every GPU that the model fits, and the trial with as many replicas of one GPU.

    `model` is a folder with a config.json.
    """
    shown = sized.chosen or sized.nearest()
    hits = 0.0 if shown is None else shown.figures.get("hit_rate_tokens") or 0.0
    found: list[tuple[PeerPlan, SizingTrial | None]] = []
    for one in sized.machines:
        if not one.refused:
            planned = plan(model, one.gpu, means_of(requests, hits), sized.limits)
            alike = not planned.refused and planned.gpus_per_replica == 1
            found.append((planned, search.attempt(one, planned.gpus, {}) if alike else None))
    return found


def plan(model: Path, gpu: Gpu, means: Means, limits: Sequence[TuneConstraint]) -> PeerPlan:
    """Ask the peer for the fewest GPUs that serve the means of a trace within the limits on TTFT and TPOT."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(COMMAND, "cli", "recommend", "--no-color", "--backend", "vllm", "--save-dir", folder),
            *("--model-path", str(model), "--system", gpu.name.lower().replace("-", "_")),
            *("--isl", str(means.prompt), "--osl", str(means.answer), "--prefix", str(means.reused)),
            *("--target-request-rate", f"{means.rate:.6g}", "--strict-sla"),
        ]
        for name in ("ttft", "tpot"):
            bounds = [limit.bound for limit in limits if limit.name.startswith(f"{name}_")]
            if bounds:
                command += [f"--{name}", f"{1000 * min(bounds):g}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return PeerPlan(gpu.name, f"it took longer than {PATIENCE:.0f} s")
        found = sorted(Path(folder).glob(f"*/{TABLE}"))
        rows = list(csv.DictReader(found[0].open(newline="", encoding="utf-8"))) if found else []
        if not rows:
            said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            return PeerPlan(gpu.name, said[-1].strip() if done.returncode and said else "it found no deployment")
    try:
        best = min(rows, key=lambda row: float(row["total_gpus_needed"]))
        count = round(float(best["total_gpus_needed"]))
        per_replica = count // round(float(best["replicas_needed"]))
        ttft, tpot = float(best["ttft"]) / 1000, float(best["tpot"]) / 1000
    except (KeyError, ValueError, ZeroDivisionError) as error:
        return PeerPlan(gpu.name, f"its table cannot be read: {error}")
    return PeerPlan(gpu.name, "", count, per_replica, ttft, tpot, count * gpu.dollars * HOURS)
