"""The engine's race runs from end to end at shapes that take no time, and keeps the contract of all races."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import engine_race, report
from benchmarks.engine import decode, generate, prompts, results
from benchmarks.engine.arena import Arena
from benchmarks.engine.generate import Generate, GenerateStatic
from benchmarks.engine.paged import ContinuousBatching
from benchmarks.engine.setting import ON_CPU, ON_CUDA, build, fitted, quick
from benchmarks.engine.warm import Warm
from warmkv.replicas.loading.packed_weights import PackedLinear

KEYS = {"name", "value", "spread", "target", "direction", "met"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a quick run writes."""
    path = tmp_path_factory.mktemp("race") / "made" / "race.json"
    code = engine_race.main(["--quick", "--device", "cpu", "--repeats", "1", "--json", str(path)])
    assert code == 0
    assert gc.get_freeze_count() == 0, "whoever counts frozen objects afterwards walks through all of them"
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_a_quick_run_measures_every_figure_of_the_table(written: dict[str, Any]) -> None:
    figures = {each["name"]: each for each in written["figures"]}
    for name, aim in results.AIMS.items():
        if aim.race == "vllm":  # raced only where its command is given
            continue
        assert figures[name]["value"] > 0, written["notes"]
        assert figures[name]["target"] == aim.on_cpu
    assert figures["same_tokens_full_as_generate"]["value"] == 1.0
    assert not any("failed" in note or "broke off" in note for note in written["notes"])


def test_the_document_keeps_the_contract(written: dict[str, Any]) -> None:
    assert {"machine", "versions", "commit", "figures"} <= written.keys()
    assert written["machine"]["cores"] >= 1
    assert written["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    for each in written["figures"]:
        assert each.keys() == KEYS
        assert each["direction"] in ("higher", "lower")
        assert (each["met"] is None) == (each["target"] is None)
        assert each["spread"] == 0  # one repeat


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(quick(ON_CPU))


def test_all_contestants_draw_the_same_tokens_from_the_same_contexts(arena: Arena) -> None:
    models, contexts, new = arena.models, arena.contexts, arena.setting.new_tokens
    contestants = [
        Generate(models, contexts, new),
        GenerateStatic(models, contexts, new, compiled=False),
        *(ContinuousBatching(models, contexts, new, at_once) for at_once in (None, 1)),
        Warm(models, contexts, arena.setting, "full", "full", arena.engine),
    ]
    drawn = [contestant.run(2, 5).tokens for contestant in contestants]
    assert all(tokens == drawn[0] for tokens in drawn)
    assert drawn[0][0] != drawn[0][1]  # the contexts are not alike


def test_a_compressed_context_draws_other_tokens(arena: Arena) -> None:
    policies = ("full", f"snapkv@{arena.setting.budget}")
    full, kept = (
        Warm(arena.models, arena.contexts, arena.setting, policy, policy, arena.engine) for policy in policies
    )
    assert full.run(2, 5).tokens != kept.run(2, 5).tokens
    assert 0 < kept.kv_bytes < full.kv_bytes


def test_both_models_have_the_same_weights(arena: Arena) -> None:
    mine, theirs = arena.models.warm.module, dict(arena.models.peer.named_parameters())
    assert all(theirs[name] is parameter for name, parameter in mine.named_parameters())
    packed = {name: layer for name, layer in mine.named_modules() if isinstance(layer, PackedLinear)}
    assert {*theirs} == {*dict(mine.named_parameters()), *(f"{name}.weight" for name in packed)} - {"lm_head.weight"}
    for name, layer in packed.items():
        weight = arena.models.peer.get_submodule(name).weight
        x = torch.randn(3, layer.in_features)
        torch.testing.assert_close(layer(x), x @ weight.T)


def test_weights_that_a_step_reads(arena: Arena) -> None:
    total = sum(parameter.nbytes for parameter in arena.models.peer.parameters())
    assert arena.models.weight_bytes == total  # tied: the embedding is the output layer


def test_a_step_is_timed_after_the_warm_up() -> None:
    assert generate.step_seconds([0.0, 50.0, 60.0, 62.0, 64.0]) == 2.0
    assert generate.step_seconds([0.0, 1.0, 4.0]) == 3.0


def test_a_figure_is_the_median_with_its_range() -> None:
    assert report.figure("a", [3.0, 1.0, 2.0], 2.0, "higher") == report.Figure("a", 2.0, 2.0, 2.0, "higher", True)
    assert report.figure("a", [3.0], 2.0, "lower").met is False
    assert report.figure("a", [3.0], None, "lower").met is None


def test_what_could_not_be_measured_is_a_miss() -> None:
    assert report.figure("a", [], 2.0, "lower") == report.Figure("a", None, None, 2.0, "lower", False)
    assert report.figure("a", [float("nan")], 2.0, "lower").value is None


def test_ratios_are_taken_pair_by_pair() -> None:
    assert report.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    assert report.ratios([2.0, 9.0], [1.0]) == [2.0]  # a peer that failed in the second repeat


def test_the_fastest_peer_is_found_in_every_repeat() -> None:
    measured = results.Results()
    for name, values in {
        "warmkv_full": [4.0, 4.0],
        "generate_dynamic": [1.0, 8.0],
        "continuous_batching": [2.0, 2.0],
    }.items():
        for value in values:
            measured.add(f"tokens_per_second_{name}", value)
    (figure,) = measured.figures("cpu", ["decode"], ["decode_full_vs_fastest_peer"])[:1]
    assert (figure.value, figure.spread, figure.met) == (1.25, 1.5, True)


def test_a_missed_target_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_race, "_setting", lambda *_: replace(quick(ON_CPU), quick=False))
    assert engine_race.main(["--only", "memory_snapkv"]) == 1  # of so short a context a third is kept


def test_a_race_that_breaks_off_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(arena: Arena) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(prompts, "first_tokens", fail)
    path = tmp_path / "race.json"
    assert engine_race.main(["--quick", "--device", "cpu", "--only", "ttft,memory", "--json", str(path)]) == 1
    content = json.loads(path.read_text())
    values = {each["name"]: each["value"] for each in content["figures"]}
    assert values["ttft_warm"] is None
    assert values["memory_snapkv"] > 0
    assert any("ttft broke off" in note for note in content["notes"])


def test_a_name_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        engine_race.main(["--quick", "--only", "speed"])
    assert refused.value.code == 2
    assert "there is no such race or figure, but bandwidth" in capsys.readouterr().err


def test_the_gpu_run_has_the_targets_of_its_column() -> None:
    measured = results.Results()
    found = {each.name: each.target for each in measured.figures("cuda", list(engine_race.WEIGHTS), [])}
    assert found["decode_snapkv_vs_generate"] == 8.0
    assert found["bandwidth_full_batch"] == 0.70
    assert (ON_CUDA.sequences, ON_CUDA.shape, ON_CUDA.dtype) == (32, "8B", "bfloat16")


def test_the_cpu_model_has_the_size_that_is_asked_for() -> None:
    models = build(ON_CPU)
    assert 20e6 < sum(parameter.numel() for parameter in models.peer.parameters()) < 50e6


def test_no_more_sequences_than_the_memory_has_room_for() -> None:
    token = 131_072  # bytes of an 8B
    assert fitted(ON_CUDA, token, 1 << 40) == ON_CUDA
    assert fitted(ON_CUDA, token, 64 << 30).sequences == 25  # of 32 with 16,512 tokens
    assert fitted(ON_CUDA, token, 1 << 20).sequences == 1


def test_a_batch_that_does_not_fit_takes_no_other_figure_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, run = Arena(replace(quick(ON_CPU), repeats=1)), Warm.run

    def limited(contestant: Warm, sequences: int, steps: int) -> generate.Run:
        if sequences > 1 and contestant.policy.name == "full":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(contestant, sequences, steps)

    monkeypatch.setattr(Warm, "run", limited)
    decode.bandwidth(arena)
    measured = {name for name in arena.results.measured if name.startswith("bandwidth")}
    assert measured == {"bandwidth_snapkv_alone", "bandwidth_full_alone", "bandwidth_snapkv_batch"}
    assert any("warmkv_full failed: OutOfMemoryError" in note for note in arena.results.notes)
