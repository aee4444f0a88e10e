"""Run the model as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from warmkv.policies.compression.hook import StepState
from warmkv.replicas.loading.last_layer import DrawnOnly
from warmkv.replicas.loading.load import LoadedModel

LEAST_LEFT_OUT = 16
"""Positions of a pass as of which the last layer leaves them out: its queries are computed twice for the others."""


class ModelRunner:
    """Run the model eagerly, for prompts and for sequences that decode."""

    def __init__(self, model: LoadedModel) -> None:
        self._module, self._leaves_at_drawn = model.module, model.leaves_at_drawn
        # States know what is seen. Without a ready mask transformers looks for packed sequences, which a GPU waits for.
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)

    def __call__(self, ids: Tensor, positions: Tensor, state: StepState) -> Tensor:
        """Return logits [batch, vocabulary] of the last position of ids [batch, n] at positions [batch, n].

        By a `DrawnOnly` of a single row, those of its places: [drawn, vocabulary].
        """
        if not isinstance(state, DrawnOnly):
            return self.logits(ids, positions, state, 1)[:, -1]
        few = ids.shape[1] - len(state.places) >= LEAST_LEFT_OUT
        if state.is_scored or not few or not self._leaves_at_drawn:
            return self.logits(ids, positions, state.state, state.places)[0]
        return self.logits(ids, positions, state, 0)[0]

    def logits(self, ids: Tensor, positions: Tensor, state: StepState, keep: int | Tensor) -> Tensor:
        """Return logits [batch, kept, vocabulary] of the last `keep` positions, all for 0, or of those it names."""
        output = self._module(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._mask,
            use_cache=False,
            logits_to_keep=keep,
            warmkv=state,
        )
        logits: Tensor = output.logits
        return logits
