"""Requests as vLLM takes them. Without vLLM."""

from dataclasses import replace

from tests.unit.replicas.conftest import make_request
from warmkv.config import EngineConfig
from warmkv.replicas.engines.vllm_requests import check, sampling_fields, structured_fields
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


def test_penalties_on_what_another_replica_drew_are_lost_in_vllm():
    """Go on where the answer's tokens are of the prompt, which only `repetition_penalty` counts."""
    own, vllm = (EngineConfig(kind=kind).capabilities("model") for kind in ("warmkv", "vllm"))
    penalised = make_request([3], presence_penalty=1.0)
    resumed = replace(penalised, resume=(7, 8))
    assert "presence penalties on what another replica drew" in (vllm.lacks(resumed.needs) or "")
    repeated = replace(make_request([3], repetition_penalty=1.5), resume=(7, 8))
    assert [vllm.lacks(each.needs) for each in (penalised, repeated)] == [None, None]
    assert own.lacks(resumed.needs) is None
    check(resumed, vllm, 64, 100)  # the gateway has decided
