"""What a request costs a gateway is measured part by part, from end to end, at a length that takes no time."""

from __future__ import annotations

import json

from benchmarks import request_cost
from benchmarks.request_cost import Parts


def test_a_quick_run_measures_every_part_of_both_turns(tmp_path, monkeypatch):
    from warmkv.platform.gateway.apis import tokens
    from warmkv.platform.gateway.intake import parsing, prompts
    from warmkv.prefixes import breakpoints

    timed = ((parsing, ("parse",)), (prompts, ("render", "tokenize")), (tokens, ("_encode", "block_hashes")))
    for module, names in timed:
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))  # the race times them in place
    monkeypatch.setattr(breakpoints, "plan", breakpoints.plan)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    path = tmp_path / "cost.json"
    assert request_cost.main(["--quick", "--json", str(path)]) == 0
    figures = {each["name"]: each["value"] for each in json.loads(path.read_text())["figures"]}
    parts = ("json", "template", "lookup", "tokens", "hashes", "breakpoints", "routing", "metrics", "log", "rest")
    for state in ("cold", "warm"):
        values = [figures[f"{part}_{state}_1024"] for part in parts]
        assert min(values) > 0
        assert sum(values) < 1.5 * figures[f"whole_{state}_1024"]


def test_a_part_within_another_counts_once(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 6.0])
    monkeypatch.setattr(request_cost.time, "process_time", lambda: next(now))
    parts = Parts()
    inner = parts.of("inner", lambda: None)
    parts.of("outer", inner)()
    assert parts.spent == {"outer": 4e6, "inner": 2e6}
