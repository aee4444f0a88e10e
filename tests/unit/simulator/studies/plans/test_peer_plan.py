"""The peer's plan: what it is asked, and what is made of its table, with a command that answers as it does."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from warmkv.gpus import Gpu
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.reports import plan_page
from warmkv.simulator.studies.plans import peer_plan
from warmkv.simulator.studies.plans.peer_plan import Means, PeerPlan, beside, means_of, plan
from warmkv.simulator.studies.plans.sizing import Machine, Search
from warmkv.simulator.studies.sweeps.tune import TuneConstraint
from warmkv.simulator.workload.requests import Requests

H100 = Gpu.model_validate("H100-SXM")
LIMITS = (
    TuneConstraint("ttft_p99", "<", 2.0),
    TuneConstraint("ttft_p50", "<", 1.0),
    TuneConstraint("refused", "<=", 0.0),
)
TABLE = "ttft,tpot,tp,replicas_needed,total_gpus_needed\n1015.3,49.8,1,3,3\n377.7,46.9,2,1,2\n"
MEANS = Means(1000, 100, 250, 2.5)


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a command in the peer's place that notes its arguments and writes a table, or fails."""

    def answers(table: str | None, says: str = "", code: int = 0) -> Path:
        asked = tmp_path / "asked.json"
        script = tmp_path / peer_plan.COMMAND
        write = "" if table is None else "folder = Path(out) / 'one/agg'; folder.mkdir(parents=True)\n"
        write += "" if table is None else f"(folder / 'best_config_topn.csv').write_text({table!r})\n"
        script.write_text(
            f"#!/usr/bin/env python3\nimport json, sys\nfrom pathlib import Path\n"
            f"Path({str(asked)!r}).write_text(json.dumps(sys.argv[1:]))\n"
            f"out = sys.argv[sys.argv.index('--save-dir') + 1]\n{write}print({says!r}, file=sys.stderr)\n"
            f"sys.exit({code})\n"
        )
        script.chmod(0o755)
        return asked

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return answers


def test_it_is_asked_for_the_means_and_the_sharpest_limits(peer: Any, tmp_path: Path) -> None:
    asked = peer(TABLE)
    assert plan(tmp_path, H100, MEANS, LIMITS) == PeerPlan("H100-SXM", "", 2, 2, 0.3777, 0.0469, 2 * 3.0 * 730)
    given = json.loads(asked.read_text())
    assert given[:2] == ["cli", "recommend"]
    options = dict(pairwise(given))
    assert options["--ttft"] == "1000"
    assert "--tpot" not in options
    assert (options["--isl"], options["--osl"], options["--prefix"]) == ("1000", "100", "250")
    assert (options["--target-request-rate"], options["--system"]) == ("2.5", "h100_sxm")
    assert options["--model-path"] == str(tmp_path)


@pytest.mark.parametrize(
    ("table", "says", "code", "refused"),
    [
        (None, "KeyError: no such system", 1, "KeyError: no such system"),
        (None, "", 0, "it found no deployment"),
        ("ttft,tpot\n1,2\n", "", 0, "its table cannot be read: 'total_gpus_needed'"),
        (TABLE, "the generator failed after the search", 1, ""),
    ],
)
def test_what_it_does_not_say_is_said(
    peer: Any, tmp_path: Path, table: str | None, says: str, code: int, refused: str
) -> None:
    peer(table, says, code)
    assert plan(tmp_path, H100, MEANS, LIMITS).refused == refused


def records() -> Requests:
    return Requests(
        [
            RequestRecord(str(n), 100.0 + n, "t", "m", "messages", "full", 64, 100 * (n + 1), 11 * n, ())
            for n in range(3)
        ]
    )


def test_the_means_are_those_of_the_trace() -> None:
    assert means_of(records(), 0.25) == Means(200, 11, 50, 1.5)


def test_as_many_replicas_are_replayed(peer: Any, tmp_path: Path) -> None:
    """Where each is a GPU; what it spreads over several is not."""

    def evaluate(settings: dict[str, Any]) -> dict[str, float | None]:
        late = 8.0 / settings["cluster.replicas"]
        return {"ttft_p99": late, "refused": 0.0, "dollars_month": late, "hit_rate_tokens": 0.5, "quality": 1.0}

    limits = (TuneConstraint("ttft_p99", "<", 1.0),)
    search, one = Search(evaluate, limits), Machine(H100, {"simulator.gpu": "H100"})
    small = Machine(Gpu.model_validate("L4"), {"simulator.gpu": "L4"}, refused="too small")
    sized = search.run([one, small], lambda machine: [])
    peer(TABLE.replace("377.7,46.9,2,1,2\n", ""))
    ((planned, trial),) = beside(search, sized, records(), tmp_path)
    assert trial is not None
    assert (planned.gpus, trial.replicas) == (3, 3)
    said = plan_page.peer_text(planned, trial, limits)
    assert "3 x H100-SXM for $6,570 a month, TTFT 1,015.3 ms" in said
    assert said.endswith("Replayed, 3 here have ttft_p99 2,666.7 ms (limit < 1).")
    peer(TABLE)
    ((planned, trial),) = beside(search, sized, records(), tmp_path)
    assert trial is None
    assert "spreads a replica over 2 GPUs, which is not replayed" in plan_page.peer_text(planned, trial, limits)
    refused = plan_page.peer_text(PeerPlan("L4", "it found no deployment"), None, limits)
    assert refused.endswith("nothing on L4: it found no deployment.")
