"""What replicas can do, by their engine. The gateway and its router go by this alone, not by the kind of engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from warmkv.policy_spec import PolicySpec


@dataclass(frozen=True, slots=True)
class Needs:
    """What a request needs of the replica that computes it."""

    policy: PolicySpec
    thinking_budget: bool = False
    prompt_logprobs: bool = False
    resumed_constraint: bool = False  # going on with a constrained answer that another replica began
    resumed_penalties: bool = False  # going on with an answer whose penalties count what another replica drew


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What replicas of one group can do."""

    engine: str
    policies: tuple[str, ...] | None = None  # compression policies by their labels; None: all of them
    thinking_budget: bool = True
    prompt_logprobs: bool = True
    resumed_constraint: bool = True
    resumed_penalties: bool = True
    moves_blocks: bool = True  # gives blocks to other replicas of the group, and takes theirs
    keeps_generated: bool = False  # stores blocks of generated tokens, before they are part of a prompt

    @property
    def is_limited(self) -> bool:
        """Return True if there is a request that it cannot serve."""
        return self.policies is not None or not all(getattr(self, name) for name in NAMES)

    def lacks(self, needs: Needs) -> str | None:
        """Return what cannot be had of what is needed, as a sentence; None if all can."""
        if self.policies is not None and needs.policy.label not in self.policies:
            served = ", ".join(self.policies)
            return f"{needs.policy.label} cannot be had from an engine of kind {self.engine}, which serves {served}"
        for name, text in NAMES.items():
            if getattr(needs, name) and not getattr(self, name):
                return f"{text} cannot be had from an engine of kind {self.engine}"
        return None


NAMES = {
    "thinking_budget": "thinking budgets",
    "prompt_logprobs": "prompt_logprobs",
    "resumed_constraint": "the rest of a constrained answer that another replica began",
    "resumed_penalties": "frequency and presence penalties on what another replica drew",
}
"""Needs that an engine has or lacks, as a refusal names them."""


def able(groups: Mapping[str, Capabilities], needs: Needs) -> frozenset[str]:
    """Return the names of the groups of replicas that can serve a request."""
    return frozenset(name for name, group in groups.items() if group.lacks(needs) is None)


def move_blocks(groups: Collection[Capabilities]) -> bool:
    """Return True if replicas of these groups can fetch blocks from each other: those of one that does."""
    return len(groups) == 1 and all(group.moves_blocks for group in groups)


def refusal(groups: Collection[Capabilities], needs: Needs) -> str | None:
    """Return why no group can serve a request; None if one can."""
    lacking = [group.lacks(needs) for group in groups]
    if None in lacking:
        return None
    return "; ".join(dict.fromkeys(text for text in lacking if text is not None))
