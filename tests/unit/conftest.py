"""Devices that kernels are tested on, and the one that attends prompts on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from warmkv.policies.compression import cpu_attention

CUDA = torch.cuda.is_available()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Yield a CPU whose kernels are interpreted, and a GPU where there is one."""
    if request.param == "cuda":
        if not CUDA:
            pytest.skip("there is no CUDA device")
        yield torch.device("cuda")
        return
    if CUDA:
        pytest.skip("with a CUDA device the kernels are compiled, not interpreted")
    from triton.runtime import interpreter

    of_tensors = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        of_tensors(tensor, scope)  # whose __index__ NumPy 2.4 refuses (triton issue 9171)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(interpreter, "_patch_lang_tensor", with_index)
        yield torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def attention_of_torch_in_modules() -> Iterator[None]:
    """Let what a module shares be computed by torch's kernels as well, whichever module loaded ours before it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "_kernels", None)
        yield


@pytest.fixture(autouse=True)
def attention_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attend by torch's kernels on a CPU until a test loads ours, which no other test uses then."""
    monkeypatch.setattr(cpu_attention, "_kernels", None)
