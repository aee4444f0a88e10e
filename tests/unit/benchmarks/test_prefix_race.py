"""The race of the prefix cache runs from end to end at shapes that take no time."""

from __future__ import annotations

import json

import pytest

from benchmarks import prefix_race
from benchmarks.engine.results import Results
from benchmarks.prefix import index


def test_a_quick_run_measures_every_tier_and_the_index(tmp_path):
    path = tmp_path / "race.json"
    code = prefix_race.main(["--quick", "--device", "cpu", "--repeats", "1", "--blocks", "3000", "--json", str(path)])
    assert code == 0
    content = json.loads(path.read_text())
    figures = {each["name"]: each for each in content["figures"]}
    assert {"machine", "versions", "commit", "figures", "settings"} <= content.keys()
    for length in (256, 512):
        for tier, target in (("device", 0.2), ("host", 1.0), ("disk", None)):
            assert figures[f"ttft_{tier}_vs_cold_{length}"]["value"] > 0
            assert figures[f"ttft_{tier}_vs_cold_{length}"]["target"] == target
            assert figures[f"share_reused_{tier}_{length}"]["value"] == pytest.approx(0.9, abs=0.01)
        assert figures[f"share_reused_cold_{length}"]["value"] == 0
    assert figures["index_bytes_per_block"]["value"] > 0
    for order in index.ORDERS:
        assert figures[f"lookups_per_second_{order}"]["value"] > 0


def test_a_full_index_stays_full(monkeypatch):
    cache = index._cache("lru", 512)
    for hashes in index.prompts(2048):
        index._store(cache, hashes)
        index._look_up(cache, hashes)
    assert sum(len(run.keys) for run in cache.tree.recent(0)) == 512


@pytest.mark.parametrize("arguments", [["--lengths", "many"], ["--only", "nothing"]])
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(SystemExit) as ended:
        prefix_race.main(arguments)
    assert ended.value.code == 2


def test_a_missed_target_is_told():
    run = prefix_race.Run("27M", "cpu", "float32", lengths=(8,), races=("tiers",))
    results = Results()
    for tier, seconds in (("cold", 1.0), ("device", 0.1), ("host", 1.5), ("disk", 2.0)):
        results.add(f"ttft_seconds_{tier}_8", seconds)
    met = {each.name: each.met for each in prefix_race._figures(run, results.measured)}
    assert (met["ttft_device_vs_cold_8"], met["ttft_host_vs_cold_8"]) == (True, False)
    assert met["ttft_disk_vs_cold_8"] is None
