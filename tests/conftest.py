"""What all tests share."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from tests.cpu_durations import CpuDurations
from tests.interpreted_kernels import replace_language_once_a_launch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: more threads only wait for each other

# The same examples every time, and none is refused because the machine is slow.
settings.register_profile(
    "default", deadline=None, max_examples=20, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")
EXAMPLES = settings.get_profile("default").max_examples
SOAK_EXAMPLES = 100  # of every property, a minute of --soak-minutes
LEAST_SOAK_EXAMPLES = 22  # more than without


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "show the N tests and fixtures that took most processor time (in one process: without xdist)"
    parser.addoption("--cpu-durations", type=int, default=0, metavar="N", help=text)
    text = "write the pictures of docs/ that tests take of pages into a folder"
    parser.addoption("--pictures", metavar="FOLDER", help=text)
    text = "run the tests that are marked `soak` for so long each, and all properties with so many more examples"
    parser.addoption("--soak-minutes", type=float, default=0, metavar="N", help=text)
    text = "with --soak-minutes: run all other tests as well, each once"
    parser.addoption("--all-tests", action="store_true", help=text)
    text = "what computes in the service of the cluster tests: warmkv, or vllm (make test-vllm)"
    parser.addoption("--engine", choices=("warmkv", "vllm"), default="warmkv", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if minutes := config.getoption("soak_minutes"):
        examples = max(LEAST_SOAK_EXAMPLES, round(SOAK_EXAMPLES * minutes))
        settings.register_profile("soak", settings.get_profile("default"), max_examples=examples)
        settings.load_profile("soak")
    if shown := config.getoption("cpu_durations"):
        config.pluginmanager.register(CpuDurations(shown), "cpu durations")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for soaking, or everything else; and what only one kind of engine can do, with another.

    `soak(least=N)` leaves a test out of soaks of fewer minutes. `--all-tests` runs both, which then share collection,
    fixtures and clusters; without what is marked `short`, for a longer variant of the same test does all of that.

    A property is soaked if it gets more examples than without: the same ones again find nothing.
    """
    minutes = config.getoption("soak_minutes")
    soaking = bool(minutes)
    both = soaking and config.getoption("all_tests")
    own = config.getoption("engine") == "warmkv"
    chosen, others = [], []
    for item in items:
        soak = item.get_closest_marker("soak")
        marked, least = soak is not None, soak.kwargs.get("least", 0) if soak else 0
        can = (own or item.get_closest_marker("own_engine") is None) and (not soaking or least <= minutes)
        wanted = item.get_closest_marker("short") is None if both else marked == soaking or (soaking and _soaks(item))
        (chosen if can and wanted else others).append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=others)


def _soaks(item: pytest.Item) -> bool:
    """Tell whether a test is a property with as many examples as the profile of the soak, which are more than usual."""
    test = getattr(item, "obj", None)
    if not is_hypothesis_test(test):
        return False
    own = getattr(test, "_hypothesis_internal_use_settings", None) or settings.default
    return bool(EXAMPLES < own.max_examples == settings.default.max_examples)


@pytest.fixture(scope="session")
def soak_minutes(request: pytest.FixtureRequest) -> float:
    """How long a test that is marked `soak` goes on."""
    minutes: float = request.config.getoption("soak_minutes")
    return minutes


@pytest.fixture(scope="session")
def soaked(soak_minutes: float) -> Callable[..., int]:
    """Scale the size of a test that is marked `soak`: all of it from a minute on, and never less than `least`."""

    def size(whole: int, *, least: int) -> int:
        return min(whole, max(least, round(whole * soak_minutes)))

    return size


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
            replace_language_once_a_launch()
