"""What a gateway loads of a model, in a process of its own: no torch comes along, and templates are read as with it."""

from __future__ import annotations

import json
import subprocess
import sys

from warmkv.config import ModelConfig
from warmkv.replicas.loading.tokenizer import load_tokenizer

GATEWAY = """
import json, sys
import warmkv.platform.gateway.deployment
from warmkv.config import ModelConfig
from warmkv.replicas.loading.tokenizer import load_max_context, load_tokenizer, without_torch
with without_torch():
    tokenizer, context = load_tokenizer(ModelConfig()), load_max_context(ModelConfig())
from warmkv.platform.gateway.apis.chat_parsing.parser import ResponseParser
text = tokenizer.apply_chat_template([{"role": "user", "content": "Hello."}], tokenize=False)
found = {"torch": "torch" in sys.modules, "text": text, "ids": tokenizer(text)["input_ids"], "context": context}
import torch
print(json.dumps(found | {"torch afterwards": torch.tensor([1]).item()}))
"""


def test_a_gateway_does_without_torch_and_renders_as_with_it() -> None:
    ran = subprocess.run([sys.executable, "-c", GATEWAY], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "PyTorch" not in ran.stderr, "no advice to install it"
    found = json.loads(ran.stdout)
    tokenizer = load_tokenizer(ModelConfig())
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hello."}], tokenize=False)
    assert found == {
        "torch": False,
        "text": text,
        "ids": tokenizer(text)["input_ids"],
        "context": found["context"],
        "torch afterwards": 1,
    }
    assert found["context"] > 1024
