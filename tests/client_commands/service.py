"""`warmkv serve` as a process of its own, with the model that a client needs, and its access log."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.polling import PATIENCE
from warmkv.models.tiny import PATH

LONG_CONTEXT = 131_072


@dataclass(frozen=True)
class Service:
    """A service that runs: its address, the name of its model, and its access log."""

    url: str
    model: str
    log: Path

    def records(self) -> list[dict[str, Any]]:
        """Return the lines of the access log so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@contextmanager
def serving(model: Path, folder: Path, flags: Sequence[str] = ()) -> Iterator[Service]:
    """Start `warmkv serve` on a free port of this machine, and stop it as Ctrl-C would."""
    log = folder / "access.jsonl"
    settings = ("gateway.port=0", f"gateway.access_log={log}", *flags)
    command = [sys.executable, "-m", "warmkv", "serve", str(model)]
    command += [part for setting in settings for part in ("--set", setting)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if found := re.search(r"at (http://\S+)", line):
                break
        else:
            raise RuntimeError(f"warmkv serve never said where it serves:\n{said}")
        yield Service(found[1], model.name, log)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)


def write_long_model(folder: Path) -> Path:
    """Write a small Llama with random weights and a long context: agents' prompts fit, what it answers is noise."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LONG_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=[0, 2, *range(100, 110)],  # so many that answers stay short
        pad_token_id=0,
    )
    LlamaForCausalLM(config).half().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(PATH / name, folder)
    return folder
