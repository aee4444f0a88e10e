"""Tell a model's weights from others under its name: on a CPU, too, where products have packed theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.replicas.conftest import random_model
from warmkv.evaluation import run
from warmkv.replicas.block_store import Identity
from warmkv.replicas.loading import packed_weights
from warmkv.replicas.loading.load import prepare


def changed(name: str) -> Any:
    """Return the random model with one of its weights drawn anew."""
    module = random_model("llama")
    torch.nn.init.normal_(module.get_parameter(name))
    return module


@pytest.mark.parametrize("least", [1, packed_weights.LEAST_WEIGHTS])
def test_any_other_weight_is_another_identity(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    monkeypatch.setattr(packed_weights, "LEAST_WEIGHTS", least)
    models = [prepare(random_model("llama")), prepare(random_model("llama"))]
    models += [prepare(changed(name)) for name, _ in random_model("llama").named_parameters()]
    for fingerprints in ([Identity.of(model, 16).weights for model in models], [*map(run.fingerprint, models)]):
        assert fingerprints[0] == fingerprints[1]
        assert len(set(fingerprints)) == len(fingerprints) - 1


def test_packing_does_not_change_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "LEAST_WEIGHTS", 1)
    packed, plain = (prepare(random_model("llama"), packed=packed) for packed in (True, False))
    assert Identity.of(packed, 16) == Identity.of(plain, 16)


def test_a_rotation_or_a_buffer_that_differs_is_another_identity() -> None:
    turned, module = random_model("llama"), random_model("llama")
    turned.get_decoder().rotary_emb.inv_freq.mul_(0.5)
    module.get_decoder().layers[1].mlp.down_proj.register_buffer("scales", torch.ones(8))  # as quantised layers have
    assert len({Identity.of(prepare(one), 16).weights for one in (random_model("llama"), turned, module)}) == 3
