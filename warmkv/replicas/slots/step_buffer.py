"""Hold a step's inputs in one buffer with a fixed address on the device, and upload them by one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from warmkv.replicas.slots.rows import Ints

SECTIONS = ("tokens", "positions", "places", "parameters", "numbers", "index", "facts")
"""What a step is told, first what is new in every step: one copy takes all up to the last section that was written."""
ALIGNED = 16
"""Numbers that sections begin at multiples of: Triton compiles a kernel anew for pointers that are not aligned."""


class StepBuffer:
    """Hold sections of int64 numbers on the host and on a device; they move only when one has to grow.

    The host has two copies, written in turn, so that a step is prepared while the one before is still uploaded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.moves = self.uploads = 0
        self._move(dict.fromkeys(SECTIONS, 0))

    def reserve(self, **numbers: int) -> bool:
        """Give sections room for so many numbers; return True if all have moved and must be written again."""
        lacking = {section: count for section, count in numbers.items() if count > self._room[section]}
        if lacking:
            grown = {section: max(ALIGNED, 1 << (count - 1).bit_length()) for section, count in lacking.items()}
            self._move(self._room | grown)
        return bool(lacking)

    def _move(self, room: dict[str, int]) -> None:
        """Move to memory with so much room. If memory runs out, nothing has changed."""
        ends = np.cumsum(list(room.values())).tolist()
        copies = [_HostCopy(ends[-1], self._device) for _ in range(2)]
        self._on_device = torch.zeros(ends[-1], dtype=torch.int64, device=self._device)
        self._room, self._copies = room, copies
        self._at = {section: slice(end - room[section], end) for section, end in zip(SECTIONS, ends, strict=True)}
        self._written = 0  # numbers that the next upload takes
        self.moves += 1

    def write(self, section: str) -> Ints:
        """Return a section on the host, to be written; the next `upload` takes it."""
        at = self._at[section]
        if not self._written:
            self._copies[0].wait()
        self._written = max(self._written, at.stop)
        return self._copies[0].numbers[at]

    def on_device(self, section: str) -> Tensor:
        """Return a view of a section on the device, valid until `moves` changes."""
        return self._on_device[self._at[section]]

    @property
    def nbytes(self) -> int:
        """Return the bytes on the device."""
        return self._on_device.nbytes

    def tensors(self) -> list[Tensor]:
        """Return everything that is held, on the device and the host."""
        return [self._on_device, *(copy.tensor for copy in self._copies)]

    def upload(self) -> None:
        """Copy the sections written since the last upload, without waiting for the device."""
        if self._written:
            self._copies[0].upload_to(self._on_device[: self._written])
            self._copies.reverse()
            self._written = 0
            self.uploads += 1


class _HostCopy:
    """Hold a copy on the host, pinned beside a GPU; writable again once its upload is done."""

    def __init__(self, count: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.tensor = torch.zeros(count, dtype=torch.int64, pin_memory=cuda)
        self.numbers: Ints = self.tensor.numpy()
        self._uploaded: Any = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def upload_to(self, target: Tensor) -> None:
        target.copy_(self.tensor[: len(target)], non_blocking=True)
        if self._uploaded is not None:
            self._uploaded.record()
