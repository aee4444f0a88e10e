import pickle

import pytest

from warmkv.policies.prefix_cache import Lifetimes
from warmkv.prefixes.index import Shard


@pytest.mark.parametrize("value", [Lifetimes({"5m": 300.0}, 300.0, automatic=True), Shard(1, 3)])
def test_values_that_other_processes_get_are_equal_there(value):
    assert pickle.loads(pickle.dumps(value)) == value
