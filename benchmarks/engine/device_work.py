"""Record what a GPU does, by torch's profiler: kernels, the seconds in which one runs, those of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from warmkv.measuring.clock import Stopwatch


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """Count what ran on a device within some seconds."""

    kernels: int  # copies and fills included
    seconds: float  # on the host, until all was done
    busy: float  # seconds in which at least one ran
    by_name: Counter[str]  # seconds of each

    def of(self, *names: str) -> float:
        """Return seconds of the kernels whose names contain one of these."""
        return sum(seconds for name, seconds in self.by_name.items() if any(part in name for part in names))

    def longest(self, count: int) -> str:
        """Describe the kernels that took most."""
        found = self.by_name.most_common(count)
        return ", ".join(f"{name[:60]} {1e3 * seconds:.3g} ms" for name, seconds in found)


def watch(device: torch.device, action: Callable[[], None]) -> DeviceWork | None:
    """Run something and return what a GPU did, None on another device."""
    if device.type != "cuda":
        action()
        return None
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        stopwatch = Stopwatch(device)
        action()
        seconds = stopwatch.seconds()
    ran = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, last, by_name = 0.0, 0.0, Counter[str]()
    for start, end, name in ran:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
        by_name[name] += (end - start) / 1e6
    return DeviceWork(len(ran), seconds, busy / 1e6, by_name)
