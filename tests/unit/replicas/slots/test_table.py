"""Kernels name the lines of the tables as those who write them do."""

import pytest

from warmkv.replicas.slots.row_facts import FACTS, PARTS
from warmkv.replicas.slots.row_tables import NUMBERS

table = pytest.importorskip("warmkv.replicas.slots.kernels.table")


@pytest.mark.parametrize(("names", "first"), [(PARTS, 0), (FACTS, 2 * len(PARTS)), (NUMBERS, 0)])
def test_a_line_has_one_name(names, first):
    assert [getattr(table, name.upper()).value - first for name in names] == list(range(len(names)))
