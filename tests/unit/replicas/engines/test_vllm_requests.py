"""Requests as vLLM takes them. Without vLLM."""

from tests.unit.replicas.conftest import make_request
from warmkv.replicas.engines.vllm_requests import sampling_fields, structured_fields
from warmkv.replicas.protocol import Constraint


def test_a_top_k_beyond_vllm_s_numbers_means_all():
    assert 1 << 20 < sampling_fields(make_request([3], top_k=1 << 64), ())["top_k"] < 1 << 31


def test_constraints_are_fields_of_vllm():
    kinds = {"json_schema": '{"type": "object"}', "regex": "a+", "grammar": "start: 'a'", "choice": '["a", "b"]'}
    fields = [structured_fields(Constraint(kind, text)) for kind, text in kinds.items()]  # type: ignore[arg-type]
    assert fields == [
        {"json": kinds["json_schema"]},
        {"regex": "a+"},
        {"grammar": "start: 'a'"},
        {"choice": ["a", "b"]},
    ]
    assert structured_fields(Constraint("json_object")) == {"json_object": True}
