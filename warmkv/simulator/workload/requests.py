"""Traces of other services as requests to replay: what their columns tell, and keys for their blocks.

Such a trace has no breakpoints, so its requests are those of an API with automatic caching: full blocks are shared, and
billed as read where they were found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from warmkv.config import Config
from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.usage import Usage
from warmkv.simulator.traces import Trace, TraceError
from warmkv.simulator.traces.columns import UNKNOWN
from warmkv.simulator.workload.replay_inputs import ReplayInputs

Ints = NDArray[np.int64]
KEY_BYTES = 8
ANYBODY = "trace"  # the tenant of requests whose trace tells none


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A request that waits for another: it arrives `think` seconds after the end of the request numbered `previous`."""

    previous: int
    think: float


@dataclass(frozen=True)
class Requests:
    """Requests in the order of arrival; those in `turns`, by number, arrive when the turn before them is over.

    `blocks` stand for the blocks of all prompts, as `layout` takes them, where the trace itself has numbers.
    """

    records: Sequence[RequestRecord]
    turns: Mapping[int, FollowUp] = field(default_factory=dict)
    blocks: Ints | None = field(default=None, repr=False, compare=False)

    @cached_property
    def inputs(self) -> ReplayInputs:
        """Return what all replays of these requests share."""
        return ReplayInputs(self.records, self.blocks)


def of_trace(trace: Trace, config: Config, *, scope: str = "global", open_loop: bool = False) -> Requests:
    """Make the requests of a trace under the configuration's model and policy, with the trace's own block size.

    Blocks are shared by all, or within each `session` or `tenant`. Where the trace has think times, a session's next
    turn comes that long after the answer before it; with `open_loop` it comes when it was recorded. Raises TraceError
    if the trace does not tell the scope, or its block numbers are not those of prefixes.
    """
    size = trace.block_size or config.prefix_cache.block_size
    label, unbilled = config.compression.policy.label, Usage()
    counts, blocks = _full_blocks(trace, scope)
    arrivals, prompts, outputs = trace.arrival.tolist(), _shared(trace.input_tokens), _shared(trace.output_tokens)
    records = tuple(
        RequestRecord(
            id=str(number),
            arrival=arrival,
            tenant=ANYBODY if tenant == UNKNOWN else f"tenant-{tenant}",
            model=config.model.name,
            api="chat",
            policy=label,
            block_size=size,
            input_tokens=prompt,
            output_tokens=output,
            hashes=hashes,
            usage=unbilled,
        )
        for number, (arrival, tenant, prompt, output, hashes) in enumerate(
            zip(arrivals, trace.tenant.tolist(), prompts, outputs, _chains(counts, blocks), strict=True)
        )
    )
    return Requests(records, {} if open_loop else turns(trace), blocks)


def turns(trace: Trace) -> dict[int, FollowUp]:
    """Return who waits for whom: every turn of a session but its first, if the trace has think times."""
    if not trace.think.any():
        return {}
    last: dict[int, int] = {}  # session -> its turn before
    found = {}
    for number, (session, think) in enumerate(zip(trace.session.tolist(), trace.think.tolist(), strict=True)):
        if session == UNKNOWN:
            continue
        if session in last:
            found[number] = FollowUp(last[session], think)
        last[session] = number
    return found


def _full_blocks(trace: Trace, scope: str) -> tuple[Ints, Ints]:
    """Count each prompt's full blocks, and number all of them from 0 without gaps, one prompt after the other."""
    if not trace.block_size:
        return np.zeros(len(trace), dtype=np.int64), np.empty(0, dtype=np.int64)
    counts, full = np.diff(trace.offsets), trace.input_tokens // trace.block_size
    place = np.arange(len(trace.blocks)) - np.repeat(trace.offsets[:-1], counts)
    _, blocks = np.unique(_scoped(trace, scope)[place < np.repeat(full, counts)], return_inverse=True)
    return np.minimum(counts, full), blocks


def _chains(counts: Ints, blocks: Ints) -> Iterator[tuple[bytes, ...]]:
    """Yield the keys of every prompt's full blocks; equal blocks share one object."""
    keys = [number.to_bytes(KEY_BYTES, "little") for number in range(blocks.max(initial=-1) + 1)]
    numbers = iter(blocks.tolist())
    for count in counts.tolist():
        chain = tuple([keys[number] for number in islice(numbers, count)])
        if len(set(chain)) < count:
            raise TraceError("a prompt has the same block twice: its numbers do not stand for prefixes")
        yield chain


def _shared(values: NDArray[np.int32]) -> list[int]:
    """Return numbers as Python's, equal ones as one object."""
    distinct, places = np.unique(values, return_inverse=True)
    numbers = distinct.tolist()
    return [numbers[place] for place in places.tolist()]


def _scoped(trace: Trace, scope: str) -> Ints:
    """Block numbers that are equal only within a scope."""
    if scope == "global":
        return trace.blocks
    owner = trace.session if scope == "session" else trace.tenant
    if (owner == UNKNOWN).any():
        raise TraceError(f"the trace does not tell the {scope} of every request")
    distinct, numbers = np.unique(trace.blocks, return_inverse=True)
    scoped: Ints = numbers + np.repeat(owner.astype(np.int64), np.diff(trace.offsets)) * len(distinct)
    return scoped
