"""What the races measured, and the figures that follow from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from benchmarks.report import Direction, Figure, figure, ratios

PAGED = "continuous_batching"
PEERS = ("generate_dynamic", "generate_static", PAGED)


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure of the issue's table, with what is to be reached; None where it is only reported."""

    race: str
    direction: Direction
    on_cpu: float | None = None
    on_cuda: float | None = None


AIMS = {
    "decode_snapkv_vs_generate": Aim("decode", "higher", 15.0, 8.0),
    "decode_snapkv_vs_full": Aim("decode", "higher", 3.6, 3.6),
    "decode_snapkv_vs_continuous_batching": Aim("decode", "higher", 3.6, 3.6),
    "decode_full_vs_fastest_peer": Aim("decode", "higher", 1.0, 1.0),
    "memory_snapkv": Aim("memory", "lower", 1 / 12, 1 / 12),
    "memory_snapkv_kivi4": Aim("memory", "lower", 1 / 30, 1 / 30),
    "ttft_warm": Aim("ttft", "lower", 0.20, 0.15),
    "handoff_snapkv": Aim("handoff", "lower", 0.05, 0.03),
    "handoff_snapkv_kivi4": Aim("handoff", "lower", 0.05, 0.03),
    "bandwidth_snapkv_alone": Aim("bandwidth", "higher", None, 0.70),
    "bandwidth_snapkv_batch": Aim("bandwidth", "higher", None, 0.70),
    "bandwidth_full_alone": Aim("bandwidth", "higher", None, 0.70),
    "bandwidth_full_batch": Aim("bandwidth", "higher", None, 0.70),
    **{
        f"steps_{policy}_{batch}": Aim("steps", "higher", None, 0.70)
        for policy in ("full", "snapkv")
        for batch in ("alone", "equal_8", "equal_32", "mixed_8", "mixed_32")
    },
    "chunk_2048": Aim("chunks", "higher"),
    "prompt_seconds_full_2048": Aim("long", "lower"),
    "serving_snapkv_vs_continuous_batching": Aim("serving", "higher", 2.0, 3.0),
    "serving_snapkv_vs_full": Aim("serving", "higher"),
    "decode_full_vs_vllm": Aim("vllm", "higher", 1.0, 1.0),
    "decode_snapkv_vs_vllm": Aim("vllm", "higher", 3.0, 3.0),
    "serving_snapkv_vs_vllm": Aim("vllm", "higher", 1.5, 1.5),
    "ttft_cold_vs_vllm": Aim("vllm", "lower"),
    "ttft_warm_vs_vllm": Aim("vllm", "lower"),
    "short_prompts_vs_vllm": Aim("vllm", "higher"),
}
RACES = tuple(dict.fromkeys(aim.race for aim in AIMS.values()))
PAIRS = {
    "decode_snapkv_vs_generate": ("tokens_per_second_warmkv_snapkv", "tokens_per_second_generate_dynamic"),
    "decode_snapkv_vs_full": ("tokens_per_second_warmkv_snapkv", "tokens_per_second_warmkv_full"),
    "decode_snapkv_vs_continuous_batching": (
        "tokens_per_second_warmkv_snapkv",
        "tokens_per_second_continuous_batching",
    ),
    "decode_full_vs_fastest_peer": ("tokens_per_second_warmkv_full", "tokens_per_second_fastest_peer"),
    "memory_snapkv": ("bytes_snapkv", "bytes_full"),
    "memory_snapkv_kivi4": ("bytes_snapkv_kivi4", "bytes_full"),
    "ttft_warm": ("ttft_seconds_warm", "ttft_seconds_cold"),
    "handoff_snapkv": ("handoff_seconds_snapkv", "prefill_seconds_snapkv"),
    "handoff_snapkv_kivi4": ("handoff_seconds_snapkv_kivi4", "prefill_seconds_snapkv_kivi4"),
    "serving_snapkv_vs_continuous_batching": (
        "requests_per_second_warmkv_snapkv",
        "requests_per_second_continuous_batching",
    ),
    "serving_snapkv_vs_full": ("requests_per_second_warmkv_snapkv", "requests_per_second_warmkv_full"),
    "decode_full_vs_vllm": ("tokens_per_second_vllm_race_full", "tokens_per_second_vllm"),
    "decode_snapkv_vs_vllm": ("tokens_per_second_vllm_race_snapkv", "tokens_per_second_vllm"),
    "serving_snapkv_vs_vllm": ("requests_per_second_vllm_race_snapkv", "requests_per_second_vllm"),
    "ttft_cold_vs_vllm": ("ttft_seconds_vllm_race_cold", "ttft_seconds_vllm_cold"),
    "ttft_warm_vs_vllm": ("ttft_seconds_vllm_race_warm", "ttft_seconds_vllm_warm"),
    "short_prompts_vs_vllm": ("short_prompts_per_second_warmkv", "short_prompts_per_second_vllm"),
}
"""Figures that are ratios, pair by pair, of two measurements. The others are measured as they are."""


LOWER = (
    "bytes", "ttft", "handoff", "prefill_seconds", "prompt_seconds", "step_milliseconds", "step_kernels",
    "chunk_milliseconds",
)  # fmt: skip
"""How figures begin of which less is better."""


class Results:
    """Measurements by name, in the order of the repeats, and what must be said about them."""

    def __init__(self) -> None:
        self.measured: dict[str, list[float]] = defaultdict(list)
        self.notes: list[str] = []

    def add(self, name: str, value: float) -> None:
        self.measured[name].append(value)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def figures(self, device: str, races: Collection[str], only: Collection[str]) -> list[Figure]:
        """Return first the table's figures (of `only`, if it names any), then everything that was measured for them."""
        self._find_fastest_peer()
        found = []
        for name, aim in AIMS.items():
            if aim.race in races and (not only or name in only):
                pair = PAIRS.get(name)
                values = (
                    ratios(*(self.measured.get(side, []) for side in pair)) if pair else self.measured.get(name, [])
                )
                found.append(figure(name, values, aim.on_cuda if device == "cuda" else aim.on_cpu, aim.direction))
        rest = [name for name in self.measured if name not in AIMS]
        return [*found, *(figure(name, self.measured[name], None, _direction(name)) for name in sorted(rest))]

    def _find_fastest_peer(self) -> None:
        speeds = [self.measured[name] for peer in PEERS if (name := f"tokens_per_second_{peer}") in self.measured]
        best = [max(repeat) for repeat in zip(*speeds, strict=False)]
        if best:
            self.measured["tokens_per_second_fastest_peer"] = best


def _direction(name: str) -> Direction:
    return "lower" if name.startswith(LOWER) else "higher"
