"""`warmkv doctor`: look at the installation, the device, the memory plan and the model's self-check."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

from warmkv.config import Config
from warmkv.extras import EXTRAS
from warmkv.faults import UserError

State = Literal["ok", "missing", "failed"]


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One thing that was looked at."""

    what: str
    state: State
    detail: str


def examine(config: Config, say: Callable[[str], None] = lambda what: None) -> Iterator[DoctorFinding]:
    """Look at the installation, the device and the configured model, in this process and without Ray.

    What cannot be looked at because something before it is missing or failed is left out. `say` is told what is done
    next.
    """
    yield DoctorFinding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    servable = True
    kinds = {group.engine.kind for group in config.groups().values()}
    for extra, modules in EXTRAS.items():
        if extra == "vllm" and "vllm" not in kinds:  # its environment is another one
            continue
        lacking = [module for module in modules if find_spec(module) is None]
        if extra == "flash" and lacking:  # torch's own kernel does the same, in more time
            continue
        said = f"lacks {', '.join(lacking)}: pip install 'warmkv[{extra}]'" if lacking else _versions(modules)
        yield DoctorFinding(f"extra {extra}", "missing" if lacking else "ok", said)
        servable = servable and not (extra == "serve" and lacking)
    if servable:
        yield from _examine_model(config, say)


def _versions(modules: tuple[str, ...]) -> str:
    found = []
    for module in modules:
        try:
            found.append(f"{module} {version(module)}")
        except PackageNotFoundError:  # a module of another name than its package
            found.append(module)
    return ", ".join(found)


def _examine_model(config: Config, say: Callable[[str], None]) -> Iterator[DoctorFinding]:
    import torch
    from transformers.utils import logging

    from warmkv.replicas import device_memory
    from warmkv.replicas.engine import batch_invariant
    from warmkv.replicas.engine.engine import Engine
    from warmkv.replicas.loading.load import load_model, resolve_device
    from warmkv.replicas.loading.self_check import check_engine

    logging.disable_progress_bar()
    device = resolve_device(config.model.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    yield DoctorFinding("device", "ok", f"{device} ({name}), torch {torch.__version__}")
    try:
        say(f"loading {config.model.name}")
        share = device_memory.share_of(config.cluster, config.most_replicas, device)
        device_memory.check_before_loading(config, share)
        model = load_model(config.model)
    except (OSError, ValueError) as error:
        yield DoctorFinding("model", "failed", str(error))
        return
    shape = model.kv_shape
    yield DoctorFinding(
        "model", "ok", f"{config.model.path}: {shape.layers} layers, context {model.max_context:,} tokens"
    )
    try:
        say("planning memory")
        memory = device_memory.plan_replica(model, config.engine, config.prefix_cache, share)
        memory.check()
    except UserError as error:
        yield DoctorFinding("memory plan", "failed", str(error))
        return
    yield DoctorFinding("memory plan", "ok", memory.summary)
    try:
        engine = Engine(model, config.engine, config.prefix_cache, clock=time.monotonic, memory=memory)
        engine.warm_up(say)
        check_engine(engine, say)
        batch_invariant.check(engine, say)
    except (RuntimeError, ValueError) as error:
        yield DoctorFinding("self-check", "failed", str(error))
        return
    yield DoctorFinding("self-check", "ok", "logits of prompts and decode steps are those of the model's own forward")
