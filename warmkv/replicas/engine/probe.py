"""Run a prompt and a token known to be sound, to tell a device that fails from a request that does."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from warmkv.policies import compression
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.engine.faults import NotFiniteError, is_sticky
from warmkv.replicas.engine.forward import Forward
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.slot import SlotRequest
from warmkv.replicas.slots.slots import SlotPool

log = logging.getLogger(__name__)
TOKENS = 16


def works(model: LoadedModel, pool: SlotPool, forward: Forward, limit: int) -> bool:
    """Return True if the device computes a request known to be sound. Raises errors after which it never will again."""
    try:
        probe(model, pool, forward, limit)
    except Exception as error:
        if is_sticky(error):
            raise
        log.exception("the device fails a probe")
        return False
    return True


def probe(model: LoadedModel, pool: SlotPool, forward: Forward, limit: int) -> None:
    """Compute a prompt and, if a slot fits within `limit` bytes of slabs, a decode step; not while a step is halfway.

    Raises what the device raises, NotFiniteError where its logits are not finite.
    """
    device = model.device
    tokens = min(TOKENS, model.max_context // 2, model.vocabulary)
    prompt = model.prefill_state(range(tokens), [PolicySpec()])
    prompt.begin_chunk(tokens)
    positions = torch.arange(tokens, device=device)[None]
    _check(forward(positions, positions, prompt))
    prompt.end_chunk()
    spec = PolicySpec()
    slot = pool.claim(SlotRequest(spec, tokens, 2), limit)
    if slot is None:
        return
    try:
        pool.fill(slot, prompt, compression.build(spec).select(prompt))
        state = DecodeState(pool, [slot], model.inv_freq)
        _check(forward(positions[:, :1], torch.tensor([state.positions], device=device), state))
    finally:
        pool.release(slot)


def _check(logits: Tensor) -> None:
    if not bool(logits.isfinite().all()):
        raise NotFiniteError
