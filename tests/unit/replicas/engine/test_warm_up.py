"""What a start compiles: all kernels that any request or mixture of them calls, within a limit of seconds."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.unit.replicas.conftest import Driver
from warmkv.policy_spec import STORAGES
from warmkv.replicas.engine.warm_up import compile_kernels
from warmkv.replicas.loading.self_check import check_engine
from warmkv.replicas.slots import kernels
from warmkv.replicas.slots.row_tables import RowBatch

READABLE = [name for name, storage in STORAGES.items() if storage.kernel]

COUNTS = """
import random

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class NoDriver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


driver.set_active(NoDriver())
asked = set()


def only_ask(self, *args, grid, warmup, **given):
    '''Stand in for a launch: note what Triton would compile by, as `JITFunction.run` does.'''
    *_, binder = self.device_caches[0]
    _, specialization, options = binder(*args, **given)
    asked.add((self.fn.__name__, repr(specialization), repr(sorted(options.items()))))


JITFunction.run = only_ask

from tests.unit.replicas.conftest import Driver, make_request, random_model
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.policies.compression import triton_support
from warmkv.replicas.loading.load import prepare
from warmkv.replicas.slots import kernels, row_tables

triton_support.is_available = kernels.is_available = lambda device: True
from warmkv.policies.compression import prefill_state

prefill_state.is_available = kernels.is_available
attend = kernels.attend


def to_zeros(*given):
    attend(*given)
    given[7].zero_()  # what no kernel has written


kernels.attend = to_zeros
chance = random.Random(0)
POLICIES = (
    "full h2o@20 rocketkv@20:window=4 streaming_llm@20 fastgen adakv@24:window=6 "
    "full+fp8 tova@20+fp8 h2o@20+int4 streaming_llm@20+turbo3 h2o@20+turbo4 full+kivi4 h2o@90+kivi4"
).split()
for family, windows in (("llama", False), ("mistral-windowed", True)):
    model = random_model(family.split("-")[0])
    if windows:
        model.config.sliding_window = 40
    loaded = prepare(model)
    started = Driver(loaded, prefix_cache={"block_size": 16}, step_tokens=256, max_slots=8)
    asked.clear()
    started.engine.warm_up()
    warm = set(asked)
    for at, length in enumerate((30, 150, 90)):
        row_tables.SPLIT_ENTRIES = chance.choice([16, 256])
        mixed = chance.sample(POLICIES, 5) if at else POLICIES[:1]
        started.run(
            *(
                make_request(prompt(length + i, seed=i), new=3, policy=policy, name=f"{at}.{i}", block=16)
                for i, policy in enumerate(mixed)
            )
        )
    for policy in POLICIES:
        started.run(make_request(prompt(100), new=2, policy=policy, name=policy, block=16))
    names = [name for name, *_ in asked]
    print(family, len(warm), len(asked), *sorted(f"{name}:{names.count(name)}" for name in set(names)))
    late = [each for each in asked - warm]
    assert not late, late
"""


@pytest.mark.soak
def test_after_a_start_no_request_compiles_a_kernel():
    """By what Triton compiles by, for a GPU that is not there: alone, mixed, with windows, in pages, in splits."""
    ran = subprocess.run(
        [sys.executable, "-c", COUNTS],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    first, second = (line.split() for line in ran.stdout.splitlines())
    assert 30 < int(first[1]) < int(second[1]) < 120, "a variant takes a second or two"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[RowBatch]:
    """Let kernels be there, and note the batches that they are launched with."""
    launches = list[RowBatch]()
    monkeypatch.setattr(kernels, "supports", lambda storage, *_: storage.kernel is not None)
    monkeypatch.setattr(kernels, "attend", lambda batch, *_: launches.append(batch))
    return launches


def warm(driver: Driver, seconds: float, first: Any = "kivi4", clock: Any = lambda: 0.0) -> list[str]:
    said, engine = list[str](), driver.engine
    forward = engine.executor.forward
    compile_kernels(engine.model, engine.pool, forward, engine.scheduler.room, seconds, first, said.append, clock)
    return said


def test_every_storage_is_compiled_the_configured_one_behind_the_models_and_no_slot_is_left(driver, launched):
    started = driver()
    said = warm(started, 60.0)
    assert list(dict.fromkeys(batch.storage.name for batch in launched))[:2] == ["model", "kivi4"]
    assert {batch.storage.name for batch in launched} == set(READABLE)
    assert len(said) == len(launched)
    assert said[0] == "compiling attention kernels of model, 1 of 8"
    started.engine.pool.give_back()
    assert started.engine.pool.allocated_bytes == 0
    assert not started.engine.pool.slots


def test_a_start_ends_when_its_seconds_are_over(driver, launched, caplog):
    caplog.set_level(logging.WARNING)
    assert warm(driver(), 0.0) == []
    now = itertools.count()
    assert len(warm(driver(), 5.0, clock=lambda: float(next(now)))) == len(launched) == 4
    assert "engine.compile_seconds are over" in caplog.text


def test_where_there_is_no_room_for_a_slot_a_start_goes_on(driver, launched, caplog):
    started = driver(kv_bytes=1000)
    assert warm(started, 60.0) == []
    assert "there is no room for a slot" in caplog.text


def test_nothing_is_compiled_where_no_kernel_attends(driver):
    assert warm(driver(), 60.0) == []


def test_what_a_start_computes_is_not_counted(driver):
    started = driver()
    started.engine.warm_up()
    check_engine(started.engine)
    started.engine.faults.failed("memory", "beside a warm-up")
    assert started.engine.stats().compressed
    started.engine.start()
    started.engine.stop()
    stats = started.engine.stats()
    assert (stats.compressed, stats.failures) == ({}, {"request": 0, "memory": 0, "device": 0})
