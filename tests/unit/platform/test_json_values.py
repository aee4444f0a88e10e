"""Values of JSON are counted before it is parsed, in whatever encoding it comes."""

import json

import pytest

from warmkv.platform.json_values import TooManyValuesError, loads


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_the_same_is_read_and_refused_in_every_encoding(encoding):
    tree = {'odd "': ["\ud800" if encoding == "utf-8" else "é", {"a": [1, 2]}], "commas": ",[{:" * 9}
    data = json.dumps(tree).encode(encoding)
    assert loads(data, 11) == json.loads(data) == tree
    with pytest.raises(TooManyValuesError, match="more than 10 JSON values"):
        loads(data, 10)
