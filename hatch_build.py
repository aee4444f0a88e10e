"""Compile what replays spend their time in when the wheel is built: `WARMKV_COMPILE=1 hatchling build -t wheel`.

mypyc makes C of the typed Python that `modules` names in pyproject.toml, less what `exclude` names there; nothing is
written twice, and without the variable the wheel is pure Python. An editable install is never compiled: what is edited
would not be what runs.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "WARMKV_COMPILE"


class CompileHook(BuildHookInterface[Any]):
    """Add extension modules to a wheel, beside the Python files that they are made of."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the modules, if asked to. Raises what the compiler of types, or of C, says is wrong."""
        if version == "editable" or os.environ.get(SWITCH, "") in ("", "0"):
            return
        self._made = tempfile.TemporaryDirectory()
        folder = Path(self._made.name)
        files = compiled(Path(self.root), self.config["modules"], self.config["exclude"])
        for library in _compile(Path(self.root), files, folder):
            build_data["force_include"][str(library)] = str(library.relative_to(folder / "lib"))
        build_data["pure_python"], build_data["infer_tag"] = False, True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what the wheel has a copy of."""
        if hasattr(self, "_made"):
            self._made.cleanup()


def compiled(root: Path, modules: list[str], exclude: list[str]) -> list[Path]:
    """Return the files that patterns name, in order; packages' own files, which hardly run, are not among them."""
    named, left_out = ({path for each in patterns for path in root.glob(each)} for patterns in (modules, exclude))
    return sorted(path for path in named - left_out if path.name != "__init__.py")


def _compile(root: Path, files: list[Path], folder: Path) -> list[Path]:
    """Compile modules into `lib/` of a folder; return the libraries there."""
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    os.chdir(root)  # mypy names modules by their paths from here
    # What they import is read for its types; nothing that they do not need has to be installed for that.
    options = [f"--cache-dir={folder / 'cache'}", "--follow-imports=silent", "--ignore-missing-imports"]
    names = [str(path.relative_to(root)) for path in files]
    extensions = mypycify(
        [*options, *names], opt_level="3", debug_level="0", target_dir=str(folder / "c"), group_name="warmkv",
    )  # fmt: skip
    build = build_ext(Distribution({"name": "warmkv", "ext_modules": extensions}))
    build.build_lib, build.build_temp = str(folder / "lib"), str(folder / "temp")
    build.ensure_finalized()
    build.run()
    return sorted((folder / "lib").rglob("*.so")) + sorted((folder / "lib").rglob("*.pyd"))
