"""Seconds of work on a device, its queue emptied before and after."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._synchronize()
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Since it was made or last asked."""
        self._synchronize()
        now = time.perf_counter()
        passed, self._start = now - self._start, now
        return passed

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
