"""PyramidKV (Cai et al., 2024, arXiv 2406.02069): lower layers keep more than upper ones."""

from __future__ import annotations

from warmkv.knobs import VOTES, Knob
from warmkv.policies import budgets
from warmkv.policies.compression.method import register
from warmkv.policies.compression.methods.snapkv import SnapKV


@register
class PyramidKV(SnapKV):
    """SnapKV under budgets that fall linearly with a layer's height."""

    name = "pyramidkv"
    knobs = (*VOTES, Knob("beta", int, 20, "how steep the pyramid is", ge=1, le=1000))
    keeps = "as snapkv"
    differs = "budgets by layer"
    source = "2406.02069; Zefan-Cai/KVCache-Factory"
    deviates = "what rounding the step gives too much is taken off; the LongBench runs take window 8, kernel 7, max"
    by_default_in_eval = False

    def layer_budgets(self, kept: int, prompt_tokens: int, layers: int) -> list[int]:
        falling = pyramid(kept, self.spec.window, prompt_tokens, layers, self.spec.beta)
        return budgets.with_room(self.spec, falling, kept)


def pyramid(budget: int, window: int, tokens: int, layers: int, beta: int) -> list[int]:
    """Return the entries of each layer, falling from the first to the last (section 4.2).

    All layers keep the same of a prompt shorter than twice the budget, windows aside, as in the authors' code. The step
    is rounded down, by which the paper's formula would exceed layers * budget; the excess is taken off every layer
    evenly, so that the total never does.
    """
    if budget <= window or layers == 1 or tokens < 2 * (budget - window):
        return [budget] * layers
    least = (budget - window) // beta
    most = 2 * (budget - window) - least
    if most >= tokens - window:
        most = tokens - window
        least = 2 * (budget - window) - most
    step, rest = divmod(most - least, layers - 1)
    return [most - -(-rest // 2) - layer * step + window for layer in range(layers)]
