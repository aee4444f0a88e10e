"""The sizes of a model, from its config.json as Hugging Face writes it: what a step computes and reads."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from warmkv.faults import UserError

TINY = {"layers": 6, "kv_heads": 2, "head_dim": 32, "dtype_bytes": 4}
"""Figures that decide the size of the KV cache: those of the model in the package, in float32."""

_REST = ("hidden", "heads", "intermediate", "vocabulary")
"""Figures that the arithmetic of a step needs beside those."""

_LATER = ("tied", "context")
"""Figures that what was dumped by an earlier version does not have."""

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
_UNKNOWN = ("kv_lora_rank", "n_shared_experts", "shared_expert_intermediate_size", "state_size")


class ModelShapeError(UserError):
    """A file that does not tell the shape of a model; the message says why."""


class ModelShape(BaseModel):
    """A decoder with grouped-query attention and gated MLPs, as Llama, Mistral, Qwen and Mixtral are.

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
        return self.layers * (self._attention + self.experts * (self._mlp + (self.hidden if self.experts > 1 else 0)))

    @property
    def active_weights(self) -> int:
        """Return the parameters of all layers that a token is multiplied with."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.layers * (self._attention + router + self.experts_per_token * self._mlp)

    @property
    def _attention(self) -> int:
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def _mlp(self) -> int:
        return 3 * self.hidden * self.intermediate  # gate, up and down


def kv_figures(path: Path) -> dict[str, int]:
    """Return the figures of a model's KV cache. Raises ModelShapeError."""
    return _taken(path, _kv)


def figures(path: Path) -> dict[str, int]:
    """Return all figures of a model, as the fields of `ModelShape`. Raises ModelShapeError."""
    return _taken(path, _all)


def vocabulary(path: Path) -> int:
    """Return the tokens that a model knows. Raises ModelShapeError."""
    return _taken(path, lambda config: {"vocabulary": config["vocab_size"]})["vocabulary"]


def _taken(path: Path, take: Any) -> dict[str, int]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        found: dict[str, int] = take(config.get("text_config", config))
    except OSError as error:
        raise ModelShapeError(f"cannot read {file}: {error.strerror}") from None
    except KeyError as error:
        raise ModelShapeError(f"{file} is no configuration of a model that is known here: it lacks {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelShapeError(f"{file} is no configuration of a model: {error}") from None
    if not all(isinstance(number, int) and (number > 0 or number is False) for number in found.values()):
        raise ModelShapeError(f"{file} describes a model without a KV cache")
    return found


def _kv(config: dict[str, Any]) -> dict[str, int]:
    heads = config["num_attention_heads"]
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in _DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_DTYPE_BYTES)}")
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim")
    if rank := config.get("kv_lora_rank"):  # MLA keeps one vector for keys and values, which stands for half of each
        kv_heads, head_dim = 1, -(-(rank + config["qk_rope_head_dim"]) // 2)
    return {
        "layers": config["num_hidden_layers"],
        "kv_heads": kv_heads,
        "head_dim": head_dim or config["hidden_size"] // heads,
        "dtype_bytes": _DTYPE_BYTES[dtype],
    }


def _all(config: dict[str, Any]) -> dict[str, int]:
    if foreign := [key for key in _UNKNOWN if config.get(key)]:
        raise ValueError(f"{foreign[0]} belongs to an architecture that is not counted here; give its figures yourself")
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    return {
        **_kv(config),
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "intermediate": (experts > 1 and config.get("moe_intermediate_size")) or config["intermediate_size"],
        "vocabulary": config["vocab_size"],
        "experts": experts,
        "experts_per_token": config["num_experts_per_tok"] if experts > 1 else 1,
        "tied": bool(config.get("tie_word_embeddings")),
        **({"context": context} if (context := config.get("max_position_embeddings")) else {}),
    }


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
