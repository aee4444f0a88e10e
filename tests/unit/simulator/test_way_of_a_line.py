"""docs/architecture.md draws the way of a trace line; the code goes that way and no other."""

import json
from dataclasses import replace

import pytest

from tests.hops import Hop, calls, drawn
from tests.unit.simulator.conversations import config, record
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.cache.layout import Prompt
from warmkv.simulator.cluster.replica import Job
from warmkv.simulator.studies.replays.replay import run
from warmkv.simulator.studies.replays.step_times import choose_cost
from warmkv.simulator.studies.replays.variants import Variant
from warmkv.simulator.traces.columns import Row
from warmkv.simulator.workload.source import Source, read

QUEUED = Hop("policies/fair_queue.py", "FairQueue.push")
LINES = {
    "An access log": replace(record(1.0, [1] * 20, 3, name="a"), api="chat").to_json(),
    "A public trace": json.dumps({"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 3]}),
}
MOST_HANDED_ON = 20  # from the file to the queue of a replica; it was 21 for an access log and 46 for a public trace


def replayed(path):
    settings = config("cluster.replicas=2")
    requests = read(Source(path), settings).requests
    times, _ = choose_cost(requests.records, settings, lambda record: settings.compression.policy)
    run(requests.records, settings, Variant(), times, inputs=requests.inputs)


@pytest.mark.parametrize("name", LINES)
def test_the_way_of_a_line_is_as_drawn(tmp_path, name):
    line, path = LINES[name], tmp_path / "trace"
    path.write_text(line + "\n")
    keys = json.loads(line).keys()

    def carries(value):
        if isinstance(value, str):
            return line in value
        if isinstance(value, bytes):
            return line.encode() in value
        if isinstance(value, list):
            return any(isinstance(each, str) and line in each for each in value)
        return isinstance(value, Row | RequestRecord | Job | Prompt) or (
            isinstance(value, dict) and keys <= value.keys()
        )

    with calls(carries) as handed_on:
        replayed(path)
    assert handed_on.index(QUEUED) + 1 <= MOST_HANDED_ON
    functions = list(dict.fromkeys(handed_on))
    queued = functions.index(QUEUED) + 1
    assert functions[:queued] == drawn(f"#### {name}")
    assert functions[queued:] == drawn("#### In the cluster")
