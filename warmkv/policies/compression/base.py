"""What a compression policy is: a prefill rule and a decode rule."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from warmkv.config import PolicySpec
from warmkv.policies import budgets


class Policy(ABC):
    """A compression policy for one spec. Stateless: everything about a request is an argument."""

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec

    @property
    def sinks(self) -> int:
        """First cache entries that a ring never overwrites."""
        return 0

    @property
    def ring(self) -> bool:
        """Whether new tokens overwrite the oldest entry behind the sinks once the budget is used up."""
        return False

    def observed_queries(self, prompt_tokens: int) -> int:
        """Queries at the end of the prompt that `select` wants to see."""
        return budgets.observed_queries(self.spec, prompt_tokens)

    def kept(self, prompt_tokens: int) -> int:
        """Entries per KV head that survive the hand-off."""
        return budgets.kept_tokens(self.spec, prompt_tokens)

    @abstractmethod
    def select(self, keys: Tensor, queries: Tensor | None, scale: float) -> Tensor:
        """Positions that a layer keeps of a prompt that exceeds its budget.

        keys [kv_heads, T, head_dim] and queries [q_heads, observed, head_dim] of the prompt's last tokens, both after
        rotation; `scale` is the factor of the attention logits. Returns int64 [kv_heads, kept], ascending.
        """
