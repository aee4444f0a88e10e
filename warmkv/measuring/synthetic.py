"""Synthetic prompts: random keys and values, so that long contexts need no prefill.

Sequences are put straight into the engine's scheduler, in the state in which its own hand-off (or an earlier chunk)
would have left them; every step after that is the engine's. This is the only file that knows how.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from warmkv.measuring.clock import Stopwatch
from warmkv.measuring.plan import MeasureError
from warmkv.policies import compression, slot_sizes
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policies.compression.selection import Selection
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.engine.scheduler import Sequence
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.protocol import GenerateRequest, SamplingParams
from warmkv.replicas.slots.slot import Slot


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that decode."""

    slots: Items[Slot]
    kept: float  # entries per layer and KV head that each kept of its prompt, the average
    hand_off: float  # seconds of selecting them and filling a slot


@torch.inference_mode()
def random_keys_and_values(model: LoadedModel, tokens: int, seed: int) -> Tensor:
    """Draw keys and values of a whole prompt: [2, layers, kv_heads, tokens, head_dim]."""
    shape, generator = model.kv_shape, torch.Generator(model.device).manual_seed(seed)
    size = (2, shape.layers, shape.kv_heads, tokens, shape.head_dim)
    return torch.randn(size, generator=generator, dtype=model.dtype, device=model.device)


@torch.inference_mode()
def random_prompt(model: LoadedModel, spec: PolicySpec, keys_and_values: Tensor) -> PrefillState:
    """Make a random PrefillState as prefill would leave it under a policy, observations included."""
    generator = torch.Generator(model.device).manual_seed(1)
    tokens = keys_and_values.shape[3]
    prompt = model.prefill_state(range(tokens), [spec], keys_and_values=keys_and_values)
    if prompt.queries is not None:
        prompt.queries.normal_(generator=generator)
    if prompt.column_sums is not None:
        prompt.column_sums.uniform_(generator=generator)
    prompt.computed = tokens
    return prompt


@torch.inference_mode()
def begin_decoding(engine: Engine, spec: PolicySpec, prompt: PrefillState, batch: int, new_tokens: int) -> Batch:
    """Let `batch` sequences decode that all had this prompt. They end by themselves after `new_tokens` - 1 steps.

    Raises MeasureError if their slots do not fit engine.kv_bytes.
    """
    slots: list[Slot] = []
    selections: list[Selection] = []
    hand_off = 0.0
    for number in range(batch):
        sequence = _sequence(f"{number}", spec, prompt.tokens, new_tokens)
        assert sequence.slot_request is not None
        slot = sequence.slot = engine.pool.claim(sequence.slot_request, engine.memory.kv.bytes)
        if slot is None:
            raise MeasureError(
                f"slot {number + 1} of {batch} for {prompt.tokens} tokens under {spec.label} does not fit "
                f"engine.kv_bytes ({engine.memory.kv.bytes:,} bytes); give more with --set engine.kv_bytes=..."
            )
        watch = Stopwatch(engine.model.device)
        selections = selections or sequence.method.select(prompt)
        engine.pool.fill(slot, prompt, selections)
        hand_off = hand_off or watch.seconds()
        sequence.num_output_tokens = 1
        engine.scheduler.decoding[slot] = sequence
        slots.append(slot)
    return Batch(slots, _kept_entries(selections), hand_off)


@torch.inference_mode()
def begin_chunk(engine: Engine, spec: PolicySpec, prompt: PrefillState, start: int) -> None:
    """Let the engine's next step compute a chunk of this prompt from position `start` on."""
    prompt.computed = start
    sequence = _sequence("prefill", spec, prompt.tokens, 1)
    sequence.prefill = prompt
    engine.scheduler.prefilling[sequence] = None


def workspace_bytes(engine: Engine, spec: PolicySpec, tokens: int) -> int:
    """Return bytes that the engine sets aside for a prompt while it is computed."""
    return slot_sizes.workspace_bytes(spec, engine.model.kv_shape, tokens)


def end_all(engine: Engine) -> None:
    """Take everything out of the engine again, and give its slots back."""
    for sequence in list(engine.scheduler.everyone()):
        engine.scheduler.remove(sequence)
    engine.pool.fit(0)


def _kept_entries(selections: Items[Selection]) -> float:
    counts = [float((selection.positions >= 0).sum()) / len(selection.positions) for selection in selections]
    return sum(counts) / len(counts)


def _sequence(name: str, spec: PolicySpec, tokens: int, new_tokens: int) -> Sequence:
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(name, (0,) * tokens, (), sampling, spec)
    return Sequence(request, compression.build(spec), lambda event: None, 0.0, np.random.default_rng(0))
