"""What a decode step costs its host where kernels attend: launches, uploads and allocations do not grow with the batch.

The kernels themselves are left out: each call of one is counted.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode

from warmkv.policies import budgets
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.selection import Selection
from warmkv.policies.compression.softmax import Softmax
from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import METHODS, STORAGES, PolicySpec
from warmkv.replicas.slots import hand_off, kernels
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.slot import SlotRequest
from warmkv.replicas.slots.slots import SlotPool

pytest.importorskip("triton", reason="triton is not installed")
SHAPE = KVShape(layers=3, kv_heads=2, head_dim=16, dtype_bytes=4, q_heads=4)
INV_FREQ = torch.ones(SHAPE.head_dim // 2, dtype=torch.float64)
MOST = 5
"""Launches of a layer: put, attend, put the splits together; rocketkv chooses by two more, h2o counts by one."""
VIEWS = {
    "view", "reshape", "slice", "select", "unbind", "expand", "transpose", "permute", "unsqueeze", "squeeze", "alias",
    "as_strided", "detach", "_unsafe_view", "new_empty", "empty",
}  # fmt: skip


def policies() -> list[PolicySpec]:
    """Return every method with every decode rule and storage that goes with it, at a budget of 70 tokens or none."""
    found = []
    for method in METHODS:
        for rule in ("", "+append", "+ring", "+argmin"):
            for storage in STORAGES:
                for budget in ("@70", ""):
                    text = f"{method}{budget}{rule}" + ("" if storage == "model" else f"+{storage}")
                    try:
                        found.append(PolicySpec.model_validate(text))
                    except ValidationError:
                        continue
                    break
    return sorted({spec.label: spec for spec in found if spec.name != "auto"}.values(), key=lambda spec: spec.label)


class Calls(TorchDispatchMode):
    """Counts what is launched by torch, and by kernels, in whose place it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        self.launched[name] += name not in VIEWS
        return func(*args, **(kwargs or {}))

    def kernel(self, name: str) -> Any:
        def launch(*args: Any, **given: Any) -> None:
            self.launched[name] += 1

        return {Ellipsis: launch}


class Grid(dict[Any, Any]):
    """Launches on any grid."""

    def __missing__(self, grid: Any) -> Any:
        return self[Ellipsis]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # or kernels that are first imported here are interpreted nowhere
    from warmkv.replicas.slots.kernels import launch

    counted = Calls()
    for module, names in (
        ("update", ("put",)),
        ("choose", ("estimate_segments", "choose_entries")),
        ("decode", ("attend_split", "combine", "sum_received")),
    ):
        fakes = SimpleNamespace(**{name: Grid(counted.kernel(name)) for name in names})
        monkeypatch.setattr(launch, module, fakes)
    monkeypatch.setattr(kernels, "is_available", lambda device: True)
    return counted


def filled(pool: SlotPool, spec: PolicySpec, tokens: int, new: int) -> Any:
    """Return a slot that decodes after a prompt of zeros, of which a policy keeps the first tokens."""
    spec = budgets.in_force(spec, tokens, new)
    slot = pool.claim(SlotRequest(spec, tokens, new), 1 << 40)
    assert slot is not None
    keys = torch.zeros(SHAPE.layers, SHAPE.kv_heads, tokens, SHAPE.head_dim)
    if budgets.follows_content(spec, tokens):
        kept = [budgets.kept_tokens(spec, tokens)] * SHAPE.layers
    else:
        kept = list(budgets.layer_budgets(spec, tokens, SHAPE.layers))
    chosen = [Selection(torch.arange(n).repeat(SHAPE.kv_heads, 1), torch.zeros(SHAPE.kv_heads, n)) for n in kept]
    pool.fill(slot, PrefillState(keys, keys, q_heads=SHAPE.q_heads), chosen)
    return slot


def decoding(spec: PolicySpec, lengths: list[int], new: int, page_size: int = 0) -> tuple[SlotPool, list[Any]]:
    pool = SlotPool(SHAPE, torch.float32, torch.device("cpu"), page_size)
    return pool, [filled(pool, spec, tokens, new) for tokens in lengths]


def step(calls: Calls, pool: SlotPool, slots: list[Any]) -> tuple[list[int], int]:
    """Return the launches of each layer and of what is done once, ahead of them."""
    launched = []
    batch = len(slots)
    q, k = torch.zeros(batch, SHAPE.q_heads, 1, SHAPE.head_dim), torch.zeros(batch, SHAPE.kv_heads, 1, SHAPE.head_dim)
    with calls:
        calls.launched.clear()
        state = DecodeState(pool, slots, INV_FREQ)
        state.begin()
        ahead = calls.launched.total()
        for layer in range(SHAPE.layers):
            calls.launched.clear()
            state.attend(layer, q, k, k, Softmax(1.0))
            launched.append(calls.launched.total())
    return launched, ahead


@pytest.mark.parametrize("spec", policies(), ids=lambda spec: spec.label)
def test_launches_uploads_and_workspace_do_not_grow_with_the_batch(calls, spec):
    pool, slots = decoding(spec, [90, 140, 500, 75], new=6)  # in slabs of several sizes
    step(calls, pool, slots)  # lays out the batch
    tables = pool.tables(INV_FREQ)

    def there() -> dict[str, int]:
        held = tables._workspace | {"numbers": tables.numbers, "facts": tables.facts}
        return {name: tensor.data_ptr() for name, tensor in held.items()}

    before = there()
    launched, ahead = step(calls, pool, slots)
    pieces = [piece for slot in slots for piece in slot.pieces]
    storages = [{piece.kind.storage for piece in pieces if layer in piece.layers} for layer in range(SHAPE.layers)]
    assert all(count <= MOST * len(own) for count, own in zip(launched, storages, strict=True))
    assert ahead == 1, "the numbers of a step are uploaded at once"
    assert there() == before


def test_addresses_stay_while_requests_join_and_leave(calls):
    """Once the most that was ever asked for is there, as a CUDA graph needs it."""
    pool = SlotPool(SHAPE, torch.float32, torch.device("cpu"))
    tables, chance = pool.tables(INV_FREQ), random.Random(0)
    specs = [PolicySpec.model_validate(policy) for policy in ("full", "h2o@20", "rocketkv@20:window=4")]
    crowd = [filled(pool, spec, tokens=60, new=1100) for spec in specs for _ in range(8)]
    for at in range(0, len(crowd), 8):  # the most of each kind that there will be
        step(calls, pool, crowd[at : at + 8])
    for slot in crowd:
        pool.release(slot)
    there: list[Any] = []
    seen: list[dict[str, int]] = []
    for _ in range(1000):
        if len(there) < 8 and (not there or chance.random() < 0.3):
            there.append(filled(pool, chance.choice(specs), tokens=60, new=1100))
        elif len(there) > 1 and chance.random() < 0.3:
            pool.release(there.pop(chance.randrange(len(there))))
        step(calls, pool, there)
        seen.append({name: held.data_ptr() for name, held in tables._workspace.items()})
    assert seen[200:] == [seen[200]] * 800
    assert all(len({each.get(name) for each in seen}) <= 6 for name in seen[-1]), "what grows doubles"


def test_one_launch_attends_rows_of_every_method_in_the_models_dtype(calls):
    """Beside each other: full, a ring, argmin and segments."""
    pool = SlotPool(SHAPE, torch.float32, torch.device("cpu"))
    policies = ("full", "streaming_llm@20", "h2o@20", "rocketkv@20:window=4", "pyramidkv@20")
    mixed = [filled(pool, PolicySpec.model_validate(policy), 60 + 20 * at, 6) for at, policy in enumerate(policies)]
    launched, _ = step(calls, pool, mixed)
    assert launched == [MOST] * SHAPE.layers


def test_rows_in_pages_take_as_few_launches_and_no_upload_of_their_own(calls):
    pool, slots = decoding(PolicySpec.model_validate("full"), [90, 140, 500, 75], new=40, page_size=16)
    assert all(slot.paged for slot in slots)
    step(calls, pool, slots)
    steps = [step(calls, pool, slots) for _ in range(32)]
    assert max(max(launched) for launched, _ in steps) <= MOST - 2
    assert {ahead for _, ahead in steps} == {1}, "pages that rows come to are listed by the kernels"


@pytest.mark.parametrize("policy", ["full+kivi4", "streaming_llm@90+kivi2", "h2o@90+kivi4"])
def test_groups_are_packed_in_all_layers_at_once(calls, policy):
    """So the launches of packing do not grow with the layers, nor with how many sequences pack in a step."""
    packing = []
    for lengths in ([200], [200, 200, 200]):
        pool, slots = decoding(PolicySpec.model_validate(policy), lengths, new=80)
        ahead = [step(calls, pool, slots)[1] for _ in range(70)]
        assert sorted(set(ahead))[0] == 1
        assert sum(count > 1 for count in ahead) in (2, 3)  # of 70 steps, each 32 entries are a group
        packing.append(max(ahead))
    assert packing[0] == packing[1]


@pytest.mark.parametrize("policy", ["snapkv@200+kivi4", "h2o@70", "window@70+fp8"])
def test_a_hand_off_fills_layers_that_keep_as_much_by_the_launches_of_one(calls, policy, monkeypatch):
    """But for what is stacked of their selections, one tensor of each."""

    def launched(layers: int, at_once: int = 1 << 26) -> int:
        monkeypatch.setattr(hand_off, "FILLED_AT_ONCE", at_once)
        shape = replace(SHAPE, layers=layers)
        spec = budgets.in_force(PolicySpec.model_validate(policy), 300, 8)
        pool = SlotPool(shape, torch.float32, torch.device("cpu"))
        slot = pool.claim(SlotRequest(spec, 300, 8), 1 << 40)
        assert slot is not None
        keys = torch.zeros(layers, SHAPE.kv_heads, 300, SHAPE.head_dim)
        kept = budgets.kept_tokens(spec, 300)
        chosen = Selection(torch.arange(kept).repeat(SHAPE.kv_heads, 1), torch.zeros(SHAPE.kv_heads, kept))
        before = calls.launched.total()
        with calls:
            pool.fill(slot, PrefillState(keys, keys, q_heads=SHAPE.q_heads), [chosen] * layers)
        return calls.launched.total() - before

    counting = 2  # which entries of a layer's selection are none, and their sum
    assert launched(12) == launched(3) + 9 * counting
    assert launched(12, at_once=1) > launched(12) + 11 * 6
