"""Find the request that a step fails with, by halves. Knows nothing of models: a step is a function of its batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from warmkv.replicas.engine.faults import DeviceLostError, is_out_of_memory, is_sticky, let_go

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(slots=True)
class Isolated(Generic[Item, Result]):
    """Hold the outcome of a batch: results, and items that failed alone, each with its error, in any order."""

    results: list[tuple[Item, Result]] = field(default_factory=list)
    failed: list[tuple[Item, Exception]] = field(default_factory=list)


def isolate(
    batch: Sequence[Item],
    compute: Callable[[Sequence[Item]], Sequence[Result]],
    relieve: Callable[[], None],
    shed: Callable[[Sequence[Item], Exception], Item],
    parts: Callable[[Sequence[Item]], Sequence[Sequence[Item]]] = lambda items: [items],
) -> Isolated[Item, Result]:
    """Compute a batch, and if that fails its `parts`, then their halves, down to the items that fail alone.

    `compute` may be called again with a part of a batch that failed, never with one that succeeded; every item in
    `failed` failed at least twice. Where memory runs out, it is tried again after `relieve`; of a batch without parts
    `shed` then ends an item and returns it, and the rest is computed.
    Raises DeviceLostError at once for an error after which nothing works any more.
    """
    outcome: Isolated[Item, Result] = Isolated()
    pending = [(list(batch), False)]  # batches, and whether they failed before, as a part of another or for memory
    while pending:
        items, again = pending.pop()
        try:
            outcome.results += zip(items, compute(items), strict=True)
            continue
        except Exception as error:
            failure = error
        if is_sticky(failure):
            raise DeviceLostError(f"{type(failure).__name__}: {failure}") from failure
        if not again:
            log.error("a step of %d requests failed", len(items), exc_info=failure)
        let_go(failure)
        out_of_memory = is_out_of_memory(failure)
        if out_of_memory:
            relieve()
        if not again and (out_of_memory or len(items) == 1):
            pending.append((items, True))
        elif len(apart := parts(items)) > 1:
            pending += [(list(part), True) for part in reversed(apart)]
        elif out_of_memory:
            if rest := _without(items, shed(items, failure)):
                pending.append((rest, True))
        elif len(items) > 1:
            middle = len(items) // 2
            pending += [(items[middle:], True), (items[:middle], True)]
        else:
            outcome.failed.append((items[0], failure))
    return outcome


def _without(items: Sequence[Item], gone: Item) -> list[Item]:
    return [item for item in items if item is not gone]
