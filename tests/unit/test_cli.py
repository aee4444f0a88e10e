"""The command as a user types it: help, output that machines can read, exit codes, errors that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from warmkv.cli import app
from warmkv.config import Config
from warmkv.platform.tenants import hash_key


def run(*args: str, input_: str | None = None, environ: dict[str, str] | None = None):
    return CliRunner().invoke(app, list(args), input=input_, env=environ)


@pytest.mark.parametrize(
    "command",
    [
        *(["serve"], ["demo"], ["replay"], ["workload"], ["eval"], ["bench"], ["profile"], ["hash-key"]),
        *(["sweep"], ["compare"], ["tune"]),
        *(["config", "show"], ["dashboards", "publish"], ["packs", "build"], ["packs", "load"]),
        *(["policy", "show"], ["policy", "set"], ["policy", "rollback"], ["policy", "history"]),
    ],
    ids=" ".join,
)
def test_every_command_explains_itself(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_config_show_prints_what_is_in_force_and_can_be_read_back(tmp_path: Path):
    file = tmp_path / "warmkv.yaml"
    file.write_text("engine: {max_slots: 3}\n")
    environ = {"WARMKV_CLUSTER__REPLICAS": "2"}
    shown = run("config", "show", "-c", str(file), "--set", "compression.policy=snapkv@0.2", environ=environ)
    assert shown.exit_code == 0
    config = Config.model_validate(yaml.safe_load(shown.output))
    assert (config.engine.max_slots, config.cluster.replicas) == (3, 2)
    assert config.compression.policy.label == "snapkv@0.2"


def test_config_schema_is_json_with_every_section():
    schema = json.loads(run("config", "schema").output)
    assert set(schema["properties"]) == set(Config.model_fields)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--set", "engine.max_slot=1"], "did you mean 'max_slots'"),
        (["--set", "engine"], "section.key=value"),
        (["-c", "no-such-file.yaml"], "cannot read no-such-file.yaml"),
    ],
)
def test_a_wrong_configuration_ends_with_2_and_the_reason(flags, says):
    result = run("config", "show", *flags)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


def test_hash_key_prints_what_the_configuration_wants():
    result = run("hash-key", "--key", "secret")
    assert result.output.strip() == hash_key("secret")


def test_serve_says_at_once_that_there_is_no_model(tmp_path: Path):
    result = run("serve", "--set", f"model.path={tmp_path}")
    assert result.exit_code == 1
    assert "no config.json" in result.stderr


def test_the_command_starts_without_torch_ray_or_servers():
    code = "import sys, warmkv.cli; print(sorted({'torch', 'ray', 'transformers', 'fastapi'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
