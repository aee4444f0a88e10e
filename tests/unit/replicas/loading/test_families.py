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
NOT_ROTATED_ON = {
    *("cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "helium"),  # neighbours are pairs, not halves
    "nanochat",  # turns the other way
    *("glm", "glm4", "glm4_moe", "gpt_neox", "persimmon", "phi"),  # a part of each head only
    *("afmoe", "exaone4", "exaone_moe", "flint", "kolibri1"),  # layers without rotation
    "gemma3_text",  # frequencies by layer type
}


def full_layer(family: str) -> Any:
    """Return a tiny model of one layer that attends to everything."""
    if kinds := getattr(CONFIG_MAPPING[family](), "layer_types", None):
        return tiny_model(
            family, num_hidden_layers=1, layer_types=["attention" if "mamba" in kinds else "full_attention"]
        )
    return tiny_model(family, num_hidden_layers=1, sliding_window=None)


def drawn_from(driver: Driver, request: Any) -> torch.Tensor:
    """Return the logits that a request's tokens were drawn from, [new, vocabulary]."""
    seen: list[torch.Tensor] = []
    driver.engine.executor.watch_logits = lambda sequences, logits: seen.append(logits[0].clone())
    driver.run(request)
    driver.finished(request.id)
    return torch.stack(seen)


ALPHA = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
PUBLISHED: list[tuple[str, dict[str, Any]]] = [  # what checkpoints say and the families' defaults do not
    ("hunyuan_v1_dense", {"rope_scaling": ALPHA}),
    ("hunyuan_v1_moe", {"rope_scaling": ALPHA, "num_experts_per_tok": [2, 1, 2], "moe_intermediate_size": [48] * 3}),
    ("internlm3", {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}, "max_position_embeddings": PROMPT + NEW}),
]


@pytest.mark.parametrize(("family", "changed"), [*((family, {}) for family in sorted(supported.SERVED)), *PUBLISHED])
def test_a_served_family_gives_the_logits_of_transformers(family, changed):
    module = tiny_model(family, **changed)
    ids = torch.randint(VOCABULARY, (PROMPT + NEW,), generator=torch.Generator().manual_seed(1)).tolist()
    prompt, new = PROMPT, NEW
    expected = plain_logits(module, ids[: prompt + new - 1], last=new)
    model = prepare(module)
    assert model.fixed_rotation == (family not in NOT_ROTATED_ON)
    assert float(expected.std()) > 1e-3
    driver = Driver(model)
    cold = make_request(ids[:prompt], new=new, name="cold", ignore_eos=True)
    warm = replace(cold, id="warm")
    for request in (cold, warm):
        request = replace(request, resume=tuple(ids[prompt : prompt + new - 1]))
        slack = 2e-5 * float(expected.abs().max())
        torch.testing.assert_close(drawn_from(driver, request), expected, rtol=1e-4, atol=slack)
    assert driver.started("warm").cached_tokens == 40


@pytest.mark.parametrize("family", sorted(supported.SERVED - NOT_ROTATED_ON))
def test_sinks_that_are_rotated_on_give_the_logits_of_the_window_alone(family):
    """Take a model of one layer, whose keys and values tell nothing of tokens before: positions are all there is."""
    sinks, limit = 4, 12
    module = full_layer(family)
    ids = torch.randint(VOCABULARY, (PROMPT + NEW,), generator=torch.Generator().manual_seed(1)).tolist()
    request = make_request(ids[:PROMPT], new=NEW, policy=f"streaming_llm@{limit}", ignore_eos=True)
    seen = drawn_from(Driver(prepare(module)), replace(request, resume=tuple(ids[PROMPT : PROMPT + NEW - 1])))
    for at in range(1, NEW):
        read = ids[:sinks] + ids[: PROMPT + at][sinks - limit :]
        torch.testing.assert_close(seen[at], plain_logits(module, read, last=1)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["hunyuan_v1_dense", "hunyuan_v1_moe"])
def test_keys_that_are_scaled_by_channel_after_their_rotation_are_not_rotated_on(family):
    module = tiny_model(family)
    for layer in module.get_decoder().layers:
        torch.nn.init.uniform_(layer.self_attn.key_layernorm.weight, 0.5, 1.5)
    assert not prepare(module).fixed_rotation


def test_a_probe_of_tokens_without_an_embedding_finds_one_that_has_keys():
    module = tiny_model("llama")
    module.get_input_embeddings().weight.data[:5] = 0
    assert prepare(module).fixed_rotation


@pytest.mark.parametrize("family", sorted(supported.REFUSED.keys() & CONFIG_MAPPING.keys()))
def test_a_refused_family_is_refused_by_name_before_weights_are_loaded(family):
    with pytest.raises(ValueError, match=f"of the family {family} cannot be served: ") as refused:
        check_config(CONFIG_MAPPING[family]())
    assert supported.REFUSED[family] in str(refused.value)


def test_no_family_is_in_both_lists():
    assert not supported.SERVED & supported.REFUSED.keys()
    assert set(CONFIG_MAPPING) >= supported.SERVED
