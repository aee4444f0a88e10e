"""A sequence that turns NaN harms no other: kernels choose entries within its own row, as of any other."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.replicas.slots.test_kernels import LAYER, Case, Rows
from warmkv.policies.slot_sizes import RowKind
from warmkv.replicas.slots.row_tables import NUMBERS

NAN = math.nan


@pytest.mark.parametrize(("nan", "evicted"), [(range(40), 0), ([9, 5, 30], 5), ([], 3)])
def test_of_scores_that_are_nan_the_oldest_is_evicted(device, nan, evicted):
    """Evict within the row: no entry compares as less or equal where all scores are NaN."""
    rows = Rows(Case("model", torch.float32, 2, 1, 16, 40, (40, 40), decode="argmin"), device, garbage=0.0)
    scores = rows.slab.memory.scores[LAYER]
    scores[:, 3] = 1.0  # the lowest number
    scores[0, list(nan)] = NAN
    rows.tables.numbers[NUMBERS.index("evicts"), :2] = 1
    rows.attend()
    assert rows.tables.taken[LAYER, :2].tolist() == [evicted, 3]


@pytest.mark.parametrize("segment", [1, 4])
def test_a_row_of_nan_chooses_as_many_entries_as_others_and_leaves_their_lists_alone(device, segment):
    limit, guard = 12, 1 << 20

    def chosen(query: float) -> tuple[list[int], list[int], list[int], torch.Tensor]:
        """Return the lists of two rows, the words behind them, and what the second row attends to."""
        case = Case("model", torch.float32, 2, 1, 16, 60, (60, 60))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Case, "kind", RowKind(capacity=60, segment=segment))
            rows = Rows(case, device, garbage=0.0)
        rows.slab.state.read_limit[:], rows.slab.state.channels[:] = limit, 16
        for bounds in (rows.slab.memory.lowest, rows.slab.memory.highest):
            bounds[LAYER] = torch.arange(60 // segment, device=device)[:, None] / 16
        rows.tables._slots = ()
        rows.batch = rows.take()
        rows.query[:, 0] = query
        rows.query[:, 1] = 1.0
        rows.key.fill_(10.0)  # so that the newest segment is the highest, too
        words = rows.tables.workspace("chosen", (256,), torch.int32).fill_(guard)
        out = rows.attend()
        counts = rows.tables.workspace("counts", (2,), torch.int32).tolist()
        assert counts == [limit, limit]
        lists = words[: 2 * limit].view(2, limit).tolist()
        return lists[0], lists[1], words[2 * limit :].tolist(), out[0, 1]

    _, healthy, _, expected = chosen(1.0)
    mine, other, behind, out = chosen(NAN)
    assert mine == list(range(limit))
    assert other == healthy == list(range(60 - limit, 60))
    assert set(behind) == {guard}
    assert torch.equal(out, expected)
