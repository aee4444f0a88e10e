"""Finding culprits by halves, with functions in place of steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.replicas.engine.faults import DeviceLostError
from warmkv.replicas.engine.isolation import isolate

NOBODY = {"relieve": lambda: None, "shed": lambda items, error: items[-1]}


@given(st.integers(1, 40), st.sets(st.integers(0, 39), max_size=4))
def test_just_those_fail_that_a_batch_cannot_have(count, bad):
    computed: list[int] = []
    calls = 0

    def compute(items: Sequence[int]) -> list[int]:
        nonlocal calls
        calls += 1
        if bad & set(items):
            raise ValueError("bad")
        computed.extend(items)
        return [item * item for item in items]

    outcome = isolate(range(count), compute, **NOBODY)
    culprits = bad & set(range(count))
    assert {item for item, _ in outcome.failed} == culprits
    assert dict(outcome.results) == {item: item * item for item in range(count) if item not in bad}
    assert len(computed) == len(set(computed))  # nothing that was computed is computed again
    assert calls <= 2 + 2 * len(culprits) * (count - 1).bit_length()


def test_what_fails_once_is_tried_again():
    tries: list[list[int]] = []

    def compute(items: Sequence[int]) -> Sequence[int]:
        tries.append(list(items))
        if len(tries) == 1:
            raise ValueError("once")
        return items

    assert isolate([7], compute, **NOBODY).results == [(7, 7)]
    assert tries == [[7], [7]]


def test_if_memory_runs_out_it_is_freed_first_and_then_the_batch_grows_smaller():
    told: list[str] = []

    def compute(items: Sequence[int]) -> Sequence[int]:
        told.append(f"compute {len(items)}")
        if len(items) > 2:
            raise RuntimeError("CUDA error: out of memory")
        return items

    def shed(items: Sequence[int], error: Exception) -> int:
        told.append(f"shed {max(items)}")
        return max(items)

    outcome = isolate([4, 1, 3, 2], compute, lambda: told.append("relieve"), shed)
    assert outcome.results == [(1, 1), (2, 2)]
    assert outcome.failed == []
    assert told == [
        *("compute 4", "relieve", "compute 4", "relieve", "shed 4", "compute 3", "relieve", "shed 3", "compute 2")
    ]


def test_a_lost_device_is_not_searched_for_a_culprit():
    calls: list[int] = []

    def compute(items: Sequence[int]) -> Sequence[int]:
        calls.append(1)
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(DeviceLostError):
        isolate(range(8), compute, **NOBODY)
    assert len(calls) == 1


def test_errors_are_not_held_with_the_tensors_of_their_frames():
    def compute(items: Sequence[int]) -> Sequence[int]:
        raise ValueError("bad")

    ((_, error),) = isolate([1], compute, **NOBODY).failed
    assert error.__traceback__ is None
