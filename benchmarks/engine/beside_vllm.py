"""The race against vLLM's own engine: the same weights, prompts, greedy answers and threads, in one run and in turn.

vLLM lives in an environment of its own (`benchmarks/peers.sh vllm`), so its engine is a process that obeys lines of
JSON (`vllm_worker.py`) and sleeps while warmkv is timed. Its contexts are computed, those of warmkv synthetic; both
decode from as many tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine import serving
from benchmarks.engine.arena import Arena
from benchmarks.engine.generate import step_seconds
from benchmarks.engine.warm import engine
from warmkv.measuring import ttft
from warmkv.measuring.clock import Stopwatch
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.engine.scheduler import EngineEvent
from warmkv.replicas.protocol import GenerateRequest, SamplingParams

BLOCK = 32
"""Tokens of a block of vLLM, the smallest on a CPU."""
SHORT_PROMPTS, SHORT_TOKENS = 64, 128
COMPARED = 16
"""Tokens of each answer that both engines draw and that are compared."""
WORKER = Path(__file__).with_name("vllm_worker.py")


class Vllm:
    """vLLM's engine in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def answer(self, prompts: list[list[int]], new_tokens: list[int]) -> dict[str, Any]:
        """Compute prompts together. Returns `steps`, `tokens` and `cached`. Raises RuntimeError if the engine ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """Return its next line. Raises RuntimeError with the end of its log if it ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM's engine ended: {self._log.read_text()[-2_000:]}")
        found: dict[str, Any] = json.loads(line)
        return found


def race(arena: Arena) -> None:
    """Decoding, first tokens, short prompts and a mix of requests under equal KV memory, each against vLLM's."""
    if arena.vllm is None:
        arena.results.note("vllm was not raced: --vllm names no command of it (benchmarks/peers.sh vllm)")
        return
    setting, load = arena.setting, arena.setting.load
    longest = max(setting.context, setting.prompt) + setting.new_tokens + 1
    roomy = setting.sequences * (setting.context + setting.new_tokens + BLOCK) + 2 * setting.prompt
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmkv-race-")))
        arena.models.peer.save_pretrained(folder)
        arena.say("starting vLLM's engine, twice: with room, and with the limit of the serving mix")
        wide = stack.enter_context(_running(arena, folder, roomy, longest))
        narrow = stack.enter_context(_running(arena, folder, load.limit, max(load.prompts) + max(load.new_tokens)))
        _decode(arena, wide)
        _first_tokens(arena, wide)
        _short_prompts(arena, wide)
        _mix(arena, narrow)


def _decode(arena: Arena, peer: Vllm) -> None:
    setting, results = arena.setting, arena.results
    prompts = arena.contexts.ids[: setting.sequences].tolist()
    ours = {
        "vllm_race_snapkv": arena.warm(f"snapkv@{setting.memory_budget}", "vllm_race_snapkv"),
        "vllm_race_full": arena.warm("full", "warmkv_full"),
    }
    arena.say(f"vLLM computes {setting.sequences} contexts of {setting.context} tokens")
    for prompt in prompts:
        peer.answer([prompt], [1])
    for turn in arena.repeats("decode beside vLLM"):
        arena.say(f"{turn}: vLLM")
        told = peer.answer(prompts, [setting.new_tokens] * setting.sequences)
        whole = [at for at, drawn in told["steps"] if drawn == setting.sequences]
        results.add("tokens_per_second_vllm", setting.sequences / step_seconds(whole))
        if min(told["cached"]) < setting.context - BLOCK:
            raise RuntimeError("vLLM computed the contexts anew")
        for name, contestant in ours.items():
            arena.say(f"{turn}: {name}")
            run = contestant.run(setting.sequences, setting.new_tokens - 1)
            results.add(f"tokens_per_second_{name}", setting.sequences / run.seconds)


def _first_tokens(arena: Arena, peer: Vllm) -> None:
    """Time a prompt cold, then one that shares 90% of it."""
    setting, results = arena.setting, arena.results
    random = np.random.default_rng(setting.seed + 1)
    stored = 4 * setting.prompt * arena.models.warm.kv_shape.token_bytes
    running = engine(arena.models, setting, stored=stored)
    for turn in arena.repeats("first tokens beside vLLM"):
        arena.say(turn)
        pair = ttft.cold_and_warm(running, PolicySpec(), setting.prompt, setting.new_tokens, "5m", random)
        ids = random.integers(0, arena.models.warm.vocabulary, (2, setting.prompt))
        shared = round(ttft.WARM_SHARE * setting.prompt)
        ids[1, :shared] = ids[0, :shared]
        cold, warm = (peer.answer([prompt], [1])["steps"][-1][0] for prompt in ids.tolist())
        for name, seconds in (("cold", cold), ("warm", warm)):
            results.add(f"ttft_seconds_vllm_{name}", seconds)
        results.add("ttft_seconds_vllm_race_cold", pair.cold.seconds)
        results.add("ttft_seconds_vllm_race_warm", pair.warm.seconds)


def _short_prompts(arena: Arena, peer: Vllm) -> None:
    """Time the first tokens of many short prompts that are there at once; compare a few greedy answers."""
    results, vocabulary = arena.results, arena.models.warm.vocabulary
    random = np.random.default_rng(arena.setting.seed + 2)
    count = 4 if arena.setting.quick else SHORT_PROMPTS
    running = engine(arena.models, arena.setting, max_slots=count)
    for turn in arena.repeats("short prompts beside vLLM"):
        arena.say(turn)
        prompts = random.integers(0, vocabulary, (count, SHORT_TOKENS)).tolist()
        told = peer.answer(prompts, [1] * count)
        results.add("short_prompts_per_second_vllm", count / told["steps"][-1][0])
        watch = Stopwatch(arena.models.device)
        _draw(running, prompts, 1)
        results.add("short_prompts_per_second_warmkv", count / watch.seconds())
    compared = prompts[:4]
    those = peer.answer(compared, [COMPARED] * len(compared))["tokens"]
    these = _draw(running, compared, COMPARED)
    same = sum(a == b for one, other in zip(these, those, strict=True) for a, b in zip(one, other, strict=True))
    results.add("same_tokens_full_as_vllm", same / (COMPARED * len(compared)))


def _draw(running: Engine, prompts: list[list[int]], new: int) -> list[list[int]]:
    told: list[list[EngineEvent]] = [[] for _ in prompts]
    sampling = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    for number, (prompt, events) in enumerate(zip(prompts, told, strict=True)):
        running.submit(GenerateRequest(f"{number}", tuple(prompt), (), sampling, PolicySpec()), events.append)
    while running.step():
        pass
    return [[event for event in events if isinstance(event, int)] for events in told]


def _mix(arena: Arena, peer: Vllm) -> None:
    """Time requests of mixed lengths until the last is answered, with equal bytes of KV memory."""
    results, load = arena.results, arena.setting.load
    policy = PolicySpec(name="snapkv", budget=load.budget)
    limit = load.limit * arena.models.warm.kv_shape.token_bytes
    running = engine(arena.models, arena.setting, max_slots=load.requests, kv_bytes=limit, step_tokens=load.chunk)
    for number, turn in enumerate(arena.repeats("mix beside vLLM"), 1):
        requests = serving.requests(arena, 100 + number)
        arena.say(f"{turn}: {len(requests)} requests")
        told = peer.answer([prompt for prompt, _ in requests], [new for _, new in requests])
        results.add("requests_per_second_vllm", len(requests) / told["steps"][-1][0])
        results.add("requests_per_second_vllm_race_snapkv", len(requests) / serving.serve(running, policy, requests))


@contextmanager
def _running(arena: Arena, model: Path, tokens: int, longest: int) -> Iterator[Vllm]:
    """Start vLLM's engine with a cache of so many tokens, for requests of up to `longest`, and end it.

    Raises RuntimeError if it does not come up.
    """
    assert arena.vllm is not None
    settings: dict[str, Any] = {
        "model": str(model),
        "dtype": arena.setting.dtype,
        "skip_tokenizer_init": True,
        "seed": arena.setting.seed,
        "max_model_len": longest,
        "max_num_seqs": SHORT_PROMPTS,
        "num_gpu_blocks_override": -(-tokens // BLOCK) + 1,  # the first is never given out
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("PYTHONPATH", None)
    if arena.models.device.type == "cpu":
        settings["block_size"] = BLOCK
        threads = torch.get_num_threads()
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(-(-tokens * arena.models.warm.kv_shape.token_bytes // (1 << 30))),  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        }
    log = model / f"{tokens}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [str(arena.vllm.with_name("python")), "-P", str(WORKER), json.dumps(settings)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        peer = Vllm(process, log)
        peer.read()
        yield peer
    finally:
        process.kill()
        process.wait()
