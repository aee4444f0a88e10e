"""Auto: the method that the literature advises for a prompt of this length and task (`policies/budgets.py`)."""

from __future__ import annotations

from warmkv.policies import budgets, compression
from warmkv.policies.compression.base import Policy, Selection
from warmkv.policies.compression.prefill_state import PrefillState


class Auto(Policy):
    """Hands every prompt to the policy that its length calls for."""

    def select(self, prompt: PrefillState) -> list[Selection]:
        return compression.build(budgets.resolve_auto(self.spec, prompt.tokens)).select(prompt)
