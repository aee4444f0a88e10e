"""What both commands do before a measurement: check the device and the plan, and load the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from warmkv.config import Config
from warmkv.measuring.plan import MeasureError
from warmkv.terminal import errors

if TYPE_CHECKING:
    from warmkv.replicas.loading.load import LoadedModel

BUSY = 0.5
"""Load of the machine above which its figures are doubtful."""


def context_limit(settings: Config, model_limit: int) -> int:
    """Return tokens that the engine takes of a model that takes `model_limit`."""
    return min(settings.engine.max_context or model_limit, model_limit)


def load(settings: Config, check: Callable[[int], object]) -> tuple[LoadedModel, dict[str, Any]]:
    """Load the model, and describe the machine before anything is measured.

    `check` is told the context before the weights are read. Raises MeasureError and DeviceError.
    """
    import torch
    from transformers.utils import logging

    from warmkv.measuring import machine
    from warmkv.replicas import device_memory
    from warmkv.replicas.loading.load import load_model
    from warmkv.replicas.loading.tokenizer import load_max_context

    logging.disable_progress_bar()
    if settings.engine.threads:
        torch.set_num_threads(settings.engine.threads)
    device_memory.check_device(settings.model.device)
    found = machine.identity()
    if found["load"] > BUSY:
        errors.print("other work runs on this machine", style="yellow", end="")
        errors.print(f" (load {found['load']} on {found['cores']} cores): figures will be worse than it can do")
    try:
        check(context_limit(settings, load_max_context(settings.model, "warmkv")))
        model = load_model(settings.model)
    except MeasureError:
        raise
    except (OSError, ValueError, torch.OutOfMemoryError) as error:
        raise MeasureError(f"cannot load {settings.model.path}: {str(error).splitlines()[0]}") from None
    check(context_limit(settings, model.max_context))
    return model, {**machine.identity(model.device), "load": found["load"]}
