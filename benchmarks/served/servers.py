"""The servers that are raced: warmkv as `warmkv serve` starts it, vLLM's own, or one that runs already."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.served.cpu import descendants, used_by_root, used_by_title
from benchmarks.served.load import Server

WARMKV_PARTS = {"gateway": "warmkv:gateway", "proxy": "ProxyActor", "replica": "warmkv:replica"}
CONTEXT = 16_384  # tokens
START_SECONDS = 300.0


def longer(model: Path, folder: Path) -> Path:
    """Copy a model folder by links, with room for CONTEXT tokens; what it says beyond its own context means nothing."""
    folder.mkdir()
    for file in model.iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return folder


@contextmanager
def warmkv(
    model: Path, threads: int, replicas: int, compiled: bool, kv_bytes: int, say: Callable[[str], None]
) -> Iterator[Server]:
    """Start warmkv on a local Ray of this process; replicas share `kv_bytes` for slots, and as many for prefixes."""
    from warmkv.config import parse
    from warmkv.platform.local import running

    settings = {
        "model": {"path": str(model), "served_name": "raced"},
        "engine": {
            "threads": threads,
            "kv_bytes": kv_bytes // replicas,
            "compile": "on" if compiled else "off",
        },
        "prefix_cache": {"memory_bytes": kv_bytes // replicas},
        "cluster": {"replicas": replicas},
        "gateway": {"port": 0},
    }
    with running(parse(settings), say) as service:
        parts = partial(used_by_title, os.getpid(), WARMKV_PARTS)
        extra = {"warmkv": {"ignore_eos": True}}
        processes = descendants(os.getpid())  # Ray's as well; servers that are started later are not among them
        yield Server("warmkv", service.url, "raced", extra, parts, ("gateway", "proxy"), lambda: processes)


@contextmanager
def vllm(command: Path, model: Path, port: int, kv_bytes: int, log: Path) -> Iterator[Server]:
    """Start `vllm serve` in a session of its own, on all cores. Raises RuntimeError if it does not come up."""
    arguments = ["serve", str(model), "--port", str(port), "--host", "127.0.0.1", "--served-model-name", "raced"]
    arguments += ["--dtype", "float32", "--block-size", "32", "--max-model-len", str(CONTEXT)]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, 2 * kv_bytes >> 30)),  # GiB, of slots and prefixes together
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment.pop("OMP_NUM_THREADS", None)
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(command), *arguments], env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url + "/health", process, log)
        cpu = partial(used_by_root, process.pid, "frontend", "core")
        processes = partial(_with_descendants, process.pid)
        yield Server("vllm", url, "raced", {"ignore_eos": True}, cpu, ("frontend",), processes)
    finally:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)  # its engine would outlive it
        process.wait()


def _with_descendants(root: int) -> set[int]:
    return {root, *descendants(root)}


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            with urlopen(url, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"vLLM did not start:\n{log.read_text()[-2000:]}")
