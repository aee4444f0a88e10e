"""Seconds of work on a device, its queue emptied before and after."""

from __future__ import annotations

import time

import torch

now = time.perf_counter
"""Seconds on a clock of its own; only differences mean something."""


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._synchronize()
        self._start = now()

    def seconds(self) -> float:
        """Return the seconds since it was made or last asked."""
        self._synchronize()
        before, self._start = self._start, now()
        return self._start - before

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
