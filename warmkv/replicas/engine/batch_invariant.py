"""Batch invariance: what a request computes, to the last bit, depends neither on its company nor on its prompt's cuts.

Libraries choose kernels, and with them the order of sums, by shape. So what makes one row of another (products with
weights, norms, MLPs) gets a fixed number of rows at a time, padded with zeros. Attention has shapes of its own:
prompts go in tiles that begin at multiples of `QUERIES` (`PrefillState`), decoding row by row, or on a GPU sequence by
sequence (`RowTables.by_sequence`). A row's place in a tile must not matter either: `check` looks before a replica
starts.
Reference: He et al., Defeating Nondeterminism in LLM Inference (Thinking Machines, 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warmkv.policies.compression.hook import StepState
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.engine.forward import ModelRunner
from warmkv.replicas.loading.load import LoadedModel
from warmkv.replicas.loading.structure import mixes_experts
from warmkv.replicas.protocol import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from warmkv.replicas.engine.engine import Engine
    from warmkv.replicas.engine.scheduler import Sequence as Drawing

ROWS = {"cpu": 16}
"""Rows of a product: on a CPU as fast as all at once, and few enough for small batches."""
GPU_ROWS = 128
"""On a GPU products of fewer rows take as long."""
QUERIES = 64
"""Queries of a prompt that are attended at a time."""
ELEMENTS = 1 << 16
"""Of a norm, whose rows are narrow where it is that of each head."""

PROMPT, NEW = 150, 4
"""Tokens of the prompt that is computed alone and in company before a replica starts, and drawn after it."""


class BatchInvarianceError(RuntimeError):
    """Results depend on the other sequences of a batch on this machine."""


class InvariantRunner(ModelRunner):
    """Run a model a fixed number of rows at a time."""

    def __init__(self, model: LoadedModel) -> None:
        """Prepare a model. Raises BatchInvarianceError where tokens choose among experts."""
        super().__init__(model)
        if mixes_experts(model.module.config):
            raise BatchInvarianceError(
                f"engine.batch_invariant: {type(model.module).__name__} mixes experts, whose products are of as many "
                "rows as tokens choose them"
            )
        rows = ROWS.get(model.device.type, GPU_ROWS)
        found = [*_row_modules(model.module.get_decoder(), outermost=True), model.module.get_output_embeddings()]
        self._in_tiles = [(module, _in_tiles(module.forward, rows, _multiplies(module))) for module in found]

    def logits(self, ids: Tensor, positions: Tensor, state: StepState, keep: int | Tensor) -> Tensor:
        with self._tiled():
            return super().logits(ids, positions, state, keep)

    @contextmanager
    def _tiled(self) -> Iterator[None]:
        """Compute in tiles within the context; a module that is compared with is its own again behind it."""
        patched = [(vars(module), vars(module).get("forward")) for module, _ in self._in_tiles]
        for module, forward in self._in_tiles:
            vars(module)["forward"] = forward
        try:
            yield
        finally:
            for attributes, before in patched:
                if before is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = before


def _row_modules(module: nn.Module, *, outermost: bool = False) -> Iterator[nn.Module]:
    """Yield the largest modules that compute row by row: all but attention, embeddings and rotations."""
    if isinstance(module, nn.Embedding | nn.Identity | nn.Dropout) or any(
        name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)
    ):
        return
    attends = any(hasattr(each, "layer_idx") for each in module.modules())
    if outermost or attends or isinstance(module, nn.ModuleList):
        for child in module.children():
            yield from _row_modules(child)
    else:
        yield module


def _multiplies(module: nn.Module) -> bool:
    """Return True if a module multiplies by weights, rather than only summing along rows."""
    return any(hasattr(each, "in_features") for each in module.modules())


def _in_tiles(forward: Callable[[Tensor], Tensor], rows: int, multiplies: bool) -> Callable[[Tensor], Tensor]:
    """Return a `forward` of x [..., width] that computes so many rows at a time; of narrow norms more."""

    def tiled(x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        size = rows if multiplies else max(rows, ELEMENTS // x.shape[-1])
        pieces = []
        for first in range(0, max(1, len(flat)), size):
            piece = flat[first : first + size]
            pieces.append(forward(F.pad(piece, (0, 0, 0, size - len(piece)))[None])[0, : len(piece)])
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return out.view(*x.shape[:-1], out.shape[-1])

    return tiled


@torch.inference_mode()
def check(engine: Engine, say: Callable[[str], None] = lambda what: None) -> None:
    """Compute a prompt alone and in company, cut otherwise, and compare the logits of every draw bit by bit.

    Do nothing where `engine.batch_invariant` is off; call it before `run`. Raises BatchInvarianceError where they
    differ: kernels of this machine take sums by a row's place.
    """
    if not engine.config.batch_invariant:
        return
    say("comparing answers in several companies")
    alone = _logits(engine, engine.scheduler.step_tokens, 0)
    for tokens, others in ((engine.scheduler.step_tokens, 3), (engine.config.max_slots + 23, 2)):
        if not torch.equal(alone, _logits(engine, min(tokens, engine.scheduler.step_tokens), others)):
            raise BatchInvarianceError(
                f"engine.batch_invariant cannot be had: on this machine, with {torch.get_num_threads()} threads, "
                f"the logits of {type(engine.model.module).__name__} depend on what is computed beside them"
            )


def _logits(engine: Engine, step_tokens: int, others: int) -> Tensor:
    """Return the logits [draws, vocabulary] of a prompt beside others, in steps of so many tokens."""
    length = min(PROMPT, max(1, engine.max_context // 2))
    new, scheduler, got = min(NEW, engine.max_context - length), engine.scheduler, list[Tensor]()

    def watch(sequences: Sequence[Drawing], logits: Tensor) -> None:
        got.extend(row.clone() for row, each in zip(logits, sequences, strict=True) if each.request.id == "invariance")

    def request(name: str, seed: int, tokens: int) -> GenerateRequest:
        drawn = torch.randint(engine.model.vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed))
        sampling = SamplingParams(max_tokens=new, ignore_eos=True, temperature=0.0)
        return GenerateRequest(name, tuple(drawn.tolist()), (), sampling, PolicySpec())

    before, scheduler.step_tokens, engine.executor.watch_logits = scheduler.step_tokens, step_tokens, watch
    try:
        beside = [request(f"beside {at}", 1 + at, max(1, length // (at + 2))) for at in range(others)]
        requests = [*beside[:1], request("invariance", 0, length), *beside[1:]]
        engine.finish(requests[0], *requests[1:])
        return torch.stack(got)
    finally:
        scheduler.step_tokens, engine.executor.watch_logits = before, None
