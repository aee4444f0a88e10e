"""How large a least-recently-used cache must be, and how long it must remember, for each block of a trace to be found.

LRU is a stack algorithm (Mattson et al., 1970): a block is resident exactly if everything used since its last use, and
itself, fit together. So one pass over a trace gives the smallest sufficient capacity of every lookup, and with it the
hits at all capacities. A sliding TTL fits in: what is used less recently expires earlier, so whatever is resident by
capacity and used within the TTL is found.

Blocks that were used one after the other and are used so again are one run. A run costs a few steps of a Fenwick tree,
whatever its length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Places = NDArray[np.int32]  # numbers of blocks and requests: half the memory, and no trace in memory has 2**31 blocks


@dataclass(frozen=True, slots=True)
class Needs:
    """What each of the m blocks of a trace needs to be found together with all blocks before it in its prompt."""

    capacity: Floats  # [m] least capacity, in the unit of the weights; infinite if it was never there
    lifetime: Floats  # [m] least sliding TTL in seconds; infinite likewise


def needs(blocks: Ints, offsets: Ints, weights: Ints, arrival: Floats, *, tail_first: bool = False) -> Needs:
    """Compute one LRU for all requests, which come in order and take no time.

    `blocks` [m], of request i from offsets[i] to offsets[i + 1]; `weights` [m] are what they take; `arrival` [n]
    ascends among requests that share blocks. A request first looks up its blocks, then uses all of them from head to
    tail, so that its tail is the most recent; or with `tail_first` the other way round, so that the ends of prompts are
    evicted first.
    """
    counts = np.diff(offsets)
    request = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    if tail_first:
        turned = offsets[:-1][request] + offsets[1:][request] - 1 - np.arange(len(blocks), dtype=np.int32)
        distance, last = _lookups(blocks[turned], offsets, weights[turned], request)
        distance, last = distance[turned], last[turned]
    else:
        distance, last = _lookups(blocks, offsets, weights, request)
    # A block counts only behind a found block: the most that any block up to it needs.
    never = last < 0
    ceiling = int(distance.max(initial=0)) + 1
    capacity = _running_maximum(np.where(never, ceiling, distance), request, ceiling + 1).astype(float)
    age = _running_maximum(request - last, request, len(counts) + 2)
    capacity[capacity == ceiling] = np.inf
    oldest = request - age
    lifetime = np.where(oldest < 0, np.inf, arrival[request] - arrival[np.maximum(oldest, 0)])
    return Needs(np.where(oldest < 0, np.inf, capacity), lifetime)


def _running_maximum(values: Ints | Places, request: Places, bound: int) -> Ints:
    """Return the running maximum within each request, of values from 0 to below `bound`."""
    base = request * np.int64(bound)
    maximum: Ints = np.maximum.accumulate(values + base)
    maximum -= base
    return maximum


def _lookups(blocks: Ints, offsets: Ints, weights: Ints, request: Places) -> tuple[Ints, Places]:
    """Return for each block the weight of what was used since it was, itself included, and the request that last used
    it.

    As of the request's beginning. A block that comes twice in a request needs nothing but its first time; one that was
    never used has the request -1.
    """
    before = _previous(blocks)
    last = np.where(before < 0, np.int32(-1), request[np.maximum(before, 0)])
    starts = _runs(before, request)
    ends = np.append(starts[1:], len(blocks))
    used = before[starts]  # where a run was used before; negative if never
    known = used >= 0

    total = np.concatenate([[0], np.cumsum(weights)])
    # Whatever is used again is cut at these places, so a cell between two of them is recent or not as a whole.
    edges = np.unique(np.concatenate([offsets, used[known], used[known] + (ends - starts)[known]]))
    cell_weights = np.diff(total[edges]).tolist()
    recent = _recent(
        np.searchsorted(edges, offsets).tolist(),
        np.searchsorted(starts, offsets).tolist(),
        np.where(known & (last[starts] < request[starts]), np.searchsorted(edges, used), -1).tolist(),
        np.where(known, np.searchsorted(edges, used), -1).tolist(),
        np.searchsorted(edges, used + (ends - starts)).tolist(),
        cell_weights,
    )
    # From the start of the run's earlier use on, less what of it lies before the block.
    distance = np.repeat(np.array(recent, dtype=np.int64) + total[np.maximum(used, 0)], ends - starts)
    distance -= total[np.maximum(before, 0)]
    distance[(before < 0) | (last == request)] = 0
    return distance, last


def _previous(blocks: Ints) -> Places:
    """Return where each block was used before, -1 for the first time."""
    order = np.argsort(blocks, kind="stable")
    again = blocks[order][1:] == blocks[order][:-1]
    before = np.full(len(blocks), -1, dtype=np.int32)
    before[order[1:][again]] = order[:-1][again]
    return before


def _runs(before: Places, request: Places) -> Ints:
    """Return where runs start: a run lies in one request, and was used as a run in one request before, or never."""
    if not len(before):
        return np.empty(0, dtype=np.int64)
    new = before < 0
    follows = np.where(new[1:], new[:-1], (before[1:] == before[:-1] + 1) & ~new[:-1])
    follows &= request[1:] == request[:-1]
    origin = np.where(new, -1, request[np.maximum(before, 0)])
    follows &= origin[1:] == origin[:-1]
    return np.concatenate([[0], np.flatnonzero(~follows) + 1])


def _recent(
    cells_of: list[int], runs_of: list[int], looked: list[int], first: list[int], end: list[int], weights: list[int]
) -> list[int]:
    """Return for each run the weight of all that is recent from where it was used before on; 0 if it is not looked up.

    A Fenwick tree over cells holds the weight of those that were not used again. Request i owns the cells from
    cells_of[i] and the runs from runs_of[i]; a run was used before in the cells first to end, or -1; looked likewise.
    """
    size = len(weights)
    tree = [0] * (size + 1)
    held = 0
    result = [0] * len(first)

    def add(cell: int, weight: int) -> None:
        cell += 1
        while cell <= size:
            tree[cell] += weight
            cell += cell & -cell

    for i in range(len(cells_of) - 1):
        runs = range(runs_of[i], runs_of[i + 1])
        for run in runs:
            if (cell := looked[run]) >= 0:
                older = 0
                while cell:
                    older += tree[cell]
                    cell &= cell - 1
                result[run] = held - older
        for cell in range(cells_of[i], cells_of[i + 1]):
            add(cell, weights[cell])
            held += weights[cell]
        for run in runs:
            if first[run] >= 0:
                for cell in range(first[run], end[run]):
                    add(cell, -weights[cell])
                    held -= weights[cell]
    return result
