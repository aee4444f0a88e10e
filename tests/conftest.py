"""What all tests share."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os

import pytest
from hypothesis import settings

from tests.cpu_durations import CpuDurations

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: more threads only wait for each other

settings.register_profile("default", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "show the N tests and fixtures that took most processor time (in one process: without xdist)"
    parser.addoption("--cpu-durations", type=int, default=0, metavar="N", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if shown := config.getoption("cpu_durations"):
        config.pluginmanager.register(CpuDurations(shown), "cpu durations")


def _has_gpu() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


if not _has_gpu():
    # Triton decides when it is first imported, which many packages do, whether it interprets its kernels.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        with contextlib.suppress(ImportError):  # the tests of the kernels are skipped
            importlib.import_module("triton")
