"""Failures of requests, of memory and of the device: what ends, what goes on, and when the engine gives up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.engine.test_engine import prompt
from warmkv.replicas.engine.faults import FAILURES_IN_A_ROW, FailureCounts, is_out_of_memory, is_sticky
from warmkv.replicas.engine.inbox import ClosedError
from warmkv.replicas.protocol import Failed, Finished
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.piece import Piece

STICKY = "CUDA error: an illegal memory access was encountered"


class CodedError(RuntimeError):
    """As torch.AcceleratorError is."""

    def __init__(self, code: int) -> None:
        super().__init__("CUDA error")
        self.error_code = code


def caused(error: Exception) -> Exception:
    outer = ValueError("a kernel could not be started")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "sticky", "memory"),
    [
        (RuntimeError(STICKY), True, False),
        (RuntimeError("CUDA error: device-side assert triggered"), True, False),
        (RuntimeError("CUDA error: unspecified launch failure"), True, False),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True, False),
        (CodedError(700), True, False),
        (CodedError(719), True, False),
        (caused(CodedError(710)), True, False),
        (CodedError(1), False, False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False, True),
        (RuntimeError("CUDA error: out of memory"), False, True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: not enough memory"), False, True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), False, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False, True),
        (MemoryError(), False, True),
        (caused(MemoryError()), False, True),
        (ValueError("the request is out of memory lane"), False, False),
        (RuntimeError("shapes do not match"), False, False),
    ],
)
def test_errors_are_told_apart(error, sticky, memory):
    assert (is_sticky(error), is_out_of_memory(error)) == (sticky, memory)


def test_one_prompt_is_one_failure_in_a_row_however_often_it_comes():
    faults = FailureCounts()
    for _ in range(50):
        faults.failed("request", "the same")
    assert not faults.lost
    for number in range(FAILURES_IN_A_ROW - 1):
        assert not faults.lost
        faults.failed("memory" if number % 2 else "request", number)
    assert faults.lost
    faults.succeeded()
    assert not faults.lost
    for _ in range(FAILURES_IN_A_ROW):
        assert not faults.lost
        faults.failed("device", "the same")
        faults.device_failed()
    assert faults.lost


def breaking(
    driver: Driver, error: Callable[[], Exception], hits: Callable[[Any, Any], bool] = lambda ids, state: True
) -> Driver:
    """Return the model raises where `hits` says so of its tokens and the state of the step."""
    engine, forward = driver.engine, driver.engine.executor.forward

    def failing(ids: Any, positions: Any, state: Any, *given: Any) -> Any:
        if hits(ids, state):
            raise error()
        return forward(ids, positions, state, *given)

    engine.executor.forward = failing  # type: ignore[assignment]
    return driver


def decodes(ids: Any, state: Any) -> bool:
    """Return sequences decode in this pass, by themselves or beside prompts."""
    return isinstance(state, DecodeState) or getattr(state, "state", None) is not None


def faults_of(driver: Driver) -> list[str]:
    return [told[-1].fault if isinstance(told[-1], Failed) else "" for told in driver.told.values()]


def test_a_device_on_which_every_prompt_fails_ends_the_engine(driver):
    """Failing fast, it would draw all requests of its service, with its health in order."""
    lost = breaking(driver(), lambda: RuntimeError("the device gives nonsense"))
    lost.submit(*(make_request(prompt(9, seed=number), name=str(number)) for number in range(30)))
    lost.engine.run()  # returns by itself
    assert set(faults_of(lost)) == {"replica"}  # all are sent to others
    failures = lost.engine.stats().failures
    assert (failures["request"], failures["memory"]) == (0, 0)
    assert FAILURES_IN_A_ROW <= failures["device"] <= 2 * FAILURES_IN_A_ROW  # two prompts in a pass


def test_a_device_on_which_every_decode_step_fails_ends_the_engine(driver):
    lost = breaking(driver(max_slots=2), lambda: RuntimeError("nonsense"), decodes)
    lost.submit(*(make_request(prompt(9, seed=number), name=str(number)) for number in range(30)))
    lost.engine.run()
    assert set(faults_of(lost)) == {"replica"}
    assert lost.engine.faults.lost


def test_what_a_probe_cannot_see_is_noticed_by_different_prompts_that_fail(driver, monkeypatch):
    lost = driver()

    def failing(*_: Any) -> None:
        raise ValueError("only here")

    monkeypatch.setattr(lost.engine, "_hand_off", failing)
    lost.submit(*(make_request(prompt(9, seed=number), name=str(number)) for number in range(30)))
    lost.engine.run()
    assert faults_of(lost) == ["request"] * FAILURES_IN_A_ROW + ["replica"] * (30 - FAILURES_IN_A_ROW)


def test_one_bad_request_does_not_end_the_engine_however_often_it_is_sent(driver):
    shaky = breaking(driver(), lambda: ValueError("a bad prompt"), lambda ids, state: bool((ids == 96).any()))
    for number in range(3 * FAILURES_IN_A_ROW):
        shaky.run(make_request([1, 2, 96], name=str(number)))
    assert set(faults_of(shaky)) == {"request"}
    assert not shaky.engine.faults.lost
    good = make_request([1, 2, 3], name="good", policy="snapkv@20")
    assert shaky.run(good) == driver().run(good)


def test_a_sticky_error_ends_the_engine_at_once(driver):
    lost = breaking(driver(), lambda: RuntimeError(STICKY))
    release = lost.engine.pool.release

    def dead(slot: Any) -> None:  # neither can anything be freed
        release(slot)
        raise RuntimeError(STICKY)

    lost.engine.pool.release = dead  # type: ignore[method-assign]
    lost.submit(*(make_request(prompt(9, seed=number), name=str(number)) for number in range(4)))
    lost.engine.run()
    assert [told[-1] for told in lost.told.values()] == [Failed("the replica is stopping")] * 4


def test_a_sticky_error_in_a_decode_step_tells_everybody_too(driver):
    lost = driver()
    breaking(lost, lambda: RuntimeError(STICKY), lambda ids, state: len(lost.engine.scheduler.decoding) == 3)
    lost.submit(*(make_request(prompt(9, seed=number), name=str(number), new=20) for number in range(4)))
    lost.engine.run()
    assert faults_of(lost) == ["replica"] * 4


def test_running_out_of_memory_in_a_prompt_ends_it_and_another_replica_may_try(driver):
    tight = driver()
    breaking(tight, lambda: torch.OutOfMemoryError("CUDA out of memory"), lambda ids, state: ids.shape[1] > 10)
    tight.run(make_request(prompt(40), name="large"), make_request(prompt(9), name="small"))
    assert tight.told["large"][-1] == Failed("OutOfMemoryError", "replica")
    assert isinstance(tight.told["small"][-1], Finished)
    assert tight.engine.stats().failures == {"request": 0, "memory": 1, "device": 0}


def test_who_cannot_be_told_ends_alone(driver):
    shaky = driver()
    heard: list[Any] = []

    def deaf(event: Any) -> None:
        heard.append(event)
        if len(heard) > 3:
            raise RuntimeError("Event loop is closed")

    shaky.engine.submit(make_request(prompt(9), name="deaf", new=30), deaf)
    request = make_request(prompt(12), name="hears", new=20)
    assert shaky.run(request) == driver().run(request)
    assert len(heard) == 4
    assert shaky.engine.stats().slots == 0


def test_what_comes_after_the_end_is_refused(driver):
    ended = driver()
    ended.engine.stop()
    ended.engine.run()
    with pytest.raises(ClosedError):
        ended.submit(make_request(prompt(5)))
    with pytest.raises(ClosedError):
        ended.engine.drop_prefixes("a").result(0)
    ended.engine.cancel("nobody")


def test_a_slot_that_cannot_be_set_aside_goes_on(models, monkeypatch):
    driver = Driver(models["llama"], max_slots=2, preempt_seconds=0.0)
    greedy = [make_request(prompt(20, seed=seed), name=f"greedy{seed}", new=30) for seed in range(2)]
    expected = Driver(models["llama"]).run(*greedy)
    driver.submit(*(dataclasses.replace(request, tenant="greedy") for request in greedy))
    while len(driver.engine.scheduler.decoding) < 2:
        driver.engine.step()

    def full(piece: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Piece, "take_out", full)
    driver.run(dataclasses.replace(make_request(prompt(6), name="modest", new=2), tenant="modest"))
    assert driver.told["modest"][-1] == Failed("MemoryError", "replica")
    assert [driver.tokens(request.id) for request in greedy] == expected


def test_stats_are_read_without_touching_what_the_engine_changes(driver, monkeypatch):
    busy = driver()
    busy.submit(make_request(prompt(9), new=9))
    busy.engine.step()

    def changed(*_: Any) -> Any:
        raise RuntimeError("dictionary changed size during iteration")

    for owner, name in ((busy.engine.pool, "allocated_bytes"), (busy.engine.store, "tier_bytes")):
        monkeypatch.setattr(type(owner), name, property(changed))
    assert busy.engine.stats().decoding == 1
