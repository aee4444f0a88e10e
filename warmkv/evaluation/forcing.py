"""Answers scored by forcing them: one prefill for all policies, then one decode batch with a slot for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from warmkv.evaluation import matching
from warmkv.policies import budgets, compression
from warmkv.policies.compression.prefill_state import PrefillState, TokenClasses
from warmkv.policies.compression.selection import Selection
from warmkv.policies.slot_sizes import slot_bytes
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.slot import Slot, SlotRequest
from warmkv.replicas.slots.slots import SlotPool

CHUNK = 512


@dataclass(frozen=True, slots=True)
class Filled:
    """A slot with what a policy kept of a prompt."""

    slot: Slot
    spec: PolicySpec  # as asked for, or with the budget lowered until it fitted
    bytes: int  # in use at most, until the answer ends
    handoff_bytes: int  # in use right after the hand-off
    kept: float  # entries per KV head and layer that survived it


@torch.inference_mode()
def prefill(
    model: LoadedModel, ids: Sequence[int], specs: Iterable[PolicySpec], classes: TokenClasses | None = None
) -> tuple[PrefillState, Tensor]:
    """Compute a prompt once with everything that any of the policies looks at; also its last logits [vocabulary]."""
    prompt = model.prefill_state(list(ids), specs, classes)
    logits = torch.empty(0)
    for start in range(0, len(ids), CHUNK):
        piece = torch.tensor([list(ids[start : start + CHUNK])], device=model.device)
        logits = forward_prompt(model, prompt, piece, 1)[-1]
    return prompt, logits


def forward_prompt(model: LoadedModel, prompt: PrefillState, ids: Tensor, keep: int) -> Tensor:
    """Compute the next chunk [1, n] of a prompt; the logits [keep, vocabulary] of its last tokens."""
    start, end = prompt.computed, prompt.computed + ids.shape[1]
    prompt.begin_chunk(end - start)
    positions = torch.arange(start, end, device=model.device)[None]
    output = model.module(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep, warmkv=prompt)
    prompt.end_chunk()
    logits: Tensor = output.logits[0]
    return logits


@torch.inference_mode()
def fill(
    model: LoadedModel, pool: SlotPool, prompt: PrefillState, spec: PolicySpec, new_tokens: int, allowed: int | None
) -> Filled | None:
    """Fill a slot under a policy with at most `allowed` bytes; None if it cannot be that small.

    Where what heads keep follows from the content, the budget is lowered until the bytes in use fit, too.
    """
    shape, tokens = model.kv_shape, prompt.tokens
    while True:
        inside = budgets.in_force(spec, tokens, new_tokens)
        selections = compression.build(inside).select(prompt)
        kept = [(selection.positions >= 0).sum(dim=1).tolist() for selection in selections]
        used = matching.exact_bytes(inside, shape, kept, tokens, new_tokens)
        if allowed is None or used <= allowed:
            break
        least = matching.smallest_budget(spec)
        if not isinstance(spec.budget, int) or spec.budget <= least:
            return None
        spec = matching.with_budget(spec, max(least, min(spec.budget - 1, spec.budget * allowed // used)))
    return Filled(
        slot=_claimed(model, pool, prompt, inside, new_tokens, selections),
        spec=spec,
        bytes=used,
        handoff_bytes=matching.exact_bytes(inside, shape, kept, tokens, 1),
        kept=sum(map(sum, kept)) / (shape.layers * shape.kv_heads),
    )


def _claimed(
    model: LoadedModel,
    pool: SlotPool,
    prompt: PrefillState,
    spec: PolicySpec,
    new_tokens: int,
    selections: Sequence[Selection],
) -> Slot:
    needed = slot_bytes(spec, model.kv_shape, prompt.tokens, new_tokens)
    slot = pool.claim(SlotRequest(spec, prompt.tokens, new_tokens), pool.allocated_bytes + needed)
    assert slot is not None
    pool.fill(slot, prompt, selections)
    return slot


@torch.inference_mode()
def force(
    model: LoadedModel,
    pool: SlotPool,
    slots: Sequence[Slot],
    logits: Tensor,
    tokens: Sequence[int],
    progress: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Decode the same `tokens` [n] in all slots. Per slot and token: whether it was the most likely one, bool
    [slots, n], and its negative log likelihood in nats, float32 [slots, n].

    logits [vocabulary] are those of the prompt's end: the first token is drawn from the whole prompt, as in the
    service, whatever the policy.
    """
    hits, losses = [], []
    logits = logits.expand(len(slots), -1)
    for at, token in enumerate(tokens):
        if at:
            logits = _step(model, pool, slots, tokens[at - 1])
            progress()
        hits.append(logits.argmax(dim=-1) == token)
        losses.append(-logits.float().log_softmax(dim=-1)[:, token])
    return torch.stack(hits, dim=1).cpu(), torch.stack(losses, dim=1).cpu()


def _step(model: LoadedModel, pool: SlotPool, slots: Sequence[Slot], token: int) -> Tensor:
    """Feed a token to all slots; the logits [slots, vocabulary] of the one after it."""
    for slot in slots:
        pool.rebase(slot, model.max_context, model.inv_freq)
    ids = torch.full((len(slots), 1), token, device=model.device)
    positions = torch.tensor([[slot.tokens - slot.shift] for slot in slots], device=model.device)
    state = DecodeState(pool, slots, model.inv_freq)
    output = model.module(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1, warmkv=state)
    logits: Tensor = output.logits[:, -1]
    return logits
