"""The wheel whose replays are compiled (`hatch_build.py`) gives what the Python gives that it is made of."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from hatch_build import compiled

ROOT = Path(__file__).parents[2]
HOOK = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
MODULES = compiled(ROOT, HOOK["custom"]["modules"], HOOK["custom"]["exclude"])
BASES = {"ABC", "Generic", "NamedTuple", "Protocol"}
TESTED = ("tests/unit/simulator", "tests/unit/policies", "tests/unit/prefixes/test_writers.py")
LIVE = ("tests/e2e/test_contract.py", "tests/e2e/test_transfer.py")
NOT_COMPILED = (
    "tests/unit/policies/compression",
    "tests/unit/simulator/test_way_of_a_line.py",
)  # follows Python's lines


def test_each_pattern_names_modules() -> None:
    for pattern in HOOK["custom"]["modules"] + HOOK["custom"]["exclude"]:
        assert list(ROOT.glob(pattern)), pattern


def classes() -> list[tuple[Path, ast.ClassDef]]:
    trees = {path: ast.parse(path.read_text()) for path in MODULES}
    found = [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert len(found) > 40
    return found


def test_no_class_has_a_base_that_is_not_compiled() -> None:
    """Of one that has, mypyc 2 takes the layout for that of a plain object, and writes over what the base keeps."""
    known = BASES | {node.name for _, node in classes()}
    for path, node in classes():
        for base in node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            assert ast.unparse(name) in known, f"{path.name}: {node.name}({ast.unparse(base)})"


def test_no_dataclass_has_a_constant() -> None:
    """Of it mypyc makes a field."""
    for path, node in classes():
        if any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            constants = [ast.unparse(each) for each in node.body if isinstance(each, ast.Assign)]
            assert not constants, f"{path.name}: {node.name}: {constants}"


@pytest.mark.soak(least=0.5)  # compiles for two minutes on one core, and tests for four
def test_what_is_compiled_passes_the_same_tests(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, env={**environment, "WARMKV_COMPILE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "-none-any" not in wheel.name
    zipfile.ZipFile(wheel).extractall(tmp_path / "made")

    # What is tested is the wheel: it comes before the project, and tests before neither.
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "made"), str(ROOT)])
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES]
    imported = f"import importlib\nfor name in {modules}: print(importlib.import_module(name).__file__)"
    done = subprocess.run([sys.executable, "-P", "-c", imported], env=environment, capture_output=True, text=True)
    files = [Path(line) for line in done.stdout.splitlines()]
    assert len(files) == len(modules), done.stderr
    assert all(path.suffix in (".so", ".pyd") and path.is_relative_to(tmp_path) for path in files)

    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=append"]
    command += [f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml")]
    pure = [*(str(ROOT / path) for path in TESTED), *(f"--ignore={ROOT / path}" for path in NOT_COMPILED)]
    live = [str(ROOT / path) for path in LIVE]
    # Ray's workers look for modules where their driver was started first: not in the project.
    for tests, folder in ((pure, ROOT), (live, tmp_path)):
        done = subprocess.run([*command, *tests], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
