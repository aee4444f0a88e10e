"""Steps read nothing that was not written for them: rows begin full of numbers that nobody wrote, and are left so."""

from __future__ import annotations

from typing import Any

import torch

from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.engine.test_engine import prompt
from tests.unit.replicas.engine.test_repeated_steps import POLICIES
from warmkv.replicas.slots.row_memory import RowMemory
from warmkv.replicas.slots.slabs import Slab

POISON = 90
"""Far from what is cached, and finite in every type: masked entries enter attention, times zero."""


def test_rows_full_of_what_nobody_wrote_change_no_token(models, monkeypatch):
    """While requests join and leave, and take each other's rows."""
    requests = [
        make_request(prompt(30 + 3 * at, seed=at), new=36 + at % 5, policy=policy, name=f"{at}")
        for at, policy in enumerate(POLICIES * 2)
    ]

    def run() -> list[list[int]]:
        driver = Driver(models["llama"], prefix_cache={"enabled": False}, step_tokens=64, max_slots=5, max_queue=50)
        return driver.run(*requests)

    expected = run()
    allocate, release, poisoned = RowMemory.allocate, Slab.release, list[int]()

    def allocated(*given: Any) -> RowMemory:
        return allocate(*given).map(lambda tensor: torch.full_like(tensor, POISON))

    def released(slab: Slab, rows: list[int]) -> None:
        release(slab, rows)
        poisoned.extend(rows)
        for tensor in slab.memory.tensors():
            tensor[:, rows] = POISON

    monkeypatch.setattr(RowMemory, "allocate", allocated)
    monkeypatch.setattr(Slab, "release", torch.inference_mode()(released))
    assert run() == expected
    assert len(poisoned) >= len(requests)
