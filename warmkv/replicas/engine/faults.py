"""Which failure is whose: of one request, for want of memory, or of a device that is lost."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Literal

import torch

FAILURES_IN_A_ROW = 5
"""Failures without a success between after which the device is taken for lost."""

STICKY_CODES = frozenset({46, 100, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721})
"""CUDA errors (cudaError_t) after which a context is of no use any more: devices unavailable or gone, uncorrectable
ECC and NVLink errors, illegal addresses and instructions, asserts, launch timeouts and failures."""

STICKY_TEXTS = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "launch timed out",
    "ecc error",
    "nvlink error",
    "misaligned address",
    "illegal instruction",
    "invalid program counter",
    "hardware stack error",
    "context is destroyed",
    "busy or unavailable",
    "no cuda-capable device",
    "fallen off the bus",
    "device lost",
    "device is lost",
)
"""The same in messages, in lower case, for errors that come without a code."""

MEMORY_TEXTS = ("out of memory", "not enough memory", "can't allocate memory", "status_alloc_failed")

FailureKind = Literal["request", "memory", "device"]
KINDS: tuple[FailureKind, ...] = ("request", "memory", "device")


class DeviceLostError(RuntimeError):
    """The device cannot compute anything any more."""


class NotFiniteError(ArithmeticError):
    """The model gave logits that are infinite or no numbers."""

    def __init__(self) -> None:
        super().__init__("the model gave logits that are not finite")


def describe(error: Exception) -> str:
    """Return what clients may hear of a failure; its text is in the replica's log only."""
    return str(error) if isinstance(error, NotFiniteError) else type(error).__name__


def let_go(error: Exception) -> Exception:
    """Drop the frames of an error, whose tensors would take memory while it is held on to; returns the error."""
    for cause in _causes(error):
        cause.__traceback__ = None
    return error


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out, on the device or the host."""
    for cause in _causes(error):
        if isinstance(cause, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(cause, RuntimeError) and _says(cause, MEMORY_TEXTS):
            return True
    return False


def is_sticky(error: BaseException) -> bool:
    """Tell whether every later call on the device would fail, too."""
    for cause in _causes(error):
        if isinstance(cause, DeviceLostError) or getattr(cause, "error_code", None) in STICKY_CODES:
            return True
        if isinstance(cause, RuntimeError) and _says(cause, STICKY_TEXTS):
            return True
    return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    message = str(error).lower()
    return any(text in message for text in texts)


class FailureCounts:
    """The failures of an engine: how many of each kind so far, and those without a success between."""

    def __init__(self) -> None:
        self.counts: dict[FailureKind, int] = dict.fromkeys(KINDS, 0)
        self._device = 0
        self._blamed: set[Hashable] = set()

    def succeeded(self) -> None:
        """Forget the failures in a row: something was computed."""
        self._device = 0
        if self._blamed:
            self._blamed.clear()

    def failed(self, kind: FailureKind, prompt: Hashable) -> None:
        """Count the failure of a request. However often it comes again, one prompt is one failure in a row."""
        self.counts[kind] += 1
        if kind != "device":
            self._blamed.add(prompt)

    def device_failed(self) -> None:
        """Count a failure of the device itself, or of the engine."""
        self._device += 1

    @property
    def lost(self) -> bool:
        """Tell whether so much failed in a row that the device must be taken for lost."""
        return self._device + len(self._blamed) >= FAILURES_IN_A_ROW
