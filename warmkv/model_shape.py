"""The sizes of a model, from its config.json as Hugging Face writes it: what a step computes and reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from warmkv.faults import UserError
from warmkv.model_families import DEFAULTS, TIED, UNGATED

TINY = {"layers": 6, "kv_heads": 2, "head_dim": 32, "dtype_bytes": 4}
"""Figures that decide the size of the KV cache: those of the model in the package, in float32."""

_REST = ("hidden", "heads", "intermediate", "vocabulary")
"""Figures that the arithmetic of a step needs beside those."""

_LATER = ("tied", "context", "gated", "shared", "dense_layers", "dense_intermediate", "weight_bits")
"""Figures that what was dumped by an earlier version does not have."""

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
_UNTOLD_DTYPE = "bfloat16"
"""Of a config.json without a dtype, as that of gpt-oss: weights are published in it or in another one of its size."""

_UNKNOWN = (
    "kv_lora_rank", "q_lora_rank", "state_size", "lru_width", "interleave_moe_layer_step", "expert_layer_period",
    "hidden_size_per_layer_input", "kv_channels", "num_layers_per_stack",
)  # fmt: skip
"""Keys of architectures whose parameters are not counted here."""

_RECURRENT = ("mamba_", "linear_", "conv_")
"""Beginnings of keys that only models with recurrent layers have."""

_COUNTED = frozenset({"attention", "full_attention", "sliding_attention", "chunked_attention"})
_WITHOUT_KV = frozenset({"linear_attention", "mamba", "conv", "recurrent", "moe", "mlp"})
"""Kinds of layers."""

_METHOD_BITS: dict[Any, float] = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4.25}
"""Bits of a weight by quantisers whose name tells them."""

_OF_THE_WHOLE = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
"""Keys that may stand beside the parts of a multimodal model."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Keys by which families call one and the same number."""

_MOE_EVERY = ("decoder_sparse_step", "moe_layer_interval", "moe_layer_freq")
"""Keys that say in how many layers one is of experts."""


class ModelShapeError(UserError):
    """A file that does not tell the shape of a model; the message says why."""


class ModelShape(BaseModel):
    """Describe a decoder with grouped-query attention and MLPs or experts, as Llama, Mistral, Qwen and Mixtral are.

    A path alone, to a folder or its config.json, stands for what is written there; figures given beside it are taken
    instead, as `dtype_bytes: 2` where the weights are served in another type than they were trained in. Without a path
    the figures of its KV cache are enough, and what is left out of them is that of the model in the package.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path | None = Field(None, description="folder of a model, or its config.json; gives what is not given here")
    layers: int = Field(ge=1)
    hidden: int = Field(0, ge=0, description="width of the residual stream; 0 as the next three: not known")
    heads: int = Field(0, ge=0, description="query heads")
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    intermediate: int = Field(0, ge=0, description="width of an MLP, or of one expert")
    vocabulary: int = Field(0, ge=0)
    dtype_bytes: int = Field(ge=1, description="of weights and KV")
    experts: int = Field(1, ge=1, description="in each layer")
    experts_per_token: int = Field(1, ge=1)
    tied: bool = Field(False, description="the matrix before the logits is that of the embeddings")
    gated: bool = Field(True, description="MLPs have three matrices (gate, up and down), not two")
    shared: int = Field(0, ge=0, description="width of the MLP that every token goes through beside its experts")
    dense_layers: int = Field(0, ge=0, description="that have an MLP instead of experts")
    dense_intermediate: int = Field(0, ge=0, description="width of their MLP")
    weight_bits: float | None = Field(
        None,
        gt=0,
        description="of a weight in the layers of a quantised checkpoint, scales included; null: dtype_bytes",
    )
    context: int | None = Field(None, ge=1, description="most tokens of prompt and answer; null: not known")

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, str | Path):
            value = {"path": value}
        if not isinstance(value, dict) or all(field in value for field in cls.model_fields if field not in _LATER):
            return value  # as dumped: the file is not needed any more
        if value.get("path"):
            return {**figures(Path(value["path"])), **value}
        return value if any(value.get(name) for name in _REST) else {**TINY, **value}

    @model_validator(mode="after")
    def _check(self) -> ModelShape:
        lacking = [name for name in _REST if not getattr(self, name)]
        if 0 < len(lacking) < len(_REST):
            raise ValueError(f"gives a part of {', '.join(_REST)}, but not {', '.join(lacking)}")
        return self

    @property
    def is_whole(self) -> bool:
        """Return True if more than its KV cache is known: a roofline and a memory plan can be made of it."""
        return self.hidden > 0

    @property
    def head_weights(self) -> int:
        """Return the parameters between the last layer and the logits."""
        return self.hidden * self.vocabulary

    @property
    def layer_weights(self) -> int:
        """Return the parameters of all layers, all experts included."""
        return self._weights(self.experts)

    @property
    def active_weights(self) -> int:
        """Return the parameters of all layers that a token is multiplied with."""
        return self._weights(self.experts_per_token)

    @property
    def dequantised(self) -> ModelShape:
        """Return the model with all layers in its dtype."""
        return self.model_copy(update={"weight_bits": None})

    def layer_bytes(self, dtype_bytes: int | None = None) -> int:
        """Return the bytes of all layers: in the dtype, or as they are quantised."""
        return int(self.layer_weights * (self.weight_bits or 8 * (dtype_bytes or self.dtype_bytes)) / 8)

    def _weights(self, experts: int) -> int:
        """Return the parameters of all layers with so many of their experts."""
        matrix = (3 if self.gated else 2) * self.hidden
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        sparse = router + matrix * (experts * self.intermediate + self.shared)
        dense = matrix * self.dense_intermediate
        return self.layers * attention + (self.layers - self.dense_layers) * sparse + self.dense_layers * dense


Source = Path | Mapping[str, Any]
"""A model's folder or its config.json, or what that holds."""


def kv_figures(source: Source) -> dict[str, Any]:
    """Return the figures of a model's KV cache. Raises ModelShapeError."""
    return _taken(source, _kv)


def figures(source: Source) -> dict[str, Any]:
    """Return all figures of a model, as the fields of `ModelShape`. Raises ModelShapeError."""
    return _taken(source, _all)


def vocabulary(source: Source) -> int:
    """Return the tokens that a model knows. Raises ModelShapeError."""
    found: int = _taken(source, lambda config: {"vocabulary": config["vocab_size"]})["vocabulary"]
    return found


def dtype_bytes(source: Source) -> int:
    """Return what a number of a model's weights takes as they are stored. Raises ModelShapeError."""
    found: int = _taken(source, lambda config: {"dtype_bytes": _dtype_bytes(config)})["dtype_bytes"]
    return found


def _taken(source: Source, take: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    if isinstance(source, Path):
        file: Path | str = source / "config.json" if source.is_dir() else source
    else:
        file = f"the configuration of a {source.get('model_type', 'model')}"
    try:
        config = json.loads(Path(file).read_text(encoding="utf-8")) if isinstance(source, Path) else source
        found = take(_text_part(config))
    except OSError as error:
        raise ModelShapeError(f"cannot read {file}: {error.strerror}") from None
    except KeyError as error:
        raise ModelShapeError(f"{file} is no configuration of a model that is known here: it lacks {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelShapeError(f"{file} is no configuration of a model: {error}") from None
    if not all(isinstance(figure, int | float) and figure >= (name not in _LATER) for name, figure in found.items()):
        raise ModelShapeError(f"{file} describes a model without a KV cache")
    return found


def _text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration says of its language model, with defaults of the family that files leave out."""
    text = config.get("text_config", config)
    family = text.get("model_type") or ""
    shared = {key: said for part in (config, text) for key in _OF_THE_WHOLE if (said := part.get(key)) is not None}
    return {"tie_word_embeddings": family in TIED, **DEFAULTS.get(family, {}), **text, **shared}


def _kv(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or config.get("num_kv_heads") or heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):  # Falcon
        kv_heads = 1
    head_dim = config.get("head_dim")
    if rank := config.get("kv_lora_rank"):  # MLA keeps one vector for keys and values, which stands for half of each
        kv_heads, head_dim = 1, -(-(rank + config["qk_rope_head_dim"]) // 2)
    return {
        "layers": _layers_with_kv(config),
        "kv_heads": kv_heads,
        "head_dim": head_dim or config["hidden_size"] // heads,
        "dtype_bytes": _dtype_bytes(config),
    }


def _dtype_bytes(config: Mapping[str, Any]) -> int:
    dtype = config.get("dtype") or config.get("torch_dtype") or _UNTOLD_DTYPE
    if dtype not in _DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[dtype]


def _kinds(config: Mapping[str, Any]) -> Sequence[str]:
    """Return the kind of every layer; empty where a configuration tells none."""
    return config.get("layer_types") or config.get("layers_block_type") or ()


def _layers_with_kv(config: Mapping[str, Any]) -> int:
    """Return the layers that have keys and values of their own: of a hybrid those that attend."""
    if kinds := _kinds(config):
        layers = sum(kind not in _WITHOUT_KV for kind in kinds)
    elif pattern := config.get("hybrid_override_pattern"):  # Nemotron-H
        layers = pattern.count("*")
    elif every := config.get("attn_layer_period"):  # Jamba
        layers = len(range(config.get("attn_layer_offset", 0), config["num_hidden_layers"], every))
    elif chosen := config.get("attn_layer_indices") or config.get("full_attn_idxs"):  # Bamba, LFM2
        layers = len(chosen)
    else:
        layers = config["num_hidden_layers"] // (config.get("full_attention_interval") or 1)  # Qwen3-Next
    return layers - (config.get("num_kv_shared_layers") or 0)


def _foreign(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a configuration has that no counted architecture does."""
    yield from (key for key in _UNKNOWN if config.get(key))
    if kinds := _kinds(config):  # dense Granite hybrids have keys of recurrent layers, and none of these
        yield from (f"a layer of {kind}" for kind in kinds if kind not in _COUNTED)
    else:
        yield from (key for key in config if key.startswith(_RECURRENT) and config[key])
    if _layers_with_kv(config) != config["num_hidden_layers"]:
        yield "a layer without keys and values of its own"


def _all(config: Mapping[str, Any]) -> dict[str, Any]:
    if foreign := next(_foreign(config), ""):
        raise ValueError(f"{foreign} belongs to an architecture that is not counted here; give its figures yourself")
    return {
        **_kv(config),
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        **_mlp(config),
        "vocabulary": config["vocab_size"],
        "tied": bool(config["tie_word_embeddings"]),
        "gated": config.get("model_type") not in UNGATED,
        **({"weight_bits": bits} if (bits := _weight_bits(config.get("quantization_config") or {})) else {}),
        **({"context": context} if (context := config.get("max_position_embeddings")) else {}),
    }


def _mlp(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the figures of MLPs and experts."""
    experts = _number(config, _EXPERTS) or 1
    if experts == 1:
        only = config.get("shared_intermediate_size")  # of Granite's dense hybrids
        return {"intermediate": only or config["intermediate_size"], "experts": 1, "experts_per_token": 1}
    width = _number(config, ("moe_intermediate_size",)) or config["intermediate_size"]
    found = {
        "intermediate": width,
        "experts": experts,
        "experts_per_token": _number(config, _PER_TOKEN) or config["num_experts_per_tok"],
        "shared": _number(config, _SHARED_WIDTH) or width * _number(config, _SHARED),
    }
    if dense := min(_dense_layers(config), config["num_hidden_layers"]):
        found |= {"dense_layers": dense, "dense_intermediate": config["intermediate_size"]}
    return found


def _dense_layers(config: Mapping[str, Any]) -> int:
    """Return the layers that have an MLP instead of experts."""
    if odd := [key for key in _MOE_EVERY if (config.get(key) or 1) != 1]:
        raise ValueError(f"{odd[0]} {config[odd[0]]} is not counted here; give the model's figures yourself")
    if kinds := config.get("mlp_layer_types"):
        return int(kinds.count("dense"))
    return _number(config, _DENSE) or len(config.get("mlp_only_layers") or ())


def _number(config: Mapping[str, Any], keys: Iterable[str]) -> int:
    """Return the first number under one of the keys; 0 without. Raises ValueError where layers differ in it."""
    for key in keys:
        if found := config.get(key):
            each = set(found) if isinstance(found, list) else {found}
            if len(each) > 1:
                raise ValueError(f"{key} differs between layers; give the model's figures yourself")
            return int(each.pop())
    return 0


def _weight_bits(quantization: Mapping[str, Any]) -> float | None:
    """Return the bits of a weight as a quantiser tells, with a scale of 16 bits for each group; None if not told."""
    groups = quantization.get("config_groups", {}).values()  # of compressed-tensors
    told = max(
        (part.get("weights") or {} for part in groups), key=lambda of: of.get("num_bits", 0), default=quantization
    )
    bits: float | None = told.get("bits") or told.get("num_bits") or _METHOD_BITS.get(told.get("quant_method"))
    if told.get("quant_method") == "bitsandbytes":
        bits = 4 if told.get("load_in_4bit") else 8
    group = told.get("group_size") or 0
    return bits and bits + (16 / group if group > 0 else 0)


def config_file(name: str) -> Path:
    """Return the config.json of a model: of a folder or file, of `tiny`, or of a hub model that was downloaded before.

    Raises ModelShapeError that says what to give instead; nothing is downloaded.
    """
    from warmkv.models import tiny

    if name == "tiny":
        return tiny.PATH / "config.json"
    path = Path(name).expanduser()
    if path.exists():
        return path / "config.json" if path.is_dir() else path
    if find_spec("huggingface_hub") and name.count("/") == 1 and not name.startswith((".", "/", "~")):
        from huggingface_hub import try_to_load_from_cache

        if isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
            return Path(cached)
    raise ModelShapeError(
        f"there is no folder {name}, and no hub model of that name was downloaded to this machine: download its "
        "config.json (a few kilobytes, beside the weights on the hub) and give that file"
    )
