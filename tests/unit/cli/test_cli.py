"""The command as a user types it: help, output that machines can read, exit codes, errors that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from warmkv import __version__
from warmkv.cli import app
from warmkv.config import Config
from warmkv.extras import EXTRAS, advice
from warmkv.platform.tenants import hash_key
from warmkv.policy_spec import METHODS


def run(*args: str, input_: str | None = None, environ: dict[str, str] | None = None):
    return CliRunner().invoke(app, list(args), input=input_, env=environ)


@pytest.mark.parametrize(
    "command",
    [
        *(["serve"], ["demo"], ["replay"], ["workload"], ["eval"], ["bench"], ["profile"], ["hash-key"]),
        *(["sweep"], ["compare"], ["tune"], ["doctor"]),
        *(["config", "show"], ["dashboards", "publish"], ["packs", "build"], ["packs", "load"], ["packs", "show"]),
        *(["policy", "show"], ["policy", "set"], ["policy", "rollback"], ["policy", "history"], ["policy", "methods"]),
    ],
    ids=" ".join,
)
def test_every_command_explains_itself(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def commands(group=None, prefix=""):
    for name, one in (group or typer.main.get_command(app)).commands.items():
        if hasattr(one, "commands"):
            yield from commands(one, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", one


@pytest.mark.parametrize(("option", "least"), [("json_file", 18), ("set_", 15), ("format", 4), ("gpu", 3)])
def test_an_option_that_commands_share_is_the_same_everywhere(option, least):
    shared = {
        name: (tuple(parameter.opts), parameter.help, parameter.metavar)
        for name, one in commands()
        for parameter in one.params
        if parameter.name == option and name != "workload"  # its --format is what it writes
    }
    assert len(shared) >= least
    assert len(set(shared.values())) == 1, shared


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


def test_policy_methods_lists_what_is_installed():
    assert "smallest set that recovers" in run("policy", "methods").output
    listed = json.loads(run("policy", "methods", "--json", "-").output)
    assert listed.keys() == METHODS.keys()
    assert listed["snapkv"]["knobs"] == {"window": "32", "kernel": "5", "pooling": "avg"}


def test_hash_key_prints_what_the_configuration_wants():
    result = run("hash-key", "--key", "secret")
    assert result.output.strip() == hash_key("secret")


@pytest.mark.parametrize(
    ("key", "says"), [("", "the key is empty"), (" ", "the key is empty"), ("schlüssel", "beyond ASCII")]
)
def test_a_key_that_no_client_can_send_is_not_hashed(key, says):
    """Refuse what `--key "$KEY"` gives where the variable is not set, and what never matches a header."""
    result = run("hash-key", "--key", key)
    assert result.exit_code == 2
    assert says in result.output
    assert hash_key(key) not in result.output


def test_serve_says_at_once_that_there_is_no_model(tmp_path: Path):
    result = run("serve", "--set", f"model.path={tmp_path}")
    assert result.exit_code == 1
    assert "no config.json" in result.stderr


def test_serve_says_at_once_what_can_be_no_model():
    """Without starting Ray, which would take a while and is not needed to know."""
    result = run("serve", "no/such/folder")
    assert result.exit_code == 1
    assert "no/such/folder is neither a folder nor a hub name (model.path)" in result.stderr


def test_the_command_starts_without_torch_ray_or_servers():
    code = "import sys, warmkv.cli; print(sorted({'torch', 'ray', 'transformers', 'fastapi'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_and_the_module_say_the_same():
    ran = subprocess.run([sys.executable, "-m", "warmkv", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == run("--version").output == f"warmkv {__version__}\n"


def test_a_package_that_is_missing_is_named_with_its_extra():
    without_ray = "import sys; sys.modules['ray'] = None; sys.argv = ['warmkv', 'serve', '--port', '0']; "
    ran = subprocess.run(
        [sys.executable, "-c", f"{without_ray}from warmkv.cli import main; main()"], capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert ran.stderr == "serve: ray is not installed; this needs: pip install 'warmkv[serve]'\n"
    assert advice("numpy") is None


def test_every_extra_is_one_of_the_packages():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert EXTRAS.keys() == project["project"]["optional-dependencies"].keys() - {"dev"}


@pytest.fixture
def served(monkeypatch):
    """Configurations that `warmkv serve` was to start with."""
    configs: list[Config] = []
    monkeypatch.setattr("warmkv.platform.serving.serve_until_stopped", lambda config, *_: configs.append(config))
    return configs


def test_options_of_serve_are_settings_and_win_over_set(served, tmp_path: Path):
    (tmp_path / "key").write_text("secret key\n")
    flags = ["--host", "::1", "--port", "0", "--replicas", "3", "--policy", "snapkv@0.2", "--set", "gateway.port=9"]
    result = run("serve", "some/model", *flags, "--api-key-file", str(tmp_path / "key"))
    assert result.exit_code == 0, result.output
    (config,) = served
    gateway = config.gateway
    assert (config.model.path, gateway.host, gateway.port, config.cluster.replicas) == ("some/model", "::1", 0, 3)
    assert config.compression.policy.label == "snapkv@0.2"
    assert [tenant.key_sha256 for tenant in gateway.tenants] == [hash_key("secret key")]


@pytest.mark.parametrize(
    ("content", "says"), [(None, "No such file"), ("\n", "is empty"), ("schlüssel\n", "beyond ASCII")]
)
def test_a_key_file_without_a_key_is_refused(served, tmp_path: Path, content, says):
    if content is not None:
        (tmp_path / "key").write_text(content)
    result = run("serve", "--api-key-file", str(tmp_path / "key"))
    assert result.exit_code == 2
    assert says in result.output
    assert not served
