import json
import math

import pytest

from warmkv.simulator.studies.quantities import Capacity, QuantityError, capacity, model_token_bytes, seconds


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("500", 500, "tokens"),
        ("10k", 10_000, "tokens"),
        ("1.5M tokens", 1_500_000, "tokens"),
        ("2e6", 2e6, "tokens"),
        ("1 token", 1, "tokens"),
        ("5000 blocks", 5000, "blocks"),
        ("30kblocks", 30_000, "blocks"),
        ("2GiB", 2 * 2**30 / 1024, "tokens"),
        ("1 GB", 1e9 / 1024, "tokens"),
        ("2048b", 2, "tokens"),
        ("unlimited", math.inf, "tokens"),
        ("inf blocks", math.inf, "blocks"),
        ("0", 0, "tokens"),
    ],
)
def test_capacities_as_people_write_them(text, amount, unit):
    assert capacity(text, 1024) == Capacity(amount, unit, text)


@pytest.mark.parametrize("text", ["", "much", "-5", "5 apples", "5 GiB tokens", "k", "1e"])
def test_what_is_no_capacity_is_refused(text):
    with pytest.raises(QuantityError, match="capacity"):
        capacity(text, 1024)


def test_bytes_need_the_bytes_of_a_token():
    with pytest.raises(QuantityError, match="needs the bytes of a token"):
        capacity("2GiB", None)


@pytest.mark.parametrize(
    ("text", "value"),
    [("300", 300), ("5m", 300), ("1 h", 3600), ("250ms", 0.25), ("1d", 86400), ("unlimited", math.inf)],
)
def test_times_as_people_write_them(text, value):
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["soon", "5 years", "-1"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(QuantityError, match="time"):
        seconds(text)


def test_the_kv_bytes_of_a_model(tmp_path):
    llama = {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "torch_dtype": "bfloat16",
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(llama))
    assert model_token_bytes(tmp_path) == model_token_bytes(file) == 131_072
    file.write_text(json.dumps({"text_config": llama | {"head_dim": 64, "dtype": "float32"}}))
    assert model_token_bytes(tmp_path) == 131_072
    for text in ("{", "[]", "{}", json.dumps(llama | {"num_hidden_layers": 0})):
        file.write_text(text)
        with pytest.raises(QuantityError, match=r"config\.json"):
            model_token_bytes(tmp_path)
    with pytest.raises(QuantityError, match="cannot read"):
        model_token_bytes(tmp_path / "absent")
