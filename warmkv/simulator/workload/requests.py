"""Traces of other services as requests to replay: what their columns tell, and keys for their blocks.

Such a trace has no breakpoints, so its requests are those of an API with automatic caching: full blocks are shared, and
billed as read where they were found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warmkv.config import Config
from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.record_columns import USAGE, Parts, RecordColumns, Smalls, Texts
from warmkv.simulator.traces import Trace, TraceError
from warmkv.simulator.traces.columns import UNKNOWN
from warmkv.simulator.workload.replay_inputs import ReplayInputs

Ints = NDArray[np.int64]
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
    counts, blocks = _full_blocks(trace, scope)
    if _has_twins(counts, blocks):
        raise TraceError("a prompt has the same block twice: its numbers do not stand for prefixes")
    records = _records(trace, size, config.model.name, config.compression.policy.label, counts, blocks)
    return Requests(records, {} if open_loop else turns(trace), blocks)


def _records(trace: Trace, size: int, model: str, policy: str, counts: Ints, blocks: Ints) -> RecordColumns:
    """Return a trace as records; keys are the numbers of blocks."""
    count = len(trace)
    names = [ANYBODY, "", "ok", "chat", model, policy]
    tenants, places = np.unique(trace.tenant, return_inverse=True)
    of_tenant = np.arange(len(names), len(names) + len(tenants))
    of_tenant[tenants == UNKNOWN] = names.index(ANYBODY)
    ids = list(map(str, range(count)))
    lengths = np.fromiter(map(len, ids), np.int32, count)
    ends, nothing = counts.cumsum(), np.zeros(count, dtype=np.int32)

    def named(name: str) -> Smalls:
        return np.full(count, names.index(name), dtype=np.int32)

    def none(width: int) -> Parts:
        return Parts(np.zeros(count, dtype=np.int64), nothing, (nothing[:0],) * width)

    def text(text: str, lengths: Smalls) -> Texts:
        ends: Ints = lengths.cumsum(dtype=np.int64)
        return Texts(text, ends - lengths, lengths)

    alike: dict[str, Any] = {name: np.zeros(count) for name in ("queue", "prefill", "ttft", "e2e", "bytes_per_token")}
    alike |= dict.fromkeys(("cached_tokens", "max_tokens", *USAGE), nothing)
    alike |= dict.fromkeys(("replica", "group", "stop_reason", "error", "session"), named(""))
    return RecordColumns(
        **alike,
        names=[*names, *(f"tenant-{tenant}" for tenant in tenants.tolist())],
        keys=np.arange(blocks.max(initial=-1) + 1, dtype="<u8")[:, None],
        odd_keys={},
        arrival=trace.arrival,
        block_size=np.full(count, size, dtype=np.int32),
        input_tokens=trace.input_tokens,
        output_tokens=trace.output_tokens,
        resident_bytes=np.zeros(count, dtype=np.int64),
        tenant=of_tenant[places].astype(np.int32),
        model=named(model),
        api=named("chat"),
        policy=named(policy),
        status=named("ok"),
        id=text("".join(ids), lengths),
        client_id=text("", nothing),
        trace_id=text("", nothing),
        hashes=Parts(ends - counts, counts.astype(np.int32), (blocks.astype(np.int32),)),
        generated=none(1),
        marks=none(3),
        reads=none(2),
        written=none(2),
    )


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


def _has_twins(counts: Ints, blocks: Ints) -> bool:
    """Return True if a prompt has the same block twice."""
    owned = np.repeat(np.arange(len(counts)), counts) * (blocks.max(initial=0) + 1) + blocks
    owned.sort()
    return bool((owned[1:] == owned[:-1]).any())


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
