"""Perplexity along a stream many times longer than the cache: what each policy forgets, and whether it breaks.

The stream is held-out source code, decoded token by token with all policies in one batch, each at the bytes of the
same number of tokens. The gold standard is the sliding window recomputed for every few tokens: it keeps no stale
state, and costs quadratically more (StreamingLLM, arXiv 2309.17453, section 4.1).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from warmkv.evaluation import forcing, matching
from warmkv.evaluation.results import RECOMPUTED, Row
from warmkv.evaluation.tasks import Texts
from warmkv.policies.compression.prefill_state import PrefillState, TokenClasses
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.slots.slots import SlotPool

LARGEST_CACHE = 512
SEGMENTS = 16


def tokens(texts: Texts, seed: int, count: int) -> list[int]:
    """Return the stream: `count` tokens of source code from an offset that the seed decides."""
    rng = random.Random(f"{seed}/stream")
    return [*texts.start, *texts.source(rng, count - len(texts.start))]


def cache_tokens(model: LoadedModel, count: int) -> int:
    """Return tokens whose full cache's bytes every policy may use: well below the model's range and the stream's
    length.
    """
    return min(LARGEST_CACHE, model.max_context // 4, count // 4)


def evaluate(
    model: LoadedModel,
    ids: Sequence[int],
    specs: dict[str, PolicySpec],
    seed: int,
    progress: Callable[[int], None],
    classes: TokenClasses | None = None,
) -> list[Row]:
    """Return the perplexity of every segment under every policy.

    `progress` is told tokens as they are done, len(ids) in all.
    """
    cache = cache_tokens(model, len(ids))
    prompt, forced = ids[:cache], ids[cache:]
    allowed = matching.full_bytes(model.kv_shape, cache, 1)
    matched = {label: _matched(model, spec, cache, len(forced), allowed) for label, spec in specs.items()}
    reached = {label: spec for label, spec in matched.items() if spec is not None and _turns(spec)}
    losses, sizes = _decoded(model, prompt, forced, reached, allowed, progress, classes)
    losses[RECOMPUTED] = recomputed(model, ids, cache, progress)
    sizes[RECOMPUTED] = allowed
    rows = []
    length = -(-len(forced) // SEGMENTS)
    for label in (RECOMPUTED, *(label for label in reached if label in losses)):
        for start in range(0, len(forced), length):
            piece = losses[label][start : start + length]
            nll = float(piece.double().mean())
            rows.append(
                {
                    "policy": label,
                    "start": cache + start,
                    "tokens": len(piece),
                    "nll": nll,
                    "perplexity": math.exp(nll),
                    "cache_tokens": cache,
                    "bytes": sizes[label],
                    "seed": seed,
                }
            )
    return rows


def _matched(model: LoadedModel, spec: PolicySpec, prompt: int, new: int, allowed: int) -> PolicySpec | None:
    if spec.method.rotates and not model.fixed_rotation:
        return None
    return matching.match(spec, model.kv_shape, prompt, new, allowed)


def _turns(spec: PolicySpec) -> bool:
    """Return True if its cache can be rerotated to small positions, without which a stream ends at the model's range.

    Sinks beside packed groups stay as they were cached, which only StreamingLLM makes good.
    """
    apart = spec.decode == "ring" and bool(spec.sinks) and spec.storage_format.group > 1
    return not apart or spec.method.rebased


def _decoded(
    model: LoadedModel,
    prompt: Sequence[int],
    forced: Sequence[int],
    specs: dict[str, PolicySpec],
    allowed: int,
    progress: Callable[[int], None],
    classes: TokenClasses | None,
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return losses [forced] in nats and bytes in use of every policy, decoded in one batch."""
    pool = SlotPool(model.kv_shape, model.dtype, model.device)
    computed, logits = forcing.prefill(model, prompt, specs.values(), classes)
    filled = {}
    for label, spec in specs.items():
        if (one := forcing.fill(model, pool, computed, spec, len(forced), allowed)) is not None:
            filled[label] = one
    del computed
    slots = [one.slot for one in filled.values()]
    _, losses = forcing.force(model, pool, slots, logits, forced, progress=lambda: progress(1))
    return dict(zip(filled, losses, strict=True)), {label: one.bytes for label, one in filled.items()}


@torch.inference_mode()
def recomputed(
    model: LoadedModel, ids: Sequence[int], cache: int, progress: Callable[[int], None] = lambda n: None
) -> Tensor:
    """Return losses [len(ids) - cache] where the last tokens are computed anew, with at most `cache` tokens of context.

    One computation scores an eighth of a window, so the context is between seven eighths of the cache and all of it.
    `progress` is told cache + 1 in all: what decoding leaves of the stream's length.
    """
    stride, shape, out, told = max(1, cache // 8), model.kv_shape, [], 0
    for start in range(cache, len(ids), stride):
        end = min(start + stride, len(ids))
        window = ids[end - 1 - cache : end - 1]
        prompt = PrefillState.allocate(
            shape, window, (), dtype=model.dtype, device=model.device, inv_freq=model.inv_freq
        )
        inputs = torch.tensor([list(window)], device=model.device)
        logits = forcing.forward_prompt(model, prompt, inputs, end - start).float()
        wanted = torch.tensor(list(ids[start:end]), device=model.device)
        out.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none"))
        done = (cache + 1) * (end - cache) // (len(ids) - cache)
        progress(done - told)
        told = done
    return torch.cat(out).cpu()
