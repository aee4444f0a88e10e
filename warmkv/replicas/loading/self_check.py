"""Compare an engine with the model it serves, at every start: logits of chunks and decode steps, position by position.

The model's own plain forward computes the same tokens at once, without a cache, by the eager attention of transformers
on the same weights. What differs by more than rounding is a wrong answer to every request.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from warmkv.policies.compression.hook import ATTENTION
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.engine.scheduler import Sequence as Drawing
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.loading.structure import mixes_experts
from warmkv.replicas.protocol import GenerateRequest, SamplingParams, UnservableRequestError

log = logging.getLogger(__name__)

PROMPT, NEW, CHUNK = 96, 17, 40
"""Tokens of the prompt and drawn after it, and of a step: several chunks, of which the last is short."""
MOST_TOKENS = {"cpu": 256, "cuda": 1280}
"""Tokens that a check may compute to cross a sliding window; quadratic in memory, as eager attention is."""
LEAST = 1e-4
"""Relative error that is always allowed: what the order of sums does to float32 in a model with large activations."""
SURE = 8.0
"""Errors of the tolerance by which a logit must lead to decide which token is drawn."""
ROUNDINGS, DRAWS, MARGIN = 4.0, 2, 2.0
"""Where rounding sways the choice of experts: units in the last place by which each layer's output is moved to measure
that, how often, and how many times the largest error of these is allowed."""


@torch.inference_mode()
def check_engine(engine: Engine, say: Callable[[str], None] = lambda what: None) -> None:
    """Compute a prompt of several chunks and some decode steps, before `run`, and compare the logits of every draw.

    `say` is told what is done next. Do nothing where `engine.self_check` is off. Raises RuntimeError if the request
    fails, or with the first position at which logits differ by more than the weights' type explains.
    """
    if not engine.config.self_check:
        return
    say("comparing logits with the model's own forward")
    ids, prompt, got = _engine_logits(engine)
    expected = plain_logits(engine.model.module, ids, last=len(got))
    allowed = tolerance(engine.model.dtype, engine.model.kv_shape.layers)
    if mixes_experts(engine.model.module.config) and differing(got, expected, allowed).any():
        # A router that rounding sways is no error: how much that changes is measured.
        noise = rounding_error(engine.model.module, ids, expected)
        log.warning("rounding the output of each layer changes logits by %.2g of their spread", noise)
        allowed = max(allowed, MARGIN * noise)
    compare(got, expected, engine.model, allowed, first=prompt - 1)


def _engine_logits(engine: Engine) -> tuple[list[int], int, Tensor]:
    """Return the token ids computed, how many are the prompt, and the logits float32 [draws, vocabulary].

    The prompt is longer than the model's sliding window if that is affordable, and shorter where memory is. Another one
    shares its passes, and decodes beside its chunks and its first tokens.
    """
    most = MOST_TOKENS.get(engine.model.device.type, 0)
    windows = [window for window in engine.model.kv_shape.windows if window and window + 2 * NEW <= most]
    prompt, new = (
        min(max(PROMPT, *(window + NEW for window in windows)) if windows else PROMPT, engine.max_context),
        NEW,
    )
    while prompt + new > engine.max_context:
        prompt, new = max(1, prompt - NEW), min(new, engine.max_context // 2)
    scheduler, got = engine.scheduler, list[Tensor]()

    def watch(sequences: Sequence[Drawing], logits: Tensor) -> None:
        got.extend(row.float() for row, each in zip(logits, sequences, strict=True) if each.request.id == "self-check")

    engine.executor.watch_logits = watch
    tokens, scheduler.step_tokens = scheduler.step_tokens, min(CHUNK, scheduler.step_tokens)
    generator = torch.Generator().manual_seed(0)
    try:
        while True:
            ids: list[int] = torch.randint(engine.model.vocabulary, (prompt + new,), generator=generator).tolist()
            sampling = SamplingParams(max_tokens=new, ignore_eos=True, temperature=0.0)
            request = GenerateRequest(
                "self-check", tuple(ids[:prompt]), (), sampling, PolicySpec(), resume=tuple(ids[prompt:-1])
            )
            sampling = SamplingParams(max_tokens=1 + new // 2, ignore_eos=True, temperature=0.0)
            beside = GenerateRequest("beside it", tuple(ids[: 1 + prompt // 4]), (), sampling, PolicySpec())
            try:
                engine.finish(request, beside)
                return ids[:-1], prompt, torch.stack(got)
            except UnservableRequestError:
                if prompt == 1:
                    raise
                prompt = prompt // 2
    finally:
        engine.executor.watch_logits, scheduler.step_tokens = None, tokens


@torch.inference_mode()
def plain_logits(module: Any, ids: list[int], last: int) -> Tensor:
    """Return the logits float32 [last, vocabulary] of the model's own forward, by eager attention."""
    module.set_attn_implementation("eager")
    try:
        tokens = torch.tensor([ids], device=module.device)
        logits: Tensor = module(input_ids=tokens, use_cache=False, logits_to_keep=last).logits[0, -last:]
        return logits.float()
    finally:
        module.set_attn_implementation(ATTENTION)


def tolerance(dtype: torch.dtype, layers: int) -> float:
    """Return the relative error of logits that rounding explains.

    Every layer adds to the residual twice, with random errors, to which the head and the logits themselves add a few.
    """
    return max(LEAST, torch.finfo(dtype).eps * (4 + math.sqrt(2 * layers)))


@torch.inference_mode()
def rounding_error(module: Any, ids: list[int], expected: Tensor) -> float:
    """Return the largest error of a position's logits when each decoder layer's output is rounded otherwise.

    Every element is moved at random by up to `ROUNDINGS` units in the last place, `DRAWS` times over. The error is
    relative, as in `position_errors`. 0 where the decoder has no list of layers.
    """
    layers = getattr(module.get_decoder(), "layers", ())
    generator = torch.Generator(module.device).manual_seed(0)

    def moved(_: Any, given: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        units = torch.rand(hidden.shape, generator=generator, device=hidden.device).mul_(2).sub_(1) * ROUNDINGS
        hidden = (hidden * (1 + units * torch.finfo(hidden.dtype).eps)).to(hidden.dtype)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    hooks = [layer.register_forward_hook(moved) for layer in layers]
    try:
        again = [plain_logits(module, ids, last=len(expected)) for _ in range(DRAWS)]
        return max(float(position_errors(logits, expected).max()) for logits in again)
    finally:
        for hook in hooks:
            hook.remove()


def position_errors(got: Tensor, expected: Tensor) -> Tensor:
    """Return the root mean square error of logits [n, vocabulary] over their standard deviation: [n]."""
    return (got - expected).square().mean(dim=-1).sqrt() / _spread(expected)


def _spread(logits: Tensor) -> Tensor:
    return logits.std(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)


def differing(got: Tensor, expected: Tensor, allowed: float) -> Tensor:
    """Return which positions of logits [n, vocabulary] differ by more than `allowed`: bool [n].

    The highest logit must be the same where it leads by more than `SURE` such errors.
    """
    top = expected.topk(min(2, expected.shape[-1]), dim=-1)
    leads = (top.values[:, 0] - top.values[:, -1]) / _spread(expected) > SURE * allowed
    return ~(position_errors(got, expected) <= allowed) | (leads & (got.argmax(dim=-1) != top.indices[:, 0]))  # or NaN


def compare(got: Tensor, expected: Tensor, model: LoadedModel, allowed: float, *, first: int) -> None:
    """Raise RuntimeError unless logits [n, vocabulary] are equal within a relative error.

    `first` is the first position.
    """
    wrong = differing(got, expected, allowed)
    if not wrong.any():
        return
    at = int(wrong.nonzero()[0])
    raise RuntimeError(
        f"{type(model.module).__name__} is computed wrongly: at position {first + at} logits differ from the model's "
        f"own forward by {float(position_errors(got, expected)[at]):.2g} of their spread, where {model.dtype} explains "
        f"{allowed:.2g} ({int(wrong.sum())} of {len(wrong)} positions are wrong). The replica does not start; "
        "engine.self_check=false turns this check off"
    )
