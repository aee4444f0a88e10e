"""Kernels name the lines of the tables as those who write them do."""

from importlib import import_module

import pytest

from warmkv.replicas.slots.row_facts import FACTS, PARTS
from warmkv.replicas.slots.row_tables import NUMBERS


@pytest.mark.usefixtures("device")  # which decides how kernels are loaded
@pytest.mark.parametrize(("names", "first"), [(PARTS, 0), (FACTS, 2 * len(PARTS)), (NUMBERS, 0)])
def test_a_line_has_one_name(names, first):
    table = import_module("warmkv.replicas.slots.kernels.table")
    assert [getattr(table, name.upper()).value - first for name in names] == list(range(len(names)))
