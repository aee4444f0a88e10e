"""The race that aiperf counts, with a program in its place that writes a report."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from benchmarks.aiperf_race import Row, figures_of, profile
from benchmarks.served.load import Server
from warmkv.models.tiny import PATH

ROW = Row(400, 32, 48)
SERVER = Server("ours", "http://127.0.0.1:1", "raced", {}, dict, ())


def report(answered: int, rate: float) -> dict[str, dict[str, float]]:
    return {
        "request_count": {"avg": answered},
        "request_throughput": {"avg": rate},
        "time_to_first_token": {"p50": 100.0},
        "inter_token_latency": {"p50": 8.0},
    }


def program(folder: Path, answered: int) -> Path:
    """Return a program that keeps its arguments and reports so many answers."""
    path = folder / "aiperf"
    path.write_text(
        f"#!{sys.executable}\nimport json, pathlib, sys\n"
        "out = pathlib.Path(sys.argv[-1])\nout.mkdir()\n"
        "(out / 'arguments').write_text(json.dumps(sys.argv[1:]))\n"
        f"(out / 'profile_export_aiperf.json').write_text({json.dumps(json.dumps(report(answered, 5.0)))})\n"
    )
    path.chmod(0o755)
    return path


def test_a_load_is_what_aiperf_is_asked_for(tmp_path):
    found = profile(program(tmp_path, 48), SERVER, PATH, ROW, 3, tmp_path / "out")
    assert found["request_throughput"]["avg"] == 5.0
    arguments = json.loads((tmp_path / "out" / "arguments").read_text())
    asked = dict(itertools.pairwise(arguments))
    wanted = {"--concurrency": "16", "--request-count": "48", "--num-dataset-entries": "48", "--random-seed": "3"}
    wanted |= {"--prompt-input-tokens-mean": "400", "--output-tokens-mean": "32", "--url": SERVER.url}
    assert wanted.items() <= asked.items()


def test_requests_that_failed_end_the_race(tmp_path):
    with pytest.raises(RuntimeError, match="ours: aiperf had 47 of 48 requests answered"):
        profile(program(tmp_path, 47), SERVER, PATH, ROW, 0, tmp_path / "out")


def test_ratios_are_taken_run_by_run():
    ours, theirs = [report(48, 10.0), report(48, 22.0)], [report(48, 10.0), report(48, 20.0)]
    found = {figure.name: figure for figure in figures_of(ROW, {"ours": ours, "vllm": theirs})}
    assert found["16x400/32_requests_per_second"].value == 16.0
    ratio = found["16x400/32_requests_per_second_vs_vllm"]
    assert (ratio.value, ratio.met) == (pytest.approx(1.05), False)
    assert found["16x400/32_first_token_seconds"].value == 0.1
