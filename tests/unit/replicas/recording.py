"""A stand-in for CUDA graphs on a CPU: records calls with their tensors, by address, and makes them again.

As a graph it knows nothing of Python: numbers are those of the recording, results go where they went. What a graph
cannot hold is refused while it records: uploads, and reading numbers back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from warmkv.replicas.slots import kernels

T = TypeVar("T")
REFUSED = {torch.ops.aten.lift_fresh, torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero}
UNWRITTEN = {torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided}


class Recording(TorchDispatchMode):
    """Note every call of torch, and of kernels through `launched`, in the order in which they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in REFUSED:
            raise RuntimeError(f"{func} cannot be recorded: operation not permitted when stream is capturing")
        results = func(*args, **kwargs)
        if func.overloadpacket in UNWRITTEN:
            self.calls.append(lambda: _poison(results))
            return results
        written = any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.returns)
        given = {_storage(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        fresh = [one for one in tree_leaves(results) if _storage(one) not in given]
        if written or fresh:  # others are views, and stay those of what they were made of

            def again() -> None:
                computed = tree_leaves(func(*args, **kwargs))
                if not written:
                    for held, now in zip(tree_leaves(results), computed, strict=True):
                        if any(held is one for one in fresh):
                            held.copy_(now)

            self.calls.append(again)
        return results

    def launched(self, launch: Callable[[], None]) -> None:
        self.calls.append(launch)

    def replay(self) -> None:
        for call in self.calls:
            call()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _poison(tensor: torch.Tensor) -> None:
    """Fill what nobody has written: a replay must not read what another step left there."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 1 << 30)


class CpuRecorder:
    """Record as `CudaRecorder`; `use` lets it see the kernels that are launched."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.taken = 0
        self._now: Recording | None = None

    def __call__(self, compute: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        recording = self._now = Recording()
        try:
            with ExitStack() as stack:
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                patch.setattr(torch.Tensor, "tolist", _refuse)
                patch.setattr(torch.Tensor, "numpy", _refuse)
                stack.enter_context(recording)
                result = compute()
        finally:
            self._now = None
        self.recordings.append(recording)
        return result, recording.replay

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Record what `kernels.launch` launches in Triton's interpreter."""
        from warmkv.replicas.slots.kernels import choose, decode, launch, update

        for name, module, launched in (
            ("update", update, ("put",)),
            ("choose", choose, ("estimate_segments", "choose_entries")),
            ("decode", decode, ("attend_split", "combine", "sum_received")),
        ):
            watched = {kernel: _Kernel(getattr(module, kernel), self) for kernel in launched}
            patch.setattr(launch, name, SimpleNamespace(**watched))

    def use_attend(self, patch: pytest.MonkeyPatch, attend: Callable[..., None]) -> None:
        """Record calls of what stands in for the kernels, which is quicker than these are interpreted."""
        patch.setattr(kernels, "attend", lambda *given: self.launch(lambda: attend(*given)))

    def launch(self, call: Callable[[], None]) -> None:
        with _disable_current_modes(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", TOLIST)
            patch.setattr(torch.Tensor, "numpy", NUMPY)
            call()
        if self._now is not None:
            self._now.launched(call)


TOLIST, NUMPY = torch.Tensor.tolist, torch.Tensor.numpy


def _refuse(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
    raise RuntimeError("a step that is recorded reads numbers back")


class _Kernel:
    def __init__(self, kernel: Any, recorder: CpuRecorder) -> None:
        self._kernel, self._recorder = kernel, recorder

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **given: self._recorder.launch(lambda: self._kernel[grid](*args, **given))
