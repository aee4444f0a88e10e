"""Refuse models that warmkv would compute wrongly: by configuration before weights are loaded, by a look at them after.

A family that no list names is judged by its structure alone: every decoder layer must attend once, through the
attention interface of transformers, causally, to rotary keys of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from warmkv.policies.slot_sizes import KVShape
from warmkv.replicas.loading import supported
from warmkv.replicas.slots.attention import rotate

PROBE = "warmkv-probe"
MOST_POSITIONS = 1 << 20
"""How far back a layer is asked what it sees, where the model's context is longer."""

TOKENS = 256
"""Of the vocabulary, among which the probe takes one."""

_ATTENTION = ("full_attention", "sliding_attention", "attention", "sparse", "dense")
_RECURRENT = ("linear", "conv", "mamba", "recurrent", "ssm", "gated_delta", "hybrid")


def check_config(config: Any) -> None:
    """Raise ValueError, with the model's family and the reason, if a model's configuration rules it out."""
    text = config.get_text_config()
    for part in (config, text):
        if reason := supported.REFUSED.get(part.model_type):
            raise refusal(part.model_type, reason)
    if reason := _reason(config, text):
        raise refusal(text.model_type, reason)


def is_listed(config: Any) -> bool:
    """Return whether the family of a model is one that the tests compare with transformers."""
    return config.get_text_config().model_type in supported.SERVED


def mixes_experts(config: Any) -> bool:
    """Return whether a model's tokens choose among experts."""
    text = config.get_text_config()
    return any((getattr(text, name, 0) or 0) > 1 for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def refusal(family: str, reason: str) -> ValueError:
    """Build the error that names a family, why it is not served and what to do."""
    return ValueError(f"models of the family {family} cannot be served: {reason}. docs/models.md lists those that can")


def _reason(config: Any, text: Any) -> str | None:
    kinds = [*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())]
    for kind in kinds:
        if any(mark in kind for mark in _RECURRENT):
            return supported.RECURRENT
        if "chunked" in kind:
            return supported.CHUNKED
        if kind not in _ATTENTION:
            return f"it has layers of the type {kind}, which warmkv does not know"
    if getattr(text, "kv_lora_rank", None):
        return supported.LATENT
    if getattr(text, "num_kv_shared_layers", None):
        return supported.SHARED
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "use_bidirectional_attention", None) in (
        True,
        "all",
    ):
        return supported.NOT_CAUSAL
    return None


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """What a decoder layer asks of attention."""

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int  # tokens that it attends to, its own included; 0: all
    softcap: float | None
    sinks: bool  # learned logits in the softmax (gpt-oss)
    rotates_on: bool  # a cached key can be rotated to a later position


class _Probe:
    """Record what layers hand to the attention interface."""

    def __init__(self, inv_freq: Tensor) -> None:
        self.inv_freq = inv_freq
        self.calls: list[tuple[int, LayerTraits]] = []


def _record(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    warmkv: _Probe | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if warmkv is None:
        raise ValueError(supported.NO_KEYWORDS)
    if not isinstance(attention_mask, _Window):
        raise ValueError(supported.OWN_MASK)
    if attention_mask.tokens is None:
        raise ValueError("its layers attend to something else than the newest tokens up to their own")
    traits = LayerTraits(
        query.shape[1],
        key.shape[1],
        key.shape[3],
        value.shape[3],
        attention_mask.tokens,
        softcap,
        s_aux is not None,
        _rotates_on(key, warmkv.inv_freq),
    )
    warmkv.calls.append((module.layer_idx, traits))
    return query.new_zeros(*query.shape[:3], value.shape[3]).transpose(1, 2).contiguous(), None


def _rotates_on(key: Tensor, inv_freq: Tensor) -> bool:
    """Return True if the key at position 1 is the one at position 0, of the same token, rotated on in halves.

    key [1, kv_heads, 2, head_dim]. Other conventions, other frequencies, layers without rotation and what is done to
    keys after it show in single pairs of channels, so each pair is compared, up to the rounding of the type.
    """
    if 2 * len(inv_freq) != key.shape[3]:
        return False
    first, second = key[0].double().unbind(dim=1)
    sizes, off = (
        part.reshape(len(part), 2, -1).square().sum(dim=(0, 1)).sqrt()
        for part in (first, rotate(first, inv_freq) - second)
    )
    return bool(sizes.any()) and bool((off <= max(1e-3, 8 * torch.finfo(key.dtype).eps) * sizes).all())


@dataclass(frozen=True, slots=True)
class _Window:
    """Stands in for the mask of a layer: the newest tokens that it shows, 0 if all; None for any other mask."""

    tokens: int | None


def _mask(mask_function: Callable[[Any, Any, Any, Any], Any], config: Any, **_: Any) -> _Window:
    """Ask a mask what it shows to two queries near the end of the context; within chunks the answers would differ."""
    most = min(int(config.get_text_config().max_position_embeddings), MOST_POSITIONS)
    shown = {_newest(mask_function, most - 1), _newest(mask_function, most - 2)}
    return _Window(shown.pop() if len(shown) == 1 else None)


def _newest(mask: Callable[[Any, Any, Any, Any], Any], last: int) -> int | None:
    """Return how many tokens the query at `last` sees, 0 if all; None unless these are the newest up to itself."""
    zero, keys = torch.zeros((), dtype=torch.long), torch.arange(last + 3)
    seen = torch.as_tensor(mask(zero, zero, torch.tensor(last), keys)).expand(len(keys))
    count = int(seen.sum())
    if not count or not bool(seen[last + 1 - count : last + 1].all()):
        return None
    return 0 if count == last + 1 else count


AttentionInterface.register(PROBE, _record)
AttentionMaskInterface.register(PROBE, _mask)


@torch.inference_mode()
def layer_traits(module: Any, shape: KVShape, inv_freq: Tensor) -> list[LayerTraits]:
    """Run a token at two positions through a causal LM and return what each decoder layer asks of attention.

    The probe attends to nothing, so both positions have the same hidden state in every layer. `inv_freq` [head_dim / 2]
    is the rotation that keys are compared with. Raises ValueError, with family and reason, unless every layer attends
    once, with KV heads as in `shape`. The attention implementation is set back to what it was.
    """
    family, before = module.config.get_text_config().model_type, module.config._attn_implementation
    probe = _Probe(inv_freq)
    module.set_attn_implementation(PROBE)
    if module.config._attn_implementation != PROBE:
        raise refusal(family, supported.OWN_ATTENTION)
    try:
        some = module.get_input_embeddings().weight[:TOKENS]
        token = some.float().norm(dim=-1).argmax()  # not one for padding, whose embedding and keys are 0
        ids = token.expand(1, 2).to(module.device)
        module(input_ids=ids, use_cache=False, logits_to_keep=1, warmkv=probe)
    except Exception as error:
        raise refusal(family, str(error).rstrip(".") or type(error).__name__) from error
    finally:
        module.set_attn_implementation(before)
    return _checked(family, module, shape, probe.calls)


def _checked(family: str, module: Any, shape: KVShape, calls: Iterable[tuple[int, LayerTraits]]) -> list[LayerTraits]:
    by_layer: dict[int, LayerTraits] = {}
    for layer, traits in calls:
        if layer in by_layer:
            raise refusal(family, supported.LOOPED)
        by_layer[layer] = traits
    if missing := sorted(set(range(shape.layers)) - by_layer.keys()):
        raise refusal(family, f"layer {_kind(module, missing[0])} does not attend through transformers' interface")
    if more := sorted(by_layer.keys() - set(range(shape.layers))):
        raise refusal(family, f"it attends in a layer {more[0]} beyond its {shape.layers}")
    for layer, traits in sorted(by_layer.items()):
        if traits.value_dim != traits.head_dim:
            raise refusal(family, f"keys of {traits.head_dim} and values of {traits.value_dim} channels differ")
        if (traits.q_heads, traits.kv_heads, traits.head_dim) != (shape.q_heads, shape.kv_heads, shape.head_dim):
            raise refusal(
                family,
                f"layer {layer}: {traits.q_heads} query and {traits.kv_heads} KV heads of {traits.head_dim} channels"
                f" where {shape.q_heads}, {shape.kv_heads} and {shape.head_dim} were expected of all layers",
            )
    return [by_layer[layer] for layer in range(shape.layers)]


def _kind(module: Any, layer: int) -> str:
    """Name a decoder layer with the modules in it."""
    layers = getattr(module.get_decoder(), "layers", None)
    if layers is None or layer >= len(layers):
        return str(layer)
    return f"{layer} ({', '.join(type(child).__name__ for child in layers[layer].children())})"
