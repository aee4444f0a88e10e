"""`warmkv profile`: step times over a grid of tokens and contexts, and the coefficients fitted to them.

Policies take turns at every place of the grid. A prefill chunk is the same work under all policies that want the same
of it, so it is measured once for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from warmkv.config import EngineConfig, PrefixCacheConfig
from warmkv.measuring import grid, synthetic, ttft
from warmkv.measuring.clock import Stopwatch, now
from warmkv.measuring.decoding import decode, timed_steps
from warmkv.measuring.fit import Point, fit
from warmkv.measuring.plan import MeasureError, ProfilePlan
from warmkv.measuring.spread import Spread
from warmkv.policies import budgets
from warmkv.policies.step_profile import FittedCost, Measurement, Phase, PolicyProfile
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.engine import Engine
from warmkv.replicas.loading import LoadedModel

Progress = Callable[[str], None]
"""Told what is measured next; once for every measurement."""
NEW_TOKENS = 16
"""Of every sequence whose steps are timed."""


class Profiler:
    """Measures one model on one device under a plan whose lengths are chosen."""

    def __init__(self, plan: ProfilePlan, model: LoadedModel, config: EngineConfig, progress: Progress) -> None:
        self._plan, self._model, self._progress = plan, model, progress
        self._config = config.model_copy(update={"max_slots": max(config.max_slots, *plan.batches)})
        self._specs = plan.specs()
        self._engines: dict[int, Engine] = {}  # by size of a chunk
        shape, room = model.kv_shape, int(config.kv_bytes)
        chunks = grid.chunks(plan.lengths, config.prefill_chunk)
        decodes = grid.decodes(plan.lengths, plan.batches)
        self._chunks = {
            labels: [cell for cell in chunks if grid.chunk_fits(cell, self._specs[labels[0]], shape, room)]
            for labels in _alike(self._specs)
        }
        self._decodes = {
            label: [cell for cell in decodes if grid.decode_fits(cell, spec, shape, room, NEW_TOKENS)]
            for label, spec in self._specs.items()
        }

    @property
    def measurements(self) -> int:
        """How often progress is reported."""
        cells = sum(map(len, self._chunks.values())) + sum(map(len, self._decodes.values()))
        return len(self._specs) + self._plan.repeats * cells

    def run(self) -> list[Measurement]:
        """Measure everything. Raises MeasureError if the engine cannot serve a policy on this model."""
        for label, spec in self._specs.items():
            self._progress(f"warm-up, {label}")
            ttft.warm_up(self._engine(self._config.prefill_chunk), spec)
        measured: list[Measurement] = []
        for labels, cells in self._chunks.items():
            for cell in cells:
                measured.append(self._chunk(labels, cell))
        for prompt in self._plan.lengths:
            measured += self._decode(prompt)
        return measured

    def _engine(self, chunk: int) -> Engine:
        """An engine that computes chunks of this size, without a store that would cut them at its blocks."""
        if chunk not in self._engines:
            config = self._config.model_copy(update={"prefill_chunk": chunk})
            self._engines[chunk] = Engine(self._model, config, PrefixCacheConfig(enabled=False), clock=now)
        return self._engines[chunk]

    def _chunk(self, labels: tuple[str, ...], cell: grid.Chunk) -> Measurement:
        engine, spec = self._engine(cell.tokens), self._specs[labels[0]]
        # One token more than is computed, so that the prompt is not handed off.
        random = synthetic.random_keys_and_values(self._model, cell.end + 1, self._plan.seed)
        prompt = synthetic.random_prompt(self._model, spec, random)
        taken = []
        for repeat in range(self._plan.repeats + 1):
            if repeat:  # the first one warms up
                self._progress(f"chunk of {cell.tokens} up to {cell.end:,}, {labels[0]}")
            synthetic.begin_chunk(engine, spec, prompt, cell.end - cell.tokens)
            watch = Stopwatch(self._model.device)
            engine.step()
            taken.append(watch.seconds())
            if prompt.computed != cell.end:
                raise MeasureError(f"{labels[0]}: the engine computed {prompt.computed} tokens instead of {cell.end}")
            synthetic.end_all(engine)
        return _measurement(labels, "prefill", cell.tokens, cell.end, taken[1:])

    def _decode(self, prompt_tokens: int) -> Iterable[Measurement]:
        """All batches at one length, and the hand-offs that began them."""
        engine, steps = self._engine(self._config.prefill_chunk), timed_steps(NEW_TOKENS)
        random = synthetic.random_keys_and_values(self._model, prompt_tokens, self._plan.seed)
        tpots: dict[tuple[str, grid.Decode], list[float]] = defaultdict(list)
        hand_offs: dict[tuple[str, int], list[float]] = defaultdict(list)
        for cell in dict.fromkeys(cell for cells in self._decodes.values() for cell in cells):
            labels = [label for label, cells in self._decodes.items() if cell in cells and cell.prompt == prompt_tokens]
            for label in labels * self._plan.repeats:
                self._progress(f"{cell.batch} x {prompt_tokens:,}, {label}")
                spec = cell.spec(self._specs[label])
                prompt = synthetic.random_prompt(self._model, spec, random)
                decoded = decode(engine, spec, prompt, cell.batch, NEW_TOKENS)
                tpots[label, cell].append(decoded.tpot)
                hand_offs[label, cell.kept(spec)].append(decoded.hand_off)
        for (label, cell), seconds in tpots.items():
            context = cell.context(self._specs[label], steps, NEW_TOKENS)
            yield _measurement((label,), "decode", cell.batch, context, seconds)
        for (label, kept), seconds in hand_offs.items():
            yield _measurement((label,), "hand_off", kept, prompt_tokens, seconds)


def fits(measured: Sequence[Measurement], labels: Iterable[str]) -> tuple[PolicyProfile, ...]:
    """The coefficients of every policy. Raises MeasureError if the grid was too small."""
    return tuple(
        PolicyProfile(
            policy=label,
            prefill=_fit(measured, label, "prefill"),
            decode=_fit(measured, label, "decode"),
            hand_off=_fit(measured, label, "hand_off"),
        )
        for label in labels
    )


def _fit(measured: Sequence[Measurement], label: str, phase: Phase) -> FittedCost:
    of = [one for one in measured if one.phase == phase and label in one.policies]
    try:
        return fit([Point(one.tokens, one.context, one.seconds) for one in of], pairs=phase == "prefill")
    except ValueError as error:
        raise MeasureError(
            f"{phase} of {label}: {error}. Give more --lengths or --batches, or more room for them with "
            "--set engine.kv_bytes=..."
        ) from None


def _alike(specs: dict[str, PolicySpec]) -> list[tuple[str, ...]]:
    """Policies in groups that want the same of a prefill chunk: the attention of all queries summed, or not."""
    groups: dict[bool, list[str]] = defaultdict(list)
    for label, spec in specs.items():
        long = 1 << 20  # a prompt that no budget spares
        groups[budgets.needs_column_sums(grid.Decode(1, long, grid.SHARES[0]).spec(spec), long)].append(label)
    return [tuple(group) for group in groups.values()]


def _measurement(
    labels: tuple[str, ...], phase: Phase, tokens: float, context: float, seconds: Sequence[float]
) -> Measurement:
    spread = Spread.of(seconds)
    return Measurement(
        policies=labels,
        phase=phase,
        tokens=tokens,
        context=context,
        seconds=spread.median,
        least=spread.least,
        most=spread.most,
    )
