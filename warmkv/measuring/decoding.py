"""A batch that decodes through the engine, from synthetic keys and values to its end."""

from __future__ import annotations

from dataclasses import dataclass

from warmkv.measuring import synthetic
from warmkv.measuring.clock import Stopwatch
from warmkv.measuring.plan import MeasureError
from warmkv.policies.compression.prefill_state import PrefillState
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.engine.engine import Engine

UNTIMED = 2
"""Steps that warm up every batch."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What it took, in seconds, and held, in bytes of all its sequences together."""

    tpot: float  # a step
    hand_off: float  # selecting what one sequence keeps, and filling its slot
    kept: float  # entries per layer and KV head after the hand-off, the average
    slot_bytes: int  # of the batch's slots
    pool_bytes: int  # all that is allocated for slots, idle ones included


def timed_steps(new_tokens: int) -> range:
    """Return the decode steps, counted from 1, that are timed; the first token comes from the prompt."""
    return range(UNTIMED + 1, new_tokens)


def decode(engine: Engine, spec: PolicySpec, prompt: PrefillState, batch: int, new_tokens: int) -> Decoded:
    """Let `batch` sequences decode `new_tokens` after this prompt, in an engine with nothing else to do.

    Raises MeasureError if they do not fit engine.kv_bytes, or fail.
    """
    synthetic.end_all(engine)
    begun = synthetic.begin_decoding(engine, spec, prompt, batch, new_tokens)
    held, allocated = sum(slot.resident_bytes for slot in begun.slots), engine.pool.allocated_bytes
    steps = timed_steps(new_tokens)
    for _ in range(1, steps.start):
        engine.step()
    watch = Stopwatch(engine.model.device)
    for _ in steps[:-1]:
        engine.step()
    if len(engine.scheduler.decoding) != batch:
        raise MeasureError(f"{spec.label}: the model gave logits that are not finite on random keys and values")
    engine.step()  # at its end the sequences end
    tpot = watch.seconds() / len(steps)
    synthetic.end_all(engine)
    return Decoded(tpot, begun.hand_off, begun.kept, held, allocated)
