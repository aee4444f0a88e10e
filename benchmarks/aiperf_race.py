"""Requests a second through HTTP as aiperf counts them, of warmkv and of vLLM's own server on the same cores.

aiperf itself takes about a core; `served_race` has a lighter client. See README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # started as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.served.load import Load, Server, measure, single_token_words

if TYPE_CHECKING:
    from benchmarks.report import Figure

CLIENTS = 16
LENGTHS = ((400, 32), (2000, 64))  # tokens in and out
TARGET = 1.1  # of vLLM's requests a second
KV_BYTES = 1 << 30  # of slots, and as many of prefixes
METRICS = {  # of aiperf's report: the statistic, what it is in our unit, and which direction is better
    "request_throughput": ("avg", "requests_per_second", 1.0, "higher"),
    "time_to_first_token": ("p50", "first_token_seconds", 1e-3, "lower"),
    "inter_token_latency": ("p50", "between_seconds", 1e-3, "lower"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A load: tokens in and out of each request, and how many requests."""

    prompt: int
    answer: int
    requests: int

    @property
    def name(self) -> str:
        return f"{CLIENTS}x{self.prompt}/{self.answer}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the race; return 1 if a ratio misses its target (not with --quick), 2 for wrong arguments."""
    options = _parse(arguments)
    os.environ.setdefault("RAY_worker_niceness", "0")
    import torch

    from benchmarks import report
    from benchmarks.live.service import progress
    from warmkv.measuring import machine

    rows = [Row(prompt, answer, 2 * CLIENTS if options.quick else options.requests) for prompt, answer in LENGTHS]
    figures = _race(rows, options, progress())
    if options.json is not None:
        identity = machine.identity(torch.device("cpu"))
        commit = os.environ.get("WARMKV_COMMIT") or machine.commit()
        names = ("threads", "replicas", "compile", "repeats", "requests")
        settings = {name: getattr(options, name) for name in names} | {"vllm": bool(options.vllm)}
        report.write(options.json, report.document(identity, machine.versions(), commit, settings, figures, []))
    report.show("served through HTTP, by aiperf", figures, [])
    return 1 if not options.quick and any(each.met is False for each in figures) else 0


def _race(rows: Sequence[Row], options: argparse.Namespace, say: Callable[[str], None]) -> list[Figure]:
    from benchmarks.served import servers
    from warmkv.platform.local import free_port

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = servers.longer(options.model, folder / "model")
        raced = [
            stack.enter_context(
                servers.warmkv(model, options.threads, options.replicas, options.compile, KV_BYTES, say)
            )
        ]
        if options.vllm:
            port = free_port("127.0.0.1")
            raced.append(stack.enter_context(servers.vllm(options.vllm, model, port, KV_BYTES, folder / "vllm.log")))
        words = single_token_words(options.model)
        for server in raced:
            asyncio.run(measure(server, Load("warm-up", 2, 20, 8, 1), words, -1))
        reports: dict[Row, dict[str, list[dict[str, Any]]]] = {row: {} for row in rows}
        for repeat in range(options.repeats):
            for row in rows:
                for server in raced:  # in turn: a machine is not as fast at all times
                    say(f"{row.name}, {server.name}")
                    out = folder / f"{server.name}-{row.prompt}-{repeat}"
                    reports[row].setdefault(server.name, []).append(
                        profile(options.aiperf, server, options.model, row, repeat, out)
                    )
    return [each for row, seen in reports.items() for each in figures_of(row, seen)]


def profile(aiperf: Path, server: Server, tokenizer: Path, row: Row, seed: int, out: Path) -> dict[str, Any]:
    """Return aiperf's report of a load on a server's chat API, streamed. Raises RuntimeError if requests failed."""
    command = [str(aiperf), "profile", "--url", server.url, "--model", server.model, "--tokenizer", str(tokenizer)]
    command += ["--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--random-seed", str(seed)]
    command += ["--concurrency", str(CLIENTS), "--request-count", str(row.requests)]
    command += ["--num-dataset-entries", str(row.requests)]  # no prompt twice
    command += ["--prompt-input-tokens-mean", str(row.prompt), "--prompt-input-tokens-stddev", "0"]
    command += ["--output-tokens-mean", str(row.answer), "--output-tokens-stddev", "0"]
    command += ["--extra-inputs", "ignore_eos:true", "--no-gpu-telemetry", "--no-server-metrics", "--ui", "none"]
    ran = subprocess.run([*command, "--artifact-dir", str(out)], capture_output=True, text=True, check=False)
    written = out / "profile_export_aiperf.json"
    report: dict[str, Any] = json.loads(written.read_text()) if written.exists() else {}
    answered = report.get("request_count", {}).get("avg", 0)
    if ran.returncode != 0 or answered != row.requests:
        told = (ran.stdout + ran.stderr)[-2000:]
        raise RuntimeError(f"{server.name}: aiperf had {answered} of {row.requests} requests answered\n{told}")
    return report


def figures_of(row: Row, seen: dict[str, list[dict[str, Any]]]) -> list[Figure]:
    """Return a load's figures for every server, and the ratios of the first to the others."""
    from benchmarks.report import figure, ratios

    found = []
    for metric, (statistic, name, unit, better) in METRICS.items():
        values = {server: [report[metric][statistic] * unit for report in reports] for server, reports in seen.items()}
        ours, *peers = values
        found.append(figure(f"{row.name}_{name}", values[ours], None, better))
        for peer in peers:
            target = TARGET if metric == "request_throughput" else None
            found.append(figure(f"{row.name}_{name}_{peer}", values[peer], None, better))
            found.append(figure(f"{row.name}_{name}_vs_{peer}", ratios(values[ours], values[peer]), target, better))
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from warmkv.models.tiny import PATH

    parser = argparse.ArgumentParser(prog="aiperf_race", description=__doc__)
    parser.add_argument("--aiperf", type=Path, metavar="COMMAND", required=True, help="aiperf, as it was installed")
    parser.add_argument("--vllm", type=Path, metavar="COMMAND", help="what `peers.sh vllm` has installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="few requests: whether it runs, not how well")
    parser.add_argument("--requests", type=int, default=160, metavar="N", help="of every load (160)")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="of every load and server, in turn (1)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads of a replica (1)")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="of ours, which share the machine (1)")
    parser.add_argument("--compile", action="store_true", help="compile the decode steps of ours, as vLLM does its own")
    parser.add_argument("--model", type=Path, default=PATH, metavar="FOLDER", help="served by both (the shipped one)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
