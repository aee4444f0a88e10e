"""What constraining answers adds to a step: a batch whose answers are JSON against the same one unconstrained.

See README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # started as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

if TYPE_CHECKING:
    from warmkv.replicas.constraints.compiler import Compiler
    from warmkv.replicas.loading.load import LoadedModel

BATCH, PROMPT_TOKENS = 16, 200
TARGET = 1.05  # times an unconstrained step
SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "n": {"type": "integer"},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "n", "ok"],
        "additionalProperties": False,
    },
}


def main(arguments: list[str] | None = None) -> int:
    """Run the race; 1 if a figure misses its target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="does it run? No figure of it means anything")
    parser.add_argument("--repeats", type=int, default=15, help="pairs of batches")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    import torch

    from benchmarks.report import document, figure, ratios, show, write
    from warmkv.config import ModelConfig
    from warmkv.measuring import machine
    from warmkv.replicas.constraints.compiler import Compiler
    from warmkv.replicas.loading.load import load_model
    from warmkv.replicas.loading.tokenizer import load_tokenizer

    config = ModelConfig(device="cpu")
    model, tokenizer = load_model(config), load_tokenizer(config)
    compiler = Compiler(tokenizer, model.vocabulary, model.eos_ids)
    repeats, steps = (2, 6) if options.quick else (options.repeats, 60)
    free: list[float] = []
    constrained: list[float] = []
    for repeat in range(-1, repeats):  # the first pair warms up
        pair = [step_seconds(model, compiler, steps, options.seed, constrain=constrain) for constrain in (False, True)]
        if repeat >= 0:
            free.append(pair[0])
            constrained.append(pair[1])
    figures = [
        figure("step_ms_free", [1000 * value for value in free], None, "lower"),
        figure("step_ms_constrained", [1000 * value for value in constrained], None, "lower"),
        figure("constrained_step_ratio", ratios(constrained, free), None if options.quick else TARGET, "lower"),
    ]
    notes = [f"{BATCH} sequences of {PROMPT_TOKENS} tokens, a vocabulary of {model.vocabulary}, steps that only decode"]
    show("cost of masks", figures, notes)
    if options.json:
        settings = {"repeats": repeats, "steps": steps, "seed": options.seed}
        identity, commit = machine.identity(torch.device("cpu")), os.environ.get("WARMKV_COMMIT") or machine.commit()
        write(options.json, document(identity, machine.versions(), commit, settings, figures, notes))
    return int(any(each.met is False for each in figures))


def step_seconds(model: LoadedModel, compiler: Compiler, steps: int, seed: int, *, constrain: bool) -> float:
    """Return the median time of a step in which all sequences decode."""
    from warmkv.config import EngineConfig, PrefixCacheConfig
    from warmkv.policy_spec import PolicySpec
    from warmkv.replicas.engine.engine import Engine
    from warmkv.replicas.protocol import Constraint, GenerateRequest, SamplingParams

    constraint = Constraint("json_schema", json.dumps(SCHEMA)) if constrain else None
    engine = Engine(model, EngineConfig(kv_bytes=1 << 30, max_slots=BATCH), PrefixCacheConfig(), clock=time.monotonic)
    told: list[Any] = []
    for number in range(BATCH):
        tokens = tuple((7 * at + number) % model.vocabulary for at in range(PROMPT_TOKENS))
        sampling = SamplingParams(steps + PROMPT_TOKENS, seed=seed + number, ignore_eos=True, constraint=constraint)
        request = GenerateRequest(str(number), tokens, (), sampling, PolicySpec())
        engine.submit(request, told.append, compiler.matcher(constraint) if constraint else None)
    seconds: list[float] = []
    while len(seconds) < steps:
        decoding = len(engine.scheduler.decoding) == BATCH and not engine.scheduler.prefilling
        began = time.perf_counter()
        if not engine.step():
            raise RuntimeError("the answers ended before the last step")
        if decoding:
            seconds.append(time.perf_counter() - began)
    engine.store.close()
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
