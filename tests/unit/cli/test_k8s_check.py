"""`warmkv k8s check`: what it reads, what it says, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.unit.platform.kubernetes.good import Overlay
from warmkv.cli import app


def check(*arguments: object, text: str | None = None) -> Result:
    return CliRunner().invoke(app, ["k8s", "check", *map(str, arguments)], input=text)


def test_a_good_file_passes(tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(Overlay().text)
    done = check(file)
    assert done.exit_code == 0, done.output
    assert "5 objects: no errors, no notes" in done.stdout


def test_an_error_is_told_with_its_place_and_cure() -> None:
    broken = Overlay()
    broken.pod["terminationGracePeriodSeconds"] = 10
    done = check("-", text=broken.text)
    assert done.exit_code == 1
    assert "error: a pod is killed after 10 s, and may take 80" in done.stdout
    assert "where: RayService/warmkv: spec.rayClusterConfig.workerGroupSpecs[h100]" in done.stdout
    assert "to do: set it to 80 or more" in done.stdout
    assert "1 error, no notes" in done.stdout


def test_a_note_fails_only_where_that_is_asked_for() -> None:
    broken = Overlay()
    del broken.objects[0]
    assert check("-", text=broken.text).exit_code == 0
    done = check("-", "--strict", "--json", text=broken.text)
    assert done.exit_code == 1
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["level"] == "note"
    assert finding["rule"] == "references"
    assert set(finding) == {"rule", "where", "what", "todo", "level"}


def test_a_model_is_known_by_its_config(tmp_path: Path) -> None:
    broken = Overlay()
    broken.settings["model"]["path"] = "nobody/knows-it"
    shape = {
        "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 28672, "vocab_size": 128256, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    done = check("-", "--model", tmp_path, text=broken.text)
    assert done.exit_code == 1
    assert "does not fit its share of an H100-SXM" in done.stdout
    refused = check("-", "--model", "nobody/knows-it", text=broken.text)
    assert refused.exit_code == 2
    assert "download its config.json" in refused.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is nothing in it"),
        ("a: [", "not YAML"),
        ("a: 1", "has no kind"),
        ("kind: Pod", "no metadata.name"),
        ("kind: Kustomization\nmetadata: {name: a}", "not rendered yet"),
    ],
)
def test_what_is_no_manifest_is_refused(text: str, says: str) -> None:
    done = check("-", text=text)
    assert done.exit_code == 2
    assert says in done.stderr


def test_without_a_renderer_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = check(tmp_path)
    assert done.exit_code == 2
    assert "needs kubectl or kustomize" in done.stderr
    assert "there is no" in check(tmp_path / "absent").stderr


@pytest.mark.parametrize("tool", ["kubectl", "kustomize"])
def test_a_folder_is_rendered_by_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    (tmp_path / "all.yaml").write_text(Overlay().text)
    script = tmp_path / tool
    script.write_text('#!/bin/sh\ncase "$1" in build|kustomize) exec /bin/cat "$2/all.yaml";; esac\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = check(tmp_path)
    assert done.exit_code == 0, done.output
    (tmp_path / "all.yaml").unlink()
    failed = check(tmp_path)
    assert failed.exit_code == 2
    assert f"{tool} " in failed.stderr
