"""Every served family against transformers' own forward: logits of chunks, of a reused prefix and of decode steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from tests.unit.replicas.conftest import Driver, make_request
from tests.unit.replicas.families import VOCABULARY, tiny_model
from warmkv.replicas.loading import supported
from warmkv.replicas.loading.load import prepare
from warmkv.replicas.loading.self_check import plain_logits
from warmkv.replicas.loading.structure import check_config

PROMPT, NEW = 43, 9


def drawn_from(driver: Driver, request: Any) -> torch.Tensor:
    """Return the logits that a request's tokens were drawn from, [new, vocabulary]."""
    seen: list[torch.Tensor] = []
    driver.engine.executor.watch_logits = lambda sequences, logits: seen.append(logits[0].clone())
    driver.run(request)
    driver.finished(request.id)
    return torch.stack(seen)


@pytest.mark.parametrize("family", sorted(supported.SERVED))
def test_a_served_family_gives_the_logits_of_transformers(family):
    module = tiny_model(family)
    ids = torch.randint(VOCABULARY, (PROMPT + NEW,), generator=torch.Generator().manual_seed(1)).tolist()
    model = prepare(module)
    prompt, new = PROMPT, NEW
    expected = plain_logits(module, ids[: prompt + new - 1], last=new)
    assert float(expected.std()) > 1e-3
    driver = Driver(model)
    cold = make_request(ids[:prompt], new=new, name="cold", ignore_eos=True)
    warm = replace(cold, id="warm")
    for request in (cold, warm):
        request = replace(request, resume=tuple(ids[prompt : prompt + new - 1]))
        slack = 2e-5 * float(expected.abs().max())
        torch.testing.assert_close(drawn_from(driver, request), expected, rtol=1e-4, atol=slack)
    assert driver.started("warm").cached_tokens == 40


@pytest.mark.parametrize("family", sorted(supported.REFUSED.keys() & CONFIG_MAPPING.keys()))
def test_a_refused_family_is_refused_by_name_before_weights_are_loaded(family):
    with pytest.raises(ValueError, match=f"of the family {family} cannot be served: ") as refused:
        check_config(CONFIG_MAPPING[family]())
    assert supported.REFUSED[family] in str(refused.value)


def test_no_family_is_in_both_lists():
    assert not supported.SERVED & supported.REFUSED.keys()
    assert set(CONFIG_MAPPING) >= supported.SERVED
