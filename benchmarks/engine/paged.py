"""The peer continuous batching (`generate_batch`): a paged full cache, prefixes shared, no compression.

Its cache is filled with the same synthetic keys and values: while the prompts are "computed" for the first time, the
model's forward pass is replaced by one that only writes them through the cache's own `update`. The prompts' pages stay
in the peer's prefix cache, so that its real forward pass has one token of each to compute, as everybody else.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.engine.generate import Run, step_seconds
from benchmarks.engine.setting import Models
from benchmarks.engine.synthetic import Contexts

PAGE = 64
"""Tokens of a page, as in a block of warmkv."""
FILLED_AT_ONCE = 1_024
"""Tokens of a prompt that are written in a step. The peer holds a mask of so many rows over its whole cache."""
PATIENCE = 600
"""Seconds without an answer after which the peer is taken for dead."""


class ContinuousBatching:
    """Continuous batching with flash attention where that is installed (transformers decides), else sdpa.

    Without flash attention every query of a batch is computed against the keys of all sequences, under a mask. So a
    batch of one sequence after the other may be faster than all in one: `at_once` says how many.
    """

    def __init__(self, models: Models, contexts: Contexts, new_tokens: int, at_once: int | None = None) -> None:
        self._models, self._contexts, self._new, self._at_once = models, contexts, new_tokens, at_once
        self.name = "continuous_batching" if at_once is None else f"continuous_batching_{at_once}"

    def run(self, sequences: int, steps: int) -> Run:
        pages = sequences * -(-(self._contexts.tokens + self._new + 1) // PAGE) + 2
        prompts = self._contexts.ids[:sequences].tolist()
        with manager(self._models.peer, pages, FILLED_AT_ONCE, self._at_once) as paged:
            with self._writing() as only:
                for number, prompt in enumerate(prompts):
                    only(number)
                    answers(paged, [prompt], [2])  # of one that ends with its prompt, no page is kept
            with self._watching() as widest:
                drawn = answers(paged, prompts, [steps] * sequences)
        if widest() > sequences:
            raise RuntimeError("it computed the contexts anew")
        stamps = [answer.timestamps for answer in drawn]
        if self._at_once is None:
            seconds = step_seconds([max(at) for at in zip(*stamps, strict=True)])
        else:
            seconds = sum(step_seconds(times) for times in stamps) / self._at_once
        return Run(seconds, [answer.generated_tokens for answer in drawn])

    @contextmanager
    def _writing(self) -> Iterator[Callable[[int], None]]:
        """Let forward passes write the context of the sequence named last, and compute nothing, while open."""
        model, contexts = self._models.peer, self._contexts
        shape, current = self._models.warm.kv_shape, 0

        def only(number: int) -> None:
            nonlocal current
            current = number

        def write(input_ids: Tensor, position_ids: Tensor, cache: Any, **keywords: Any) -> SimpleNamespace:
            positions = position_ids[0].long().clamp(max=contexts.tokens - 1)
            for layer in range(shape.layers):
                keys, values = contexts.of(current)[:, layer][:, :, positions][:, None]
                if "kwargs" in inspect.signature(cache.update).parameters:
                    cache.update(keys, values, layer, dict(keywords))
                else:  # until transformers 5.20 or so
                    cache.update(keys, values, layer, keywords["read_index"], keywords["write_index"])
            kept = keywords.get("logits_to_keep")
            rows = input_ids.shape[1] if kept is None else len(kept)
            return SimpleNamespace(logits=torch.zeros(1, rows, model.config.vocab_size, device=model.device))

        model.forward = write
        try:
            yield only
        finally:
            del model.forward  # that of the class again

    @contextmanager
    def _watching(self) -> Iterator[Callable[[], int]]:
        """Yield a function that tells how many tokens were computed at most in one forward pass."""
        most = 0

        def look(_: Any, __: Any, keywords: dict[str, Any]) -> None:
            nonlocal most
            most = max(most, keywords["input_ids"].shape[1])

        hook = self._models.peer.register_forward_pre_hook(look, with_kwargs=True)
        try:
            yield lambda: most
        finally:
            hook.remove()


@contextmanager
def manager(model: Any, pages: int, chunk: int, at_once: int | None = None) -> Iterator[Any]:
    """Yield a running manager of continuous batching with so many pages, `chunk` tokens in a step at most."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    size = "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"
    config = ContinuousBatchingConfig(
        num_blocks=pages,
        max_batch_tokens=chunk,
        max_requests_per_batch=at_once,
        safety_margin=0.0,
        max_memory_percent=0.95,
        **{size: PAGE},
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1)
    try:
        with model.continuous_batching_context_manager(generation, continuous_batching_config=config) as running:
            yield running
    finally:
        model.set_attn_implementation("sdpa")  # the peer leaves its own behind if it fails


def answers(running: Any, prompts: list[list[int]], new_tokens: list[int]) -> list[Any]:
    """Let prompts be answered together, greedily; in their order. Raises RuntimeError if the peer fails."""
    names = [
        running.add_request(prompt, max_new_tokens=new, record_timestamps=True)
        for prompt, new in zip(prompts, new_tokens, strict=True)
    ]
    found: dict[str, Any] = {}
    while len(found) < len(names):
        answer = running.get_result(timeout=PATIENCE)
        if answer is None or answer.error is not None:
            raise RuntimeError(f"continuous batching failed: {answer.error if answer else 'no answer'}")
        if answer.is_finished():
            found[answer.request_id] = answer
    return [found[name] for name in names]


def cache_bytes(running: Any) -> int:
    """Return bytes of the peer's paged cache."""
    cache = running.batch_processor.cache
    tensors = [cache.cache_tensor] if hasattr(cache, "cache_tensor") else [*cache.key_cache, *cache.value_cache]
    return sum(tensor.nbytes for tensor in tensors)
