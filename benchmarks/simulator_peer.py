"""DynoSim (`python -m dynamo.replay` of NVIDIA Dynamo) on the trace of a race, in a process of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from warmkv.simulator.traces import Trace, mooncake


def requests_per_second(python: Path, trace: Trace, slots: int, step_tokens: int, tokens: int) -> float:
    """Replay a trace on one worker that has room for so many tokens; what is read before does not count.

    Raises CalledProcessError.
    """
    engine = {
        "num_gpu_blocks": tokens // trace.block_size,
        "block_size": trace.block_size,
        "max_num_seqs": slots,
        "max_num_batched_tokens": step_tokens,
    }
    with TemporaryDirectory() as folder:
        file, report = Path(folder) / "trace.jsonl", Path(folder) / "report.json"
        mooncake.write(trace, file)
        command = [str(python), "-m", "dynamo.replay", "--trace-format", "mooncake", "--report-json", str(report)]
        command += ["--trace-block-size", str(trace.block_size), "--extra-engine-args", json.dumps(engine), str(file)]
        subprocess.run(command, check=True, capture_output=True, cwd=folder)
        found = json.loads(report.read_text())
    return float(found["completed_requests"] / found["wall_time_ms"] * 1e3)
