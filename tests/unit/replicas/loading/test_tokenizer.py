"""What a gateway loads of a model, in a process of its own: no torch comes along, and templates are read as with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.replicas.families import CONTEXT, tiny_config
from warmkv.config import Config, ModelConfig
from warmkv.replicas.loading.tokenizer import load_tokenizer, served_context

GATEWAY = """
import json, sys
import warmkv.platform.gateway.deployment
from warmkv.config import Config, ModelConfig
from warmkv.replicas.loading.tokenizer import load_tokenizer, served_context, without_torch
with without_torch():
    tokenizer, context = load_tokenizer(ModelConfig()), served_context(Config(model={"path": sys.argv[1]}))
from warmkv.platform.gateway.apis.chat_parsing.parser import ResponseParser
text = tokenizer.apply_chat_template([{"role": "user", "content": "Hello."}], tokenize=False)
found = {"torch": "torch" in sys.modules, "text": text, "ids": tokenizer(text)["input_ids"], "context": context}
import torch
print(json.dumps(found | {"torch afterwards": torch.tensor([1]).item()}))
"""


@pytest.fixture
def long_rope(tmp_path: Path) -> str:
    """Return the folder of a configuration with another rotation of keys beyond 64 tokens."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    tiny_config("phi3", original_max_position_embeddings=64, rope_parameters=rope).save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_gateway_does_without_torch_and_renders_as_with_it(long_rope: str) -> None:
    ran = subprocess.run([sys.executable, "-c", GATEWAY, long_rope], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "PyTorch" not in ran.stderr, "no advice to install it"
    found = json.loads(ran.stdout)
    tokenizer = load_tokenizer(ModelConfig())
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hello."}], tokenize=False)
    assert found == {
        "torch": False,
        "text": text,
        "ids": tokenizer(text)["input_ids"],
        "context": 64,
        "torch afterwards": 1,
    }


def test_a_context_is_the_one_that_all_replicas_take(long_rope: str) -> None:
    """Have vLLM, which computes either rotation, take all that the model claims."""
    model = {"path": long_rope}
    assert served_context(Config.model_validate({"model": model, "engine": {"kind": "vllm"}})) == CONTEXT
    assert served_context(Config.model_validate({"model": model})) == 64
    small = {"cluster": {"groups": {"small": {"engine": {"max_context": 32}}}}}
    assert served_context(Config.model_validate({"model": model, **small})) == 32
