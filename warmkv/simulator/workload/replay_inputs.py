"""Inputs shared by all replays of the same requests: computed by the first of them, and kept for the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.record import Mark, RequestRecord
from warmkv.simulator.cache.layout import Layout, layout
from warmkv.simulator.workload.job_sizes import Sizes, sizes_of

KEPT = 1 << 20
"""Requests, all policies together, whose sizes are kept: about 200 MB."""


class ReplayInputs:
    """The layout of the prompts' blocks, which no setting changes, and sizes, which few do.

    `blocks` stand for the blocks of all prompts, as `layout` takes them.
    """

    def __init__(self, records: Sequence[RequestRecord], blocks: NDArray[np.int64] | None = None) -> None:
        self.records = records
        self._blocks = blocks
        self._sizes: OrderedDict[Hashable, Sequence[Sizes]] = OrderedDict()

    @cached_property
    def layout(self) -> Layout:
        """Return the prompts' blocks as runs."""
        return layout(self.records, self._blocks)

    def sizes(
        self,
        policy: PolicySpec | None,
        specs: Sequence[PolicySpec],
        marks: Sequence[tuple[Mark, ...]],
        shape: KVShape,
        max_context: int,
    ) -> Iterable[Sizes]:
        """Compute sizes as `sizes_of`, where `specs` are all `policy`, or the recorded ones if that is None.

        Of `marks` only their numbers count, which are those of the records or all 0.
        """
        count = len(self.records)
        if count > KEPT:
            return sizes_of(self.records, specs, marks, shape, max_context)
        key = (policy and policy.label, shape, max_context, any(marks))
        found = self._sizes.get(key)
        if found is None:
            found = self._sizes[key] = list(sizes_of(self.records, specs, marks, shape, max_context))
            while len(self._sizes) * count > KEPT:
                self._sizes.popitem(last=False)
        return found
