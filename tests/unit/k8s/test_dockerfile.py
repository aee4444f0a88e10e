"""The Dockerfile by rules of our own, hadolint's where it is installed, and its install steps in a clean folder."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.polling import PATIENCE
from tests.unit.k8s.manifests import K8S, OVERLAYS, ROOT, overlay
from warmkv import __version__
from warmkv.config import GatewayConfig

DOCKERFILE, WITH_MODEL = K8S / "Dockerfile", K8S / "model.Dockerfile"
PYTHON = "3.11"
IMAGES = {"demo": "cpu", "single-gpu": "cuda", "production": "cuda", "vllm": "vllm"}
"""The stage that each overlay runs."""


@dataclass
class Stage:
    name: str
    source: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [text for word, text in self.steps if word == instruction]


def stages(text: str) -> dict[str, Stage]:
    """Read a Dockerfile: its stages by name, in their order."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    found: dict[str, Stage] = {}
    arguments: dict[str, str] = {}
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            image, _, name = rest.partition(" AS ")
            for argument, value in arguments.items():
                image = image.replace(f"${{{argument}}}", value)
            current = found[name or str(len(found))] = Stage(name, image)
        elif word == "ARG" and not found:
            name, _, value = rest.partition("=")
            arguments[name] = value
        elif word:
            current.steps.append((word, rest))
    return found


def steps_of(found: dict[str, Stage], name: str) -> list[tuple[str, str]]:
    """Return all steps of a stage, those of the stages that it starts from first."""
    stage = found[name]
    return [*(steps_of(found, stage.source) if stage.source in found else []), *stage.steps]


def faults(text: str) -> Iterator[str]:
    found = stages(text)
    if list(found)[-1] != "cpu":
        yield "without a target the CPU's image is built"
    if not set(found) >= set(IMAGES.values()):
        yield "an image is missing"
        return
    for stage in found.values():
        if stage.source not in found and not re.fullmatch(rf"python:{PYTHON}\.\d+-[\w-]+(@sha256:\w+)?", stage.source):
            yield f"{stage.source} may be another image tomorrow"
        for command in stage.all("RUN"):
            if re.search(r"\bpip install\b", command) and "--no-cache-dir --constraint constraints.txt" not in command:
                yield f"installed without constraints, or with pip's cache: {command}"
            if "apt-get install" in command and not re.search(
                r"apt-get update && .*--no-install-recommends .*rm -rf /var/lib/apt/lists/\*", command
            ):
                yield f"more than is needed, or the package lists stay: {command}"
            if re.search(r"\bsudo\b|curl .*\||wget .*\|", command):
                yield f"runs what it downloads, or as another user: {command}"
        for command in stage.all("COPY"):
            if not command.startswith("--from=") and "." in command.split()[:-1]:
                yield f"copies whatever is there: {command}"
        if stage.all("ADD"):
            yield "ADD unpacks and downloads: use COPY"
        for name in [text.partition("=")[0] for text in stage.all("ARG") + stage.all("ENV")]:
            if re.search("TOKEN|KEY|SECRET|PASSWORD|SALT", name):
                yield f"{name} would stay in the image"
    for image in dict.fromkeys(IMAGES.values()):
        steps = steps_of(found, image)
        last = dict(steps)
        if steps[-1][0] != "USER" or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", steps[-1][1]):
            yield f"{image} does not end as a user with a number, which alone Kubernetes can tell from root"
        if f":{GatewayConfig().port}/healthz" not in last.get("HEALTHCHECK", ""):
            yield f"{image} is not asked how it is"
        if last.get("EXPOSE") != str(GatewayConfig().port):
            yield f"{image} exposes another port"
        if not last.get("CMD", "").startswith("["):
            yield f"{image} starts in a shell, which keeps signals to itself"
        labels = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", last.get("LABEL", "")))
        if labels != {"title", "description", "version", "licenses"}:
            yield f"{image} does not say what it is"


def test_dockerfile_keeps_the_rules() -> None:
    assert list(faults(DOCKERFILE.read_text())) == []


BREAKS: list[Callable[[str], str]] = [
    lambda text: text.replace("-slim-bookworm", "").replace("3.11.13", "latest"),
    lambda text: text.replace("USER 1000:1000", "USER warmkv"),
    lambda text: text.removesuffix("USER 1000:1000\n"),
    lambda text: text.replace("--constraint constraints.txt ", "", 1),
    lambda text: text.replace("--no-install-recommends ", ""),
    lambda text: text.replace("&& rm -rf /var/lib/apt/lists/*", ""),
    lambda text: text.replace("COPY warmkv warmkv", "COPY . ."),
    lambda text: text.replace("COPY warmkv", "ADD warmkv"),
    lambda text: text.replace("HEALTHCHECK", "# HEALTHCHECK").replace("    CMD [", "#   CMD ["),
    lambda text: text.replace("/healthz", "/"),
    lambda text: text.replace("EXPOSE 8400", "EXPOSE 80"),
    lambda text: text.replace('CMD ["warmkv", "serve"]', "CMD warmkv serve"),
    lambda text: text.replace("image.licenses", "image.licence"),
    lambda text: text.replace("ARG TORCH_INDEX=", "ARG HF_TOKEN="),
    lambda text: text.replace("FROM runtime AS cpu", "FROM runtime AS another"),
]


@pytest.mark.parametrize("broken", BREAKS)
def test_what_breaks_a_rule_is_seen(broken: Callable[[str], str]) -> None:
    text = DOCKERFILE.read_text()
    assert broken(text) != text
    assert list(faults(broken(text)))


def test_weights_in_an_image_are_those_of_an_overlay(tmp_path: Path) -> None:
    """The step fetches what the overlay names to where pods look, who then never ask the hub; no token stays."""
    text = WITH_MODEL.read_text()
    (stage,) = stages(text).values()
    assert stage.source == f"warmkv:{__version__}-cuda"
    assert stage.steps[-1] == ("USER", "1000:1000")
    assert stage.all("COPY") == ["warmkv.yaml /etc/warmkv/model.yaml"]
    assert all((ROOT / "k8s/overlays" / name / "warmkv.yaml").exists() for name in OVERLAYS)
    assert not re.search(r"^(ARG|ENV) .*(TOKEN|KEY|SECRET)", text, re.MULTILINE)
    (step,) = stage.all("RUN")
    script = tmp_path / "warmkv"
    script.write_text(f'#!/bin/sh\necho "$* $HF_HUB_CACHE $HF_TOKEN" > {tmp_path}/asked\nmkdir -p "$HF_HUB_CACHE"\n')
    script.chmod(0o755)
    secret = tmp_path / "hub"
    secret.write_text("a token")
    variables = dict(pair.split("=") for pair in stage.all("ENV"))
    assert variables.pop("HF_HUB_OFFLINE") == "1"
    here = step.partition(" ")[2].replace("/opt/models", f"{tmp_path}/models").replace("/run/secrets/hub", str(secret))
    cache = variables["HF_HUB_CACHE"].replace("/opt", str(tmp_path))
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["sh", "-ec", here], env={"PATH": path, "HF_HUB_CACHE": cache}, timeout=PATIENCE)
    assert done.returncode == 0
    asked = (tmp_path / "asked").read_text().strip()
    assert asked == f"k8s fetch --config /etc/warmkv/model.yaml {tmp_path}/models a token"


@pytest.mark.parametrize("file", [DOCKERFILE, WITH_MODEL], ids=lambda path: str(path.name))
def test_hadolint_finds_nothing(file: Path) -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed: the Dockerfile is held to rules of our own only")
    done = subprocess.run(["hadolint", file], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout


def test_overlays_run_the_images_that_are_built() -> None:
    for name in OVERLAYS:
        images = {box["image"] for place, box in overlay(name).containers() if "image" in box and "redis" not in place}
        assert images == {f"warmkv:{__version__}-{IMAGES[name]}"}
    text = DOCKERFILE.read_text()
    assert f"ARG VERSION={__version__}\n" in text
    for image in IMAGES.values():
        assert f"docker build -f k8s/Dockerfile --target {image} -t warmkv:{__version__}-{image} ." in text


def context(folder: Path) -> Path:
    """Copy what `.dockerignore` lets through, as the builder gets it."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert "*" in lines
    for name in kept:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        else:
            shutil.copy(source, folder / name)
    return folder


def test_what_is_copied_is_there_and_nothing_else_is(tmp_path: Path) -> None:
    there = context(tmp_path)
    copied = {
        name
        for stage in stages(DOCKERFILE.read_text()).values()
        for command in stage.all("COPY")
        if not command.startswith("--from=")
        for name in command.split()[:-1]
    }
    assert copied == {path.name for path in there.iterdir()}


def test_what_is_installed_is_pinned() -> None:
    """Every package that `warmkv[serve]` needs here, directly or by others, stands in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    waiting, seen = [("warmkv", "serve")], set[tuple[str, str]]()
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(requirement.name), of) for of in ("", *requirement.extras)]
    assert {name for name, _ in seen} - pinned <= {"warmkv", "setuptools"}  # which comes with the image's Python
    assert "hatchling" in pinned


@pytest.mark.soak(least=0.5)  # downloads torch and installs everything, some two minutes
def test_the_install_steps_run_in_a_clean_folder(tmp_path: Path) -> None:
    """Those of the CPU's image, with its folders below one of ours, on this machine's Python."""
    source = context(tmp_path)
    found = stages(DOCKERFILE.read_text())
    venv, wheels, tools = tmp_path / "opt", tmp_path / "wheels", tmp_path / "tools"
    subprocess.run([sys.executable, "-m", "venv", tools], check=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(stage: str, programs: Path) -> None:
        for command in found[stage].all("RUN"):
            here = command.replace("/opt/warmkv", str(venv)).replace("/wheels", str(wheels))
            path = f"{programs}:{environment['PATH']}"
            subprocess.run(["bash", "-ec", here], cwd=source, env={**environment, "PATH": path}, check=True)

    run("wheel", tools / "bin")
    run("build", tools / "bin")
    run("build-cpu", venv / "bin")
    doctor = [venv / "bin/warmkv", "doctor", "--json", "--set", "gateway.port=0"]
    done = subprocess.run(doctor, cwd=tmp_path, env=environment, capture_output=True)
    failed = [finding for finding in json.loads(done.stdout) if finding["state"] == "failed"]
    assert (done.returncode, failed) == (0, [])
    subprocess.run([venv / "bin/ray", "--version"], check=True)
