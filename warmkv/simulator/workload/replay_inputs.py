"""Inputs shared by all replays of the same requests: computed by the first of them, and kept for the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.record_builder import columns_of
from warmkv.simulator.cache.layout import Layout, layout
from warmkv.simulator.workload.job_sizes import JobSizes, Specs, sizes_of

KEPT = 1 << 20
"""Requests, all policies together, whose sizes are kept: about 200 MB."""


class ReplayInputs:
    """The layout of the prompts' blocks, which no setting changes, and sizes, which few do.

    `blocks` stand for the blocks of all prompts, as `layout` takes them.
    """

    def __init__(self, records: Sequence[RequestRecord], blocks: NDArray[np.int64] | None = None) -> None:
        self.records = columns_of(records)
        self._blocks = blocks
        self._sizes: OrderedDict[Hashable, Sequence[JobSizes]] = OrderedDict()

    @cached_property
    def layout(self) -> Layout:
        """Return the prompts' blocks as runs."""
        return layout(self.records, self._blocks)

    def lay_out(self, more: Sequence[RequestRecord]) -> Layout:
        """Return the layout, or one that has more prompts behind these."""
        return layout([*self.records, *more]) if more else self.layout

    def sizes(
        self,
        policy: PolicySpec | None,
        specs: Specs,
        marked: bool,
        shape: KVShape,
        max_context: int,
        max_output: int,
    ) -> Sequence[JobSizes]:
        """Compute sizes as `sizes_of`, where `specs` are all `policy`, or the recorded ones if that is None."""
        key = (policy and policy.label, shape, max_context, max_output, marked)
        found = self._sizes.get(key)
        if found is None:
            found = sizes_of(self.records, specs, marked, shape, max_context, max_output)
            if len(self.records) <= KEPT:
                self._sizes[key] = found
            while len(self._sizes) * len(self.records) > KEPT:
                self._sizes.popitem(last=False)
        return found
