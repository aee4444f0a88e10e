"""A live run under load, and the replay of its access log: the same hits, evictions and bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


def test_a_replay_gives_what_the_live_run_gave(tmp_path: Path):
    out = tmp_path / "parity.json"
    command = [sys.executable, "-m", "benchmarks.parity", "--rate", "1", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert out.exists(), done.stdout + done.stderr
    figures = {one["name"]: one for one in json.loads(out.read_text())["figures"]}
    assert figures["evictions"]["value"] > 100  # memory was short
    for name in ("requests", "equal_hits", "hit_tokens_error"):
        assert figures[name]["met"], done.stdout
    # Where a look-up and a store come at the same moment they may change places, and with them what is evicted.
    assert figures["evictions_off"]["value"] <= 0.01 * figures["evictions"]["value"], done.stdout
    assert figures["resident_bytes_off"]["value"] <= 0.01 * 2 * 12 * 2**20, done.stdout
    assert figures["equal_slot_bytes"]["value"] == 1
    assert figures["ttft_p50_error"]["value"] is not None  # judged by the benchmark: tests never assert times
