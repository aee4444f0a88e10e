"""The race of the simulator runs from end to end on few requests."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import simulator_race
from tests.unit.simulator.published import FOLDER


def test_a_quick_run_measures_what_it_can(tmp_path):
    path = tmp_path / "race.json"
    assert simulator_race.main(["--quick", "--traces", str(tmp_path), "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    figures = {each["name"]: each for each in content["figures"]}
    assert {"machine", "versions", "commit", "figures", "settings"} <= content.keys()
    assert figures["requests_per_second_generated"]["value"] > 0
    assert figures["requests_per_second_generated"]["target"] == 25_000
    assert figures["refused_generated"]["value"] == 0
    assert "requests_per_second_conversation" not in figures
    assert sum("was not run" in note for note in content["notes"]) == 2


def test_the_cluster_race_finds_prefixes(tmp_path):
    if not (FOLDER / simulator_race.CONVERSATION).exists():
        pytest.skip(f"the conversation trace is not at {FOLDER}; WARMKV_TRACES names the folder")
    path = tmp_path / "race.json"
    arguments = ["--quick", "--only", "cluster", "--traces", str(FOLDER), "--json", str(path)]
    assert simulator_race.main(arguments) == 0
    figures = {each["name"]: each for each in json.loads(path.read_text())["figures"]}
    assert figures["hit_rate_tokens_cluster"]["value"] > 0
    assert figures["refused_cluster"]["value"] == 0


def test_the_sweep_runs_in_one_process_and_in_several(tmp_path):
    lines = [
        json.dumps({"timestamp": at, "input_length": 600, "output_length": 3, "hash_ids": [at]}) for at in range(40)
    ]
    (tmp_path / simulator_race.CONVERSATION).write_text("\n".join(lines))
    path = tmp_path / "race.json"
    arguments = ["--quick", "--only", "sweep", "--traces", str(tmp_path), "--json", str(path)]
    assert simulator_race.main(arguments) == 0
    figures = {each["name"]: each for each in json.loads(path.read_text())["figures"]}
    assert figures.keys() == {
        "requests_per_second_sweep",
        "speed_up_per_process_sweep",
        "speed_up_per_process_apart",
        "share_of_processes_apart_sweep",
    }
    assert all(each["value"] > 0 for each in figures.values())


def test_a_peer_is_raced_on_the_same_trace(tmp_path):
    peer = tmp_path / "python"
    peer.write_text(
        f"""#!{sys.executable}
import json, sys
report = sys.argv[sys.argv.index("--report-json") + 1]
engine = json.loads(sys.argv[sys.argv.index("--extra-engine-args") + 1])
count = len(open(sys.argv[-1]).readlines())
assert engine["block_size"] == 64 and engine["num_gpu_blocks"] == 8192, engine
json.dump({{"completed_requests": count, "wall_time_ms": 2000.0}}, open(report, "w"))
"""
    )
    peer.chmod(0o755)
    path = tmp_path / "race.json"
    simulator_race.main(["--quick", "--only", "generated", "--dynosim", str(peer), "--json", str(path)])
    figures = {each["name"]: each["value"] for each in json.loads(path.read_text())["figures"]}
    assert figures["requests_per_second_generated_dynosim"] == 250
    assert figures["times_dynosim_generated"] == figures["requests_per_second_generated"] / 250


def test_wrong_arguments_are_refused():
    with pytest.raises(SystemExit) as ended:
        simulator_race.main(["--only", "nothing"])
    assert ended.value.code == 2
