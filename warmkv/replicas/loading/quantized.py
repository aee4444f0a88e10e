"""Checkpoints with quantised weights: computed as they are where this device can, else dequantised while loading."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from warmkv.replicas.loading.packed_integers import FORMATS, dense_weights
from warmkv.replicas.loading.structure import refusal

log = logging.getLogger(__name__)


def settle(config: Any, device: torch.device) -> bool:
    """Decide how a checkpoint's quantised weights are loaded, in its `config`; return True if warmkv dequantises them.

    Nothing happens to one whose weights are not quantised. Raises ValueError, with the method's name, for weights that
    cannot be loaded here; vLLM may serve these. Raises it with the family's for one that has no causal LM.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.quantizers import AutoHfQuantizer

    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return False
    known = quantised if isinstance(quantised, dict) else quantised.to_dict()
    method = str(known.get("quant_method"))
    if _layout(known) in FORMATS.get(method, ()) and not (device.type == "cuda" and find_spec("gptqmodel")):
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise refusal(config.model_type, "transformers has no causal language model for it")
        log.warning("weights quantised by %s are dequantised: they take the memory of model.dtype", method)
        return True
    if method == "compressed-tensors":
        known = {**known, "dequantize": device.type == "cpu", "use_optimized_inference": True}
    elif method == "fp8" and device.type == "cpu":
        known = {**known, "dequantize": True}
    try:
        quantiser = AutoHfQuantizer.from_config(dict(known), pre_quantized=True)
        quantiser.validate_environment(device_map=None)
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        why = f"{error}".rstrip(". ")
        raise ValueError(
            f"weights that are quantised by {method} cannot be loaded here: {why}. "
            "vLLM serves such models (engine.kind: vllm)"
        ) from error
    if method == "compressed-tensors" and not getattr(quantiser, "use_fp8_kernel", False):
        known["dequantize"] = True  # it would be at the first pass, layer by layer, and hold both
    config.quantization_config = known
    return False


def load_dense(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """Load a causal LM with weights of GPTQ or AWQ, dequantised. Raises ValueError for integers that are not read."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig

    known = config.quantization_config
    del config.quantization_config
    weights = dense_weights(folder, known["quant_method"], _layout(known), dtype)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    module = kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
    if (folder / "generation_config.json").exists():
        module.generation_config = GenerationConfig.from_pretrained(folder)
    return module


def _layout(known: dict[str, Any]) -> str:
    """Return the layout of packed integers by a checkpoint's quantization_config; each method has a usual one."""
    usual = {"gptq": "gptq", "awq": "gemm"}.get(str(known.get("quant_method")), "")
    told = known.get("checkpoint_format") or known.get("format") or known.get("version") or usual
    return str(told).lower()
