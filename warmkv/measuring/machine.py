"""Which machine and which versions a figure belongs to. Figures without it say nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("warmkv", "torch", "transformers", "triton", "numpy")


def identity(device: torch.device | None = None) -> dict[str, Any]:
    """Describe the machine: CPU model, cores this process may use, bytes of memory, and of the GPU where `device` is
    one.

    `load` is the machine's load when this was asked: a figure taken beside other work is no figure.
    """
    machine: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 2),
        "gpu": None,
    }
    if device is not None and device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        machine |= {"gpu": gpu.name, "gpu_memory_bytes": gpu.total_memory}
    return machine


def versions() -> dict[str, str]:
    """Return versions of Python and of what computes; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def commit() -> str | None:
    """Return the commit that this package is checked out at, with `-dirty` after changes.

    None outside git, and where the package was installed into an environment within another repository.
    """
    checkout = Path(__file__).resolve().parents[2]
    top = _git(checkout, "rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != checkout:
        return None
    return _git(checkout, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or None


def _git(folder: Path, *arguments: str) -> str:
    """Return what git says; an empty text where it fails or is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_model() -> str:
    """Return the processor's name; its architecture where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
