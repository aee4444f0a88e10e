"""The table of masks beside a dict of dicts: few and many keys, more columns than a word has, rows that are left."""

import random
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from warmkv.prefixes.mask_table import COLUMNS, MaskTable, pack, unpack

KEYS = [blake2b(number.to_bytes(4, "little"), digest_size=8).digest() for number in range(3_000)]
CROWDED = [number.to_bytes(8, "little") for number in range(80)]  # all of one place
COLUMN = st.sampled_from([0, 1, COLUMNS - 1, COLUMNS, 3 * COLUMNS + 2])
BATCH = st.builds(
    lambda start, count, crowded, again: [*KEYS[start : start + count], *CROWDED[:crowded], *CROWDED[:again]],
    st.integers(0, len(KEYS)),
    st.sampled_from([0, 1, 5, 24, 25, 200, 1_500]),
    st.sampled_from([0, 3, len(CROWDED)]),
    st.sampled_from([0, 2]),
)


class TableMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table, self.obvious = MaskTable(), {}  # key -> column -> code

    @rule(keys=BATCH, column=COLUMN, code=st.sampled_from([0b001, 0b011, 0b111]))
    def set(self, keys, column, code):
        new = sum(column not in self.obvious.get(key, {}) for key in set(keys))
        assert self.table.assign(pack(keys), column, code) == new
        for key in keys:
            self.obvious.setdefault(key, {})[column] = code

    @rule(keys=BATCH, column=COLUMN)
    def take_out(self, keys, column):
        gone = [key for key in set(keys) if column in self.obvious.get(key, {})]
        assert self.table.assign(pack(keys), column, 0) == -len(gone)
        for key in gone:
            del self.obvious[key][column]

    @rule(column=COLUMN)
    def clear(self, column):
        self.table.clear(column)
        for codes in self.obvious.values():
            codes.pop(column, None)

    @rule(remainder=st.integers(0, 2))
    def discard(self, remainder):
        self.table.discard(remainder, 3)
        self.obvious = {key: codes for key, codes in self.obvious.items() if key[0] % 3 != remainder}

    @rule(keys=BATCH, column=COLUMN)
    def look_up(self, keys, column):
        assert self.table.has(pack(keys), column).tolist() == [column in self.obvious.get(key, {}) for key in keys]
        for key in keys[:40]:
            mask = sum(code << 3 * column for column, code in self.obvious.get(key, {}).items())
            assert self.table.get(key) == mask

    @invariant()
    def agrees(self):
        assert len(self.table) == sum(map(bool, self.obvious.values()))
        for column in (1, 3 * COLUMNS + 2):
            held = {key: codes[column] for key, codes in self.obvious.items() if column in codes}
            assert self.table.count(column) == len(held)
            assert sorted(unpack(self.table.keys(column))) == sorted(held)
            ((found, codes),) = self.table.entries([column])
            assert dict(zip(unpack(found.tobytes()), codes.tolist(), strict=True)) == held


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=25, stateful_step_count=20)


@given(st.lists(st.integers(0, 40)), st.integers(0, 5))
def test_single_keys_and_batches_do_the_same(drawn, code):
    one, many = MaskTable(), MaskTable()
    keys = [KEYS[number] for number in drawn]
    for table, batches in ((one, [[key] for key in keys]), (many, [keys + KEYS[:60]])):
        for batch in [[key] for key in KEYS[:60]] if table is one else []:
            table.assign(pack(batch), 2, code)
        for batch in batches:
            table.assign(pack(batch), 2, code)
    assert len(one) == len(many)
    assert set(unpack(one.keys(2))) == set(unpack(many.keys(2)))


def test_rows_are_bounded_by_what_is_held_however_long_keys_come_and_go():
    table, chance = MaskTable(), random.Random(0)
    keys = [chance.randbytes(8) for _ in range(20_000)]
    for start in range(0, len(keys) - 1_000, 100):
        table.assign(pack(keys[start + 1_000 : start + 1_100]), 0, 1)
        table.assign(pack(keys[start : start + 100]), 0, 0)
        assert table.nbytes <= 16 * 4_096
    table.assign(pack(keys), 0, 1)
    assert table.nbytes / len(table) <= 60
    table.assign(pack(keys), 0, 0)
    assert len(table) == 0
    assert table.nbytes <= 16 * 4_096


def test_a_column_is_cleared_without_a_new_table_until_most_rows_are_empty():
    """Leave the rows of a replica that is gone for a later rebuild, which takes all keys to a new table."""
    table = MaskTable()
    for column in range(3):
        table.assign(pack(KEYS[column * 1_000 : (column + 1) * 1_000]), column, 1)
    cells = table._cells
    table.clear(0)
    assert table._cells is cells
    assert len(table) == 2_000
    table.clear(1)
    table.clear(2)
    assert len(table) == 0
    assert table.nbytes < cells.nbytes


def test_keys_that_are_known_make_the_table_no_larger():
    table, keys = MaskTable(), pack(KEYS)
    table.assign(keys, 0, 1)
    size = table.nbytes
    for column in range(1, COLUMNS):
        table.assign(keys, column, 1)
    assert table.nbytes == size


def test_keys_shorter_than_eight_bytes_are_refused():
    with pytest.raises(ValueError, match="at least 8 bytes"):
        pack([b"12345678", b"1234567"])
    with pytest.raises(ValueError, match="multiple"):
        MaskTable().has(b"123456789", 0)
