"""Auto: the method that the literature advises operators to use for a prompt of this length and task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from warmkv.knobs import PROTECT, Knob
from warmkv.policies import budgets
from warmkv.policies.compression.method import Method, register

if TYPE_CHECKING:
    from warmkv.policy_spec import PolicySpec

SHORT, MEDIUM, LONG = 8_192, 32_768, 131_072
REASONING_FLOOR = 0.3


@register
class Auto(Method):
    """Hand every prompt to the policy that its length calls for.

    Nothing below 8K tokens; half of the prompt until 32K, by H2O where its column sums are affordable and by SnapKV
    elsewhere; SnapKV with a wide window until 128K; quantisation on top beyond. Reasoning never gets below 30%, and
    both ends of the prompt (system prompt and question) are protected.
    """

    name = "auto"
    knobs = (
        Knob(
            "task",
            Literal["general", "reasoning", "few_shot"],
            "general",
            "what is asked for, where the method chooses by it",
        ),
        Knob("scoring", float, 0.25, "most that scoring may add to prefill, a share of it", ge=0),
    )
    keeps = "what it chooses does"
    decoding = "what it chooses does"
    differs = ""
    decode_rules = ("append",)
    has_budget = has_scores = False
    delegates = reads_classes = True

    def resolve(self, prompt_tokens: int) -> PolicySpec:
        spec = self.spec
        if prompt_tokens < SHORT:
            return budgets.whole(spec)
        common: dict[str, Any] = {"shots": spec.task == "few_shot", "protect": PROTECT, **spec.stored_as}
        if spec.storage == "model" and prompt_tokens > LONG:
            common |= {"storage": "kivi4", "residual": spec.residual}
        least = REASONING_FLOOR if spec.task == "reasoning" else 0.0
        if prompt_tokens <= MEDIUM:
            if column_sums_share(prompt_tokens) <= spec.scoring:
                return budgets.made("h2o", 0.5, **common)
            return budgets.made("snapkv", 0.5, window=64, **common)
        if prompt_tokens <= LONG:
            return budgets.made("snapkv", max(0.2, least), window=64, **common)
        return budgets.made("snapkv", max(0.1, least), window=128, **common)


def column_sums_share(prompt_tokens: int, hidden: int = 4096) -> float:
    """Return the time that column sums add to a prompt's prefill on a GPU, as a share of it; `hidden` is the width.

    Of a token and layer, prefill takes 24 hidden^2 operations for the weights and 2 hidden T for attention, in 16 bits.
    Column sums write, mask, normalise and add up hidden / 128 heads * T / 2 logits in float32: 24 bytes each, and a
    byte takes as long as 185 operations (an H100 at half of its peak, its memory at 0.8). Window votes read as much
    once for `window` queries, so their share is w / T of this.
    """
    return 17 * prompt_tokens / (24 * hidden + 2 * prompt_tokens)
