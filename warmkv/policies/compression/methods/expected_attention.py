"""Expected Attention (Devoto et al., 2025, arXiv 2510.00636): what queries yet to come will attend to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmkv.knobs import SINKS, WINDOW, Knob
from warmkv.policies.compression.method import Method, register

if TYPE_CHECKING:
    from torch import Tensor

    from warmkv.policies.compression.prefill_state import PrefillState

PIECE = 4096
"""Keys that are looked at together."""


@register
class ExpectedAttention(Method):
    """Keep the tokens whose expected contribution to the next `horizon` queries is largest, per KV head.

    Queries before rotation are taken as normally distributed, with mean and covariance of the prompt's last `window`
    ones; their rotation is averaged over the positions to come. The expected logit is then that of the mean plus half
    the variance, and the score softmax(logit) * |v| (section 3.1). The first `sinks` tokens are kept and left out of
    all of this, as in the authors' code. The paper takes all queries of the prompt; the last ones make the choice
    independent of what was cached.
    """

    name = "expected_attention"
    knobs = (
        SINKS,
        WINDOW.by_default(128),
        Knob("horizon", int, 512, "future positions averaged over", ge=1, le=65536),
    )
    keeps = "most useful to queries to come"
    source = "2510.00636; NVIDIA/kvpress"
    deviates = "the last `window` queries instead of all; no constant is added to the scores"
    rotates = True

    def observed_queries(self, prompt_tokens: int, compressed: bool) -> int:
        return min(int(self.spec.window), prompt_tokens) if compressed else 0

    def ends(self, budget: int) -> tuple[int, int]:
        return min(self.spec.sinks, budget), 0

    def score(self, prompt: PrefillState, layer: int, budget: int) -> Tensor:
        import torch

        assert prompt.inv_freq is not None
        sinks = 0 if prompt.first else self.ends(budget)[0]  # they have left a sliding window
        queries = prompt.last_queries(layer, min(self.spec.window, prompt.tokens - sinks)).double()  # [q_heads, w, d]
        window, tokens, device = queries.shape[1], prompt.tokens, queries.device
        end = prompt.first + tokens
        past = torch.arange(end - window, end, dtype=torch.float64, device=device)
        future = torch.arange(end, end + self.spec.horizon, dtype=torch.float64, device=device)
        angles, ahead = past[:, None] * prompt.inv_freq, future[:, None] * prompt.inv_freq
        queries = _rotate(queries, angles.cos(), -angles.sin())
        mean = queries.mean(dim=1)
        centred = queries - mean[:, None]
        cos, sin = ahead.cos().mean(dim=0), ahead.sin().mean(dim=0)
        mean, centred = _rotate(mean, cos, sin), _rotate(centred, cos, sin)
        scale = prompt.softmax(layer).scale
        covariance = centred.transpose(1, 2) @ centred / window
        group = len(queries) // prompt.kv_heads
        score = torch.zeros(prompt.kv_heads, tokens, dtype=torch.float64, device=device)
        for member in range(group):  # one query head of every group at a time
            mu, spread = mean[member::group], covariance[member::group]
            logits = torch.empty_like(score)
            for first in range(0, tokens, PIECE):
                keys = prompt.keys[layer, :, first : first + PIECE].double()
                expected = scale * (keys @ mu[..., None])[..., 0]
                expected += scale**2 / 2 * ((keys @ spread) * keys).sum(dim=-1)
                logits[:, first : first + PIECE] = expected
            logits[:, :sinks] = float("-inf")
            score += logits.softmax(dim=-1)
        norm: Tensor = torch.linalg.vector_norm(prompt.values[layer], dim=-1, dtype=torch.float64)
        return (score * norm).float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., d] by angles of which cosine and sine [..., d/2] are given (halves convention)."""
    import torch

    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
