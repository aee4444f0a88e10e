"""Run the model once for a pass, and draw the next tokens from its logits (cf. vLLM's `Executor.execute_model`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future

import torch
from torch import Tensor

from warmkv.config import EngineConfig
from warmkv.replicas.constraints.masks import Masks
from warmkv.replicas.engine import step_inputs
from warmkv.replicas.engine.batch_invariant import InvariantRunner
from warmkv.replicas.engine.decode_step import DecodeSteps
from warmkv.replicas.engine.forward import Compiled, Forward, ModelRunner, compiled, compiles
from warmkv.replicas.engine.graphs import graphs_on
from warmkv.replicas.engine.passes import Pass
from warmkv.replicas.engine.sampling import NO_TOKEN, Draws, draw, note_prompt_logprobs
from warmkv.replicas.engine.scheduler import Sequence
from warmkv.replicas.engine.step_inputs import StepInputs
from warmkv.replicas.engine.warm_up import compile_model
from warmkv.replicas.loading.last_layer import DrawnOnly
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.slots.decode_state import DecodeState
from warmkv.replicas.slots.row_tables import padded_batch
from warmkv.replicas.slots.step_buffer import StepBuffer

log = logging.getLogger(__name__)


class ModelExecutor:
    """Execute the passes of an engine, in its thread."""

    def __init__(self, model: LoadedModel, config: EngineConfig, buffer: StepBuffer, step_tokens: int) -> None:
        """Prepare for passes of at most `step_tokens` of prompts beside a token of each slot.

        `buffer` holds their inputs. Raises BatchInvarianceError as `InvariantRunner`.
        """
        self._model, self._config, self._buffer = model, config, buffer
        step_inputs.reserve(buffer, step_tokens, config.max_slots)
        is_compiled = compiles(config, model.device)
        eager = InvariantRunner if config.batch_invariant else ModelRunner
        self.forward: Forward = compiled(model, model.device) if is_compiled else eager(model)
        graphs = graphs_on(model.device) if is_compiled else None
        self.steps = DecodeSteps(buffer, model.vocabulary, graphs, config.batch_invariant)
        self._masks = Masks(model.vocabulary, model.device)
        self.watch_logits: Callable[[Items[Sequence], Tensor], None] | None = None
        """Sees what tokens of sequences are drawn from, [sequences, vocabulary]."""

    def compile(self, say: Callable[[str], None]) -> None:
        """Compile the model where it is to be; `say` is told what is next.

        If it cannot be, passes stay eager unless `engine.compile` is on.
        """
        if not isinstance(self.forward, Compiled):
            return
        try:
            compile_model(self.forward, say)
        except Exception:
            if self._config.compile == "on":
                raise
            log.exception("the model cannot be compiled here: it stays eager")
            self.forward = ModelRunner(self._model)

    def execute(self, batch: Pass) -> list[int]:
        """Run the model once; returns the next token of each prompt and sequence, NO_TOKEN of prompts that go on."""
        drawing = [*batch.ending, *batch.decoding]
        masks = self._begin_masks(drawing)
        inputs = step_inputs.upload(self._buffer, batch, drawing)
        if not batch.prompts:
            assert batch.state is not None
            return self._decode(drawing, batch.state, inputs, masks)
        is_scored = any(prompt.is_scored for prompt in batch.prompts)
        found = self.forward(inputs.ids, inputs.positions, DrawnOnly(batch, inputs.places, is_scored))
        logits, scored = found.tensor_split([len(drawing)])
        note_prompt_logprobs(batch.prompts, scored, row_by_row=self._config.batch_invariant)
        tokens = iter(self._draw(drawing, logits, masks, inputs.draws) if drawing else ())
        drawn = [next(tokens) if sequence.workspace.ends else NO_TOKEN for sequence in batch.prompts]
        for sequence in batch.prompts:
            sequence.workspace.end_chunk()
        return [*drawn, *tokens]

    def keep_drawn(self) -> None:
        """Keep drawn tokens on the device from now on, where the ids of the next step refer to them."""
        most = padded_batch(self._config.max_slots)
        self.steps.drawn = torch.zeros(most, dtype=torch.int64, device=self._model.device)

    def launch(self, sequences: list[Sequence], state: DecodeState, sources: list[int]) -> Tensor:
        """Start a step as `Overlap.launch`, after `keep_drawn`."""
        return self.steps.launch(self.forward, sequences, state, sources)

    def close(self) -> None:
        """End the thread that computes masks."""
        self._masks.close()

    def _decode(
        self, drawing: list[Sequence], state: DecodeState, inputs: StepInputs, masks: Future[Tensor] | None
    ) -> list[int]:
        """Run a decode step and sample."""
        count = len(drawing)
        processed, kept = any(sequence.processor for sequence in drawing), self.watch_logits is not None
        logits, tokens = self.steps.decode(self.forward, state, inputs, processed=processed, kept=kept)
        draws = None if inputs.draws is None else inputs.draws.first(count)
        return self._draw(drawing, logits[:count], masks, draws, None if tokens is None else tokens[:count])

    def _begin_masks(self, sequences: Items[Sequence]) -> Future[Tensor] | None:
        """Begin to compute the masks of constraints beside the model; None if no sequence has one."""
        processors = [sequence.processor for sequence in sequences if sequence.processor is not None]
        matchers = [processor.matcher for processor in processors if processor.matcher is not None]
        return self._masks.begin(matchers) if matchers else None

    def _draw(
        self,
        sequences: list[Sequence],
        logits: Tensor,
        masks: Future[Tensor] | None,
        draws: Draws | None,
        tokens: Tensor | None = None,
    ) -> list[int]:
        """Sample the next token of each sequence; NO_TOKEN where the logits are not finite."""
        if self.watch_logits is not None:
            self.watch_logits(sequences, logits)
        return draw(sequences, logits, masks, draws, tokens, row_by_row=self._config.batch_invariant)
