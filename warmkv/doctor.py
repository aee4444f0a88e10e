"""`warmkv doctor`: look at the installation, the settings, the device, the memory plan and the model's self-check."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from warmkv.config import Config, DiskConfig, PrefixCacheConfig, place_in
from warmkv.extras import EXTRAS
from warmkv.faults import UserError

if TYPE_CHECKING:
    import torch

    from warmkv.replicas.loading.load import LoadedModel

State = Literal["ok", "missing", "failed"]

PROBE = "warmkv-doctor"  # a file that is written and removed


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One thing that was looked at."""

    what: str
    state: State
    detail: str


def examine(
    config: Config, say: Callable[[str], None] = lambda what: None, metrics_port: int = 0
) -> Iterator[DoctorFinding]:
    """Look at the installation, the settings, the device and the configured model, in this process and without Ray.

    What cannot be looked at because something before it is missing or failed is left out. `say` is told what is done
    next. `metrics_port` is that of `warmkv serve`, where it is given one.
    """
    yield DoctorFinding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    servable, needed = True, _needed_extras(config)
    for extra, modules in EXTRAS.items():
        if extra == "vllm" and extra not in needed:  # its environment is another one
            continue
        lacking = [module for module in modules if find_spec(module) is None]
        if extra == "flash" and lacking:  # torch's own kernel does the same, in more time
            continue
        said = f"lacks {', '.join(lacking)}: pip install 'warmkv[{extra}]'" if lacking else _versions(modules)
        state: State = "ok" if not lacking else "failed" if extra in needed else "missing"
        yield DoctorFinding(f"extra {extra}", state, said)
        servable = servable and not (extra == "serve" and lacking)
    if servable:
        yield from _examine_settings(config, metrics_port)
        yield from _examine_model(config, say)


def _needed_extras(config: Config) -> set[str]:
    """Return the extras without which `warmkv serve` does not do what the settings say."""
    needed = {"serve"}
    if any(group.engine.kind == "vllm" for group in config.groups().values()):
        needed.add("vllm")
    if config.control.whatif is not None and config.control.whatif.quality is not None:  # a table of `warmkv eval`
        needed.add("eval")
    return needed


def _versions(modules: tuple[str, ...]) -> str:
    found = []
    for module in modules:
        try:
            found.append(f"{module} {version(module)}")
        except PackageNotFoundError:  # a module of another name than its package
            found.append(module)
    return ", ".join(found)


def _examine_settings(config: Config, metrics_port: int) -> Iterator[DoctorFinding]:
    """Look at what gateways start from, by the functions of `warmkv serve`."""
    from warmkv.platform.listening import check_listening
    from warmkv.platform.live_config_store import store_of
    from warmkv.platform.local import check_access_log, check_metrics_port, with_port
    from warmkv.platform.tenants import warn_of_salt
    from warmkv.platform.tenants_file import Tenants

    gateway, log, folder = config.gateway, config.gateway.access_log, config.control.path

    def listening() -> str:
        check_listening(gateway)
        with_port(config)
        return f"{gateway.host}:{gateway.port}, {'any key' if gateway.is_open else 'keys of tenants'}"

    def metrics() -> str:
        check_metrics_port(metrics_port)
        return f"port {metrics_port} is free"

    def tenants() -> str:
        known = Tenants(gateway, b"", lambda outcome: None).status()
        return f"tenants: {len(known['tenants'])}, operators: {len(known['operators'])}"

    def access_log() -> str:
        assert log is not None
        with _nothing_left(log):
            check_access_log(log)
        return f"{log} can be written"

    def versions() -> str:
        assert folder is not None
        with _nothing_left(folder / PROBE):
            store_of(config.control).write(PROBE, b"")
        return f"{folder} can be written"

    yield _look("listening", "gateway.host", listening)
    if metrics_port:
        yield _look("metrics", "--metrics-port", metrics)
    if not gateway.is_open or gateway.operators:
        yield _look("tenants", "gateway.tenants_file", tenants)
    if log is not None:
        yield _look("access log", "gateway.access_log", access_log)
    if folder is not None:
        yield _look("versions", "control.path", versions)
    if warning := warn_of_salt(config):
        yield DoctorFinding("salt", "missing", warning)
    yield from _examine_packs(config)


def _examine_packs(config: Config) -> Iterator[DoctorFinding]:
    """Look if some tenant can read the packs; the self-check loads them."""
    from warmkv.platform.packs import check_packs
    from warmkv.platform.tenants import secret_of_environment

    def readable(paths: tuple[Path, ...]) -> str:
        check_packs(paths, config, secret_of_environment())
        return f"{len(paths)} can be read by tenants"

    for name, group in config.groups().items():
        cache = group.prefix_cache
        if cache.packs and cache.enabled:
            what, place = (f"packs of {name}", f"cluster.groups.{name}.") if name else ("packs", "")
            yield _look(what, f"{place}prefix_cache.packs", partial(readable, cache.packs))


def _look(what: str, setting: str, look: Callable[[], str]) -> DoctorFinding:
    """Return what a look at a setting tells, or why it could not be used."""
    try:
        return DoctorFinding(what, "ok", look())
    except OSError as error:
        named = f"cannot use {error.filename} ({setting}): {error.strerror}" if error.filename else str(error)
        return DoctorFinding(what, "failed", named)
    except (RuntimeError, ValueError) as error:  # a UserError, that of the disk tier, or a device that is full
        return DoctorFinding(what, "failed", str(error))


@contextmanager
def _nothing_left(path: Path) -> Iterator[None]:
    """Remove a file and the folders above it afterwards, as far as they were not there: another user may serve."""
    made = [one for one in (path, *path.parents) if not os.path.lexists(one)]
    try:
        yield
    finally:
        for one in made:
            with suppress(OSError):  # never made, or not empty
                one.rmdir() if one.is_dir() else one.unlink()


def _examine_disks(model: LoadedModel, config: Config) -> Iterator[DoctorFinding]:
    """Claim a folder in each path of a disk tier, as a replica does at its start; an empty one is removed again."""
    from warmkv.replicas.block_store import Identity, disk

    def claimed(cache: PrefixCacheConfig, path: Path) -> str:
        with _nothing_left(path):
            folder = disk.claim(path, Identity.of(model, cache.block_size), cache.disk.storage)
            own = {folder.path / name for name in (disk.MANIFEST, disk.LOCK)}
            if set(folder.path.iterdir()) == own:  # what it had before, and others', is left alone
                for file in own:
                    file.unlink()
                folder.path.rmdir()
            folder.release()
        return f"{folder.path} can be written"

    seen = set[Path]()
    for name, group in config.groups().items():
        cache, path = group.prefix_cache, group.prefix_cache.disk.path
        if path is None or not cache.enabled or path in seen:
            continue
        seen.add(path)
        what = f"disk tier of {name}" if name else "disk tier"
        yield _look(what, place_in(name, "prefix_cache.disk.path"), partial(claimed, cache, path))


def _examine_model(config: Config, say: Callable[[str], None]) -> Iterator[DoctorFinding]:
    import torch
    from transformers.utils import logging

    from warmkv.platform.local import check_model
    from warmkv.replicas import device_memory
    from warmkv.replicas.engine import batch_invariant
    from warmkv.replicas.engine.engine import Engine
    from warmkv.replicas.loading.load import load_model, resolve_device
    from warmkv.replicas.loading.self_check import check_engine

    def usable(device: str) -> str:
        device_memory.check_device(device)
        return str(resolve_device(device))

    logging.disable_progress_bar()
    groups = {name: group for name, group in config.groups().items() if name}
    for name, group in list(groups.items()):
        if group.model.device != config.model.device:
            found = _look(f"device of {name}", place_in(name, "model.device"), partial(usable, group.model.device))
            if found.state == "failed":
                del groups[name]
            yield found
    try:
        device_memory.check_device(config.model.device)
    except UserError as error:
        yield DoctorFinding("device", "failed", str(error))
        return
    device = resolve_device(config.model.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    yield DoctorFinding("device", "ok", f"{device} ({name}), torch {torch.__version__}")
    if config.engine.kind == "vllm":
        yield from _examine_vllm(config, device)
        yield from _examine_group_plans(groups, config, None)
        return
    try:
        check_model(config.model)
        say(f"loading {config.model.name}")
        share = device_memory.share_of(config.cluster, config.most_replicas, device)
        device_memory.check_before_loading(config, share)
        model = load_model(config.model)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: the device has less room than it said
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
    yield from _examine_group_plans(groups, config, model)
    yield from _examine_disks(model, config)
    cache = config.prefix_cache.model_copy(update={"disk": DiskConfig()})  # whose blocks are left alone
    try:
        engine = Engine(model, config.engine, cache, clock=time.monotonic, memory=memory)
        engine.warm_up(say)
        check_engine(engine, say)
        batch_invariant.check(engine, say)
    except (OSError, RuntimeError, ValueError) as error:
        yield DoctorFinding("self-check", "failed", str(error))
        return
    yield DoctorFinding("self-check", "ok", "logits of prompts and decode steps are those of the model's own forward")


def _examine_vllm(config: Config, device: torch.device) -> Iterator[DoctorFinding]:
    """Look at the model's sizes and the memory plan, as a replica does before it starts vLLM, which loads the model."""
    from warmkv.replicas import device_memory
    from warmkv.replicas.engines.vllm_start import plan_memory, read_model

    try:
        model = read_model(config)
    except (OSError, ValueError) as error:
        yield DoctorFinding("model", "failed", str(error))
        return
    layers, context = model.sizes.shape.layers, model.max_context
    yield DoctorFinding("model", "ok", f"{config.model.path}: {layers} layers, context {context:,} tokens; for vLLM")
    try:
        plan, misfit = plan_memory(config, model, device_memory.share_of(config.cluster, config.most_replicas, device))
    except UserError as error:
        yield DoctorFinding("memory plan", "failed", str(error))
        return
    yield DoctorFinding("memory plan", "missing" if misfit else "ok", misfit or plan.summary)


def _examine_group_plans(
    groups: Mapping[str, Config], config: Config, model: LoadedModel | None
) -> Iterator[DoctorFinding]:
    """Plan the memory of a replica of each group. `model` is that of the settings, where it was loaded."""
    from warmkv.replicas import device_memory
    from warmkv.replicas.engines.vllm_start import plan_memory, read_model
    from warmkv.replicas.loading.load import load_model, resolve_device

    def planned(group: Config) -> str:
        device = resolve_device(group.model.device)
        share = device_memory.share_of(group.cluster, config.most_replicas, device)
        if group.engine.kind == "vllm":
            plan, misfit = plan_memory(group, read_model(group), share)
            return misfit or plan.summary
        device_memory.check_before_loading(group, share)
        loaded = model if model is not None and model.device == device else load_model(group.model)
        plan = device_memory.plan_replica(loaded, group.engine, group.prefix_cache, share)
        plan.check()
        return plan.summary

    for name, group in groups.items():
        yield _look(f"memory plan of {name}", place_in(name, "engine"), partial(planned, group))
