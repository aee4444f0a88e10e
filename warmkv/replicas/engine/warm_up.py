"""Compile the model and the attention kernels before the first request, then record decode steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import torch

from warmkv.policies.compression import cpu_attention
from warmkv.policy_spec import STORAGES, PolicySpec, Storage
from warmkv.replicas.engine.forward import Compiled, Forward
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.protocol import GenerateRequest, SamplingParams
from warmkv.replicas.slots import kernels
from warmkv.replicas.slots.row_tables import padded_batch
from warmkv.replicas.slots.slots import SlotPool
from warmkv.replicas.slots.warm_up import KernelWarmUp

log = logging.getLogger(__name__)
LEAST_TOKENS = 16
RECORDED_STEPS = 6
"""Tokens of the requests that steps are recorded with: some come a step later than others."""

SUMMED = ("h2o@8",)
"""Policies whose prompts run the other kernels: sums of what every token received."""


@torch.inference_mode()
def compile_model(forward: Compiled, say: Callable[[str], None]) -> None:
    """Compile passes of the model, and on a CPU the attention of prompts. `say` is told what is next."""
    began = time.perf_counter()
    if forward.device.type == "cpu":
        cpu_attention.load()
    for part, what in enumerate(forward.build(), start=1):
        say(f"compiling, {part} of 3: {what}")
    log.info("the model was compiled in %.0f s", time.perf_counter() - began)


@torch.inference_mode()
def compile_kernels(
    model: LoadedModel,
    pool: SlotPool,
    forward: Forward,
    limit: int,
    seconds: float,
    first: Storage,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> bool:
    """Compile what attends rows of every storage, from the model's own and `first` on, within `seconds`.

    Slots for it take at most `limit` bytes. Returns False where no kernels attend. `say` is told what is next.
    """
    device, head_dim, began = model.device, pool.shape.head_dim, clock()
    storages = [
        name
        for name in dict.fromkeys(("model", first, *STORAGES))
        if kernels.supports(STORAGES[name], model.dtype, device) and head_dim % STORAGES[name].head_dim_multiple == 0
    ]
    if not storages or seconds <= 0:
        return bool(storages)
    state = KernelWarmUp(pool, model.inv_freq, storages, limit, lambda: clock() - began < seconds, say)
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    forward(ids, torch.zeros_like(ids), state)
    log.info("attention kernels were compiled in %.0f s", clock() - began)
    return True


def recorded_batches(slots: int, goes_on: Callable[[], bool]) -> Iterator[int]:
    """Yield the batches whose steps are recorded before requests come, while it `goes_on`.

    The largest is the first: what it makes room for lies where it lay for the others.
    """
    for batch in sorted({min(slots, padded_batch(each)) for each in range(1, slots + 1)}, reverse=True):
        if not goes_on():
            log.warning("steps of %d sequences and fewer are recorded while they serve: time is over", batch)
            return
        yield batch


def recorded_requests(batch: int, max_context: int) -> Iterator[list[GenerateRequest]]:
    """Yield short requests that decode together for some steps: they draw at random, then greedily."""
    length = min(LEAST_TOKENS, max_context // 2)
    for temperature in (1.0, 0.0):
        new = min(RECORDED_STEPS, max_context - length)
        sampling = SamplingParams(max_tokens=new, ignore_eos=True, temperature=temperature)
        yield [GenerateRequest(f"warm-up {at}", (0,) * length, (), sampling, PolicySpec()) for at in range(batch)]


def first_requests(vocabulary: int, max_context: int, page_size: int, attends: bool) -> Iterator[GenerateRequest]:
    """Yield requests of which none has to pay for what the first does; `attends`: kernels do, of rows in pages too."""
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    in_pages = 4 * page_size - sampling.max_tokens  # fills pages, where slots lie in any
    for spec in ("full", *(SUMMED if attends else ())):
        for length in sorted({LEAST_TOKENS, max(LEAST_TOKENS, in_pages)}):
            tokens = tuple(at % vocabulary for at in range(min(length, max_context // 2)))
            yield GenerateRequest("warm-up", tokens, (), sampling, PolicySpec.model_validate(spec))
