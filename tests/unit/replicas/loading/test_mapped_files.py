"""Weights are in memory once while they are loaded."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from warmkv.replicas.loading.mapped_files import MappedFiles
from warmkv.replicas.loading.packed_weights import can_pack

PAGE = mmap.PAGESIZE

MEASURE = """
import sys
from pathlib import Path
from warmkv.config import ModelConfig
from warmkv.replicas.loading.load import load_model

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

load_model(ModelConfig(device="cpu", dtype="float32"))  # the shipped one: what code and libraries take is there
Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
before = resident("VmHWM")
model = load_model(ModelConfig(path=sys.argv[1], device="cpu", dtype="float32"))
print((resident("VmHWM") - before) / model.weight_bytes())
"""


@pytest.mark.skipif(not can_pack(torch.device("cpu"), torch.float32), reason="this build of torch packs no weights")
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.soak), torch.bfloat16])
def test_a_start_holds_the_weights_once(tmp_path: Path, dtype: torch.dtype) -> None:
    """Take the most that was ever resident; a file in another dtype is mapped beside what is made of it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not forget the peak of a process's memory")
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False}
    LlamaForCausalLM(LlamaConfig(vocab_size=1000, **shape, **heads)).to(dtype).save_pretrained(tmp_path)
    told = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    assert float(told.stdout.split()[-1]) < 1.3 + (0.5 if dtype == torch.bfloat16 else 0)


def test_only_whole_pages_of_a_mapped_file_are_let_go(tmp_path: Path) -> None:
    sizes = {"small": 10, "large": 5 * PAGE // 4 + 3, "last": PAGE}
    save_file({name: torch.randn(size) for name, size in sizes.items()}, tmp_path / "weights.safetensors")
    weights = load_file(tmp_path / "weights.safetensors")
    kept = {name: weight.clone() for name, weight in weights.items()}
    files = MappedFiles.of_process()
    if not files.ranges:
        pytest.skip("this system does not tell what is mapped, or maps nothing")
    assert not files.pages(weights["small"])
    pages, start = files.pages(weights["large"]), weights["large"].data_ptr()
    assert start <= pages.start < start + PAGE
    assert 0 <= start + weights["large"].nbytes - pages.stop < PAGE
    assert pages.start % PAGE == pages.stop % PAGE == 0
    assert not files.pages(kept["large"]), "memory that is no file's would be lost"
    assert not files.pages(weights["large"].view(3, -1).T if sizes["large"] % 3 == 0 else weights["large"][::2])
    for name, weight in weights.items():
        files.let_go(weight)
        files.let_go(kept[name])
        assert torch.equal(weight, kept[name])


def test_nothing_is_let_go_where_it_is_not_told_what_is_mapped(tmp_path: Path) -> None:
    assert not MappedFiles.of_process(tmp_path / "nothing").ranges
