"""The engine of a replica: batch, memory, prefill."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ByteSize, Field, field_validator, model_validator

from warmkv.config.base import AutoBytes, AutoTokens, Section, planned
from warmkv.config.capabilities import Capabilities
from warmkv.policy_spec import PolicySpec

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 1024, 2048
"""Tokens of a step where `engine.step_tokens` is auto. Of an 8B model a GPU's arithmetic takes twice as long as their
launches take the host, and others wait 40 ms for their next token. On a CPU several prompts at once leave more steps
that only decode."""


EngineKind = Literal["warmkv", "vllm"]

NOT_OF_VLLM = (
    "engine.preempt_seconds",
    "engine.parked_bytes",
    "engine.compile_seconds",
    "engine.batch_invariant",
    "prefix_cache.eviction",
    "prefix_cache.host",
    "prefix_cache.disk",
    "prefix_cache.moving_bytes",
    "prefix_cache.tenant_share",
    "prefix_cache.packs",
)
"""Settings of what vLLM does in its own way, or not at all."""


NOT_OF: dict[str, tuple[str, ...]] = {"vllm": NOT_OF_VLLM, "warmkv": ("prefix_cache.keep_warm",)}
"""Settings that an engine lacks, or has no need of: with it they keep their defaults."""


VLLM_STORAGES = {"model": "auto", "fp8": "fp8_e4m3", "int4": "int4_per_token_head"}
"""Formats of `prefix_cache.storage` by vLLM's `kv_cache_dtype`."""


class EngineConfig(Section):
    kind: EngineKind = Field(
        "warmkv",
        description="what computes: warmkv's own engine, with every compression policy and tier, or vLLM "
        "(the extra `vllm`), with the models and GPUs that it runs on",
    )
    max_context: int | None = Field(None, ge=16, description="prompt + new tokens; the model's own limit if absent")
    max_slots: int = Field(16, ge=1, description="sequences decoded together")
    kv_bytes: AutoBytes = Field(
        "auto",
        description="limit for slots and prefill workspace together; auto: what the device has, less weights, "
        "activations and prefix_cache.memory_bytes",
    )
    memory_fraction: float = Field(
        0.9,
        gt=0,
        le=1,
        description="share of the device's memory, or on a CPU of the control group's, that is planned with; the rest "
        "is for what nobody counts: fragments, libraries",
    )
    step_tokens: AutoTokens = Field(
        "auto",
        description="tokens computed in a step: one of every sequence that decodes, and of prompts the rest, where "
        "tokens behind long contexts count for more while sequences decode. With "
        f"fewer tokens come more evenly, with more prompts are computed faster. auto: {CPU_STEP_TOKENS} on a CPU, "
        f"{GPU_STEP_TOKENS} on a GPU",
    )
    max_queue: int = Field(64, ge=1, description="requests that may wait in a replica; more are refused")
    preempt_seconds: float | None = Field(
        None,
        ge=0,
        description="how long a tenant's request waits until one of a tenant that holds more is set aside for it; "
        "null: never",
    )
    parked_bytes: ByteSize = Field(ByteSize(1 << 30), description="limit of host memory for slots that are set aside")
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="whether passes of the model are compiled, and on a GPU decode steps recorded as CUDA graphs; "
        "auto: on a GPU, where one is many small kernels. On a CPU it makes passes of small models shorter, and a "
        "start longer",
    )
    compile_seconds: float = Field(
        300.0,
        ge=0,
        description="limit of the seconds in which a start compiles attention kernels of all storages, on a GPU and "
        "where they are not in Triton's cache, and records decode steps of all batch sizes; requests do what is left",
    )
    batch_invariant: bool = Field(
        False,
        description="whether answers and log-probabilities, to the last bit, depend neither on other requests nor on "
        "how a prompt is cut into chunks; slower, see docs/engines.md",
    )
    self_check: bool = Field(
        True,
        description="whether a replica compares its logits with the model's own plain forward before it starts, "
        "and does not start where they differ",
    )
    threads: int = Field(
        0,
        ge=0,
        description="torch threads of a replica; 0: its share of the cores that it may use, among the replicas that "
        "have room on its node (`cluster.cpus_per_replica`)",
    )

    def capabilities(self, storage: str) -> Capabilities:
        """Return what the engine can do; `storage` is `prefix_cache.storage`, which all of vLLM's cache is in."""
        if self.kind == "warmkv":
            return Capabilities(self.kind)
        return Capabilities(self.kind, (PolicySpec(storage=storage).label,), *5 * (False,), keeps_generated=True)

    @property
    def has_own_kernels(self) -> bool:
        """Return True if it computes with warmkv's kernels, and on one GPU."""
        return self.kind == "warmkv"

    @property
    def keeps_quantised(self) -> bool:
        """Return True if quantised weights are computed with as they are; warmkv's own engine dequantises most."""
        return not self.has_own_kernels

    def processes(self, gpus: float) -> int:
        """Count a replica's processes: vLLM has an engine core, and a worker for each GPU, beside its own."""
        return 1 if self.has_own_kernels else 2 + max(1, int(gpus))

    @property
    def image_target(self) -> str:
        """Return the target of `k8s/Dockerfile` that has its packages; empty where every target has them."""
        return "vllm" if self.kind == "vllm" else ""

    @property
    def records(self) -> bool:
        """Return True if decode steps are recorded as CUDA graphs, where there is a GPU."""
        return self.compile != "off" and not self.batch_invariant

    @property
    def kv_limit(self) -> int:
        """Return kv_bytes. Raises RuntimeError while it is auto."""
        return planned(self.kv_bytes, "engine.kv_bytes")

    def tokens_per_step(self, *, on_gpu: bool) -> int:
        """Return step_tokens, or what `auto` is on such a device; every sequence has a token in any case."""
        tokens = self.step_tokens
        if tokens == "auto":
            tokens = GPU_STEP_TOKENS if on_gpu else CPU_STEP_TOKENS
        return max(tokens, self.max_slots)

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        if self.batch_invariant and self.compile == "on":
            raise ValueError(
                "engine.batch_invariant cannot be had with engine.compile on: compiled code sums otherwise"
            )
        return self

    @field_validator("compile", mode="before")
    @classmethod
    def _yaml_switch(cls, value: Any) -> Any:
        """Take true and false as `on` and `off`, which YAML reads so."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value
