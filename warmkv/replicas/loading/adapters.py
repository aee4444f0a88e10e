"""Folders that hold an adapter, such as LoRA's, in place of a model: transformers would leave the adapter out."""

from __future__ import annotations

import json
from pathlib import Path

from warmkv.faults import UserError

ADAPTER_CONFIG = "adapter_config.json"


class AdapterError(UserError):
    """Refuse a model's folder that has an adapter."""


def check_adapter(folder: Path) -> None:
    """Raise AdapterError, with the adapter's kind and its model, if a model's folder has an adapter."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        return
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        kind, base = told["peft_type"], told["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        kind, base = "unknown", "another model"
    raise AdapterError(
        f"{folder} (model.path) has an adapter ({ADAPTER_CONFIG}: {kind}) of {base}, and none is loaded: "
        f"merge it into its model (merge_and_unload of peft) and serve the result, without {ADAPTER_CONFIG}"
    )
