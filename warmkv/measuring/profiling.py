"""`warmkv profile`: step times over a grid of tokens and contexts, and the coefficients fitted to them.

Every repeat goes over the whole grid, policies taking turns, so that a slow moment of the machine is no place of the
grid. A prefill chunk is the same work under all policies that want the same of it: it is measured once for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from warmkv.config import EngineConfig, PrefixCacheConfig
from warmkv.measuring import grid, synthetic, ttft
from warmkv.measuring.clock import Stopwatch, now
from warmkv.measuring.decoding import decode, timed_steps
from warmkv.measuring.fit import MeasuredStep, check_grid, fit
from warmkv.measuring.plan import PROFILED_TOKENS, MeasureError, ProfilePlan
from warmkv.measuring.spread import Spread
from warmkv.policies import budgets
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.device_memory import plan_replica
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.loading.load import LoadedModel
from warmkv.simulator.steps.step_profile import PHASES, FittedCost, Measurement, Phase, PolicyProfile

Progress = Callable[[str], None]
"""Told what is measured next; once for every measurement."""


Place = tuple[tuple[str, ...], Phase, float, float]  # policies, phase, tokens, context


class Profiler:
    """Measures one model on one device under a plan whose lengths are chosen."""

    def __init__(self, plan: ProfilePlan, model: LoadedModel, config: EngineConfig) -> None:
        self._plan, self._model = plan, model
        self._config = config.model_copy(update={"max_slots": max(config.max_slots, *plan.batches)})
        self._step_tokens = config.tokens_per_step(on_gpu=model.device.type == "cuda")
        self._specs = plan.specs()
        self._engines: dict[int, Engine] = {}  # by size of a chunk
        self._seconds: dict[Place, list[float]] = defaultdict(list)
        shape, room = model.kv_shape, plan_replica(model, config, PrefixCacheConfig(enabled=False)).kv.bytes
        self._chunks = [
            (labels, cell)
            for cell in grid.chunks(plan.lengths, min(self._step_tokens, max(plan.lengths)))
            for labels in _alike(self._specs)
            if grid.chunk_fits(cell, self._specs[labels[0]], shape, room)
        ]
        self._decodes = [
            (label, cell)
            for cell in grid.decodes(plan.lengths, plan.batches)
            for label, spec in self._specs.items()
            if grid.decode_fits(cell, spec, shape, room, PROFILED_TOKENS)
        ]

    def check(self) -> None:
        """Raise MeasureError, before minutes of work, if what `run` measures will be too little to fit."""
        places = {_chunk_place(*chunk) for chunk in self._chunks}
        places.update(*(_decode_places(label, cell, self._specs[label]) for label, cell in self._decodes))
        for label in self._specs:
            for phase in PHASES:
                of = [(tokens, end) for labels, known, tokens, end in places if known == phase and label in labels]
                with _enough(phase, label):
                    check_grid(of, pairs=phase == "prefill")

    @property
    def measurements(self) -> int:
        """Count the reports of progress that `run` makes."""
        return len(self._specs) + self._plan.repeats * (len(self._chunks) + len(self._decodes))

    def run(self, progress: Progress) -> list[Measurement]:
        """Measure everything. Raises MeasureError if the engine cannot serve a policy on this model."""
        for label, spec in self._specs.items():
            progress(f"warm-up, {label}")
            ttft.warm_up(self._engine(self._step_tokens), spec)
        # One token more than is ever computed, so that no prompt is handed off by itself.
        random = synthetic.random_keys_and_values(self._model, max(self._plan.lengths) + 1, self._plan.seed)
        for _ in range(self._plan.repeats):
            for labels, chunk in self._chunks:
                progress(f"chunk of {chunk.tokens} up to {chunk.end:,}, {labels[0]}")
                self._measure_chunk(labels, chunk, random)
            for label, cell in self._decodes:
                progress(f"{cell.batch} x {cell.prompt:,}, {label}")
                self._measure_decode(label, cell, random)
        return [_measurement(place, seconds) for place, seconds in self._seconds.items()]

    def _engine(self, tokens: int) -> Engine:
        """Build an engine with steps of so many tokens, without a store that would cut chunks at its blocks."""
        if tokens not in self._engines:
            config = self._config.model_copy(
                update={"step_tokens": tokens, "max_slots": min(tokens, self._config.max_slots)}
            )
            self._engines[tokens] = Engine(self._model, config, PrefixCacheConfig(enabled=False), clock=now)
        return self._engines[tokens]

    def _measure_chunk(self, labels: tuple[str, ...], cell: grid.Chunk, random: Tensor) -> None:
        engine, spec = self._engine(cell.tokens), self._specs[labels[0]]
        prompt = synthetic.random_prompt(self._model, spec, random[:, :, :, : cell.end + 1])
        synthetic.begin_chunk(engine, spec, prompt, cell.end - cell.tokens)
        watch = Stopwatch(self._model.device)
        engine.step()
        self._seconds[_chunk_place(labels, cell)].append(watch.seconds())
        if prompt.computed != cell.end:
            raise MeasureError(f"{labels[0]}: the engine computed {prompt.computed} tokens instead of {cell.end}")
        synthetic.end_all(engine)

    def _measure_decode(self, label: str, cell: grid.Decode, random: Tensor) -> None:
        """Measure a batch from its hand-offs to its end."""
        engine, spec = self._engine(self._step_tokens), cell.spec(self._specs[label])
        prompt = synthetic.random_prompt(self._model, spec, random[:, :, :, : cell.prompt])
        decoded = decode(engine, spec, prompt, cell.batch, PROFILED_TOKENS)
        step, hand_off = _decode_places(label, cell, self._specs[label])
        self._seconds[step].append(decoded.tpot)
        self._seconds[hand_off].append(decoded.hand_off)


def _chunk_place(labels: tuple[str, ...], cell: grid.Chunk) -> Place:
    return labels, "prefill", cell.tokens, cell.end


def _decode_places(label: str, cell: grid.Decode, wanted: PolicySpec) -> tuple[Place, Place]:
    """Return the places of a batch's decode steps and of its hand-offs."""
    spec = cell.spec(wanted)
    context = cell.context(spec, timed_steps(PROFILED_TOKENS), PROFILED_TOKENS)
    return ((label,), "decode", cell.batch, context), ((label,), "hand_off", cell.kept(spec), cell.prompt)


def fits(measured: Sequence[Measurement], labels: Iterable[str]) -> tuple[PolicyProfile, ...]:
    """Fit the coefficients of every policy. Raises MeasureError if the grid was too small.

    They are fitted to the least of the repeats: whatever disturbs a step makes it longer, never shorter.
    """
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
    with _enough(phase, label):
        return fit([MeasuredStep(one.tokens, one.context, one.least) for one in of], pairs=phase == "prefill")


@contextmanager
def _enough(phase: Phase, label: str) -> Iterator[None]:
    """Say what to do where steps cannot be fitted. Raises MeasureError."""
    try:
        yield
    except ValueError as error:
        raise MeasureError(
            f"{phase} of {label}: {error}. Give more --lengths or --batches, or more room for them with "
            "--set engine.kv_bytes=..."
        ) from None


def _alike(specs: dict[str, PolicySpec]) -> list[tuple[str, ...]]:
    """Return policies in groups that want the same of a prefill chunk: the attention of all queries summed, or not."""
    groups: dict[bool, list[str]] = defaultdict(list)
    for label, spec in specs.items():
        long = 1 << 20  # a prompt that no budget spares
        groups[budgets.needs_column_sums(grid.Decode(1, long, grid.SHARES[0]).spec(spec), long)].append(label)
    return [tuple(group) for group in groups.values()]


def _measurement(place: Place, seconds: Sequence[float]) -> Measurement:
    policies, phase, tokens, context = place
    spread = Spread.of(seconds)
    return Measurement(
        policies=policies,
        phase=phase,
        tokens=tokens,
        context=context,
        seconds=spread.median,
        least=spread.least,
        most=spread.most,
    )
