"""Every setting of warmkv, with its default, as one frozen tree. Nothing else in the package defines a default.

The tree is read from a YAML document, then from environment variables (`WARMKV_ENGINE__MAX_SLOTS=8`), then from
`--set engine.max_slots=8` flags; the later source wins. Unknown keys are refused with the nearest known one named.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AwareDatetime,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    field_validator,
    model_validator,
)

from warmkv.faults import UserError
from warmkv.gpus import Gpu
from warmkv.model_shape import KV, ModelShape
from warmkv.policy_spec import PolicySpec

ENV_PREFIX = "WARMKV_"
Eviction = Literal["lru", "lfu", "length", "cost"]
BlockStorage = Literal["model", "fp8", "kivi4"]


class ConfigError(UserError):
    """A configuration that cannot be used; the message says where and what to do."""


class Section(BaseModel):
    """Base of all sections: immutable, and strict about names."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


_BYTES = TypeAdapter(ByteSize)


def _auto_or_bytes(value: Any, _: Any) -> ByteSize | Literal["auto"]:
    """Read `auto` or a size, with one error for both."""
    if value == "auto":
        return "auto"
    try:
        return _BYTES.validate_python(value)
    except ValidationError:
        raise ValueError(f"write auto, or bytes as in 40GiB, 512MiB or 1000000; got {value!r}") from None


AutoBytes = Annotated[ByteSize | Literal["auto"], WrapValidator(_auto_or_bytes)]
"""A limit in bytes, or `auto`: a memory plan gives it its share of what the device has."""


def _planned(value: ByteSize | Literal["auto"], name: str) -> int:
    if value == "auto":
        raise RuntimeError(f"{name} is auto: a memory plan must resolve it first")
    return int(value)


# --- compression ------------------------------------------------------------------------------------------------


class CompressionConfig(Section):
    policy: PolicySpec = PolicySpec()
    allow_request_policy: bool = Field(True, description="whether a request may name its own policy")


# --- the parts of the service -----------------------------------------------------------------------------------


class ModelConfig(Section):
    path: str = Field("tiny", description="folder or hub name of a causal LM; 'tiny' is the model in the package")
    served_name: str | None = Field(None, description="name in the APIs; the last part of the path if absent")
    revision: str | None = None
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto is bfloat16 on a GPU and float32 on a CPU"
    )

    @property
    def name(self) -> str:
        """The name under which the APIs serve the model."""
        return self.served_name or self.path.rstrip("/").rsplit("/", 1)[-1]


class EngineConfig(Section):
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
    prefill_chunk: int = Field(512, ge=1, description="prompt tokens computed between two decode steps")
    max_queue: int = Field(64, ge=1, description="requests that may wait in a replica; more are refused")
    preempt_seconds: float | None = Field(
        None,
        ge=0,
        description="how long a tenant's request waits until one of a tenant that holds more is set aside for it; "
        "null: never",
    )
    parked_bytes: ByteSize = Field(ByteSize(1 << 30), description="limit of host memory for slots that are set aside")
    beat_seconds: float = Field(
        5.0, gt=0, description="longest silence towards a gateway while the engine goes on; then it says so"
    )
    stall_seconds: float = Field(
        300.0, gt=0, description="a step of the engine that takes longer has hung: the replica is replaced"
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="whether decode steps are compiled; auto: on a GPU, where a step is many small kernels. "
        "On a CPU packed weights, which cannot be compiled, are faster",
    )
    self_check: bool = Field(
        True,
        description="whether a replica compares its logits with the model's own plain forward before it starts, "
        "and does not start where they differ",
    )
    threads: int = Field(0, ge=0, description="torch threads of a replica; 0 shares the machine's cores among replicas")

    @property
    def kv_limit(self) -> int:
        """Return kv_bytes. Raises RuntimeError while it is auto."""
        return _planned(self.kv_bytes, "engine.kv_bytes")

    @field_validator("compile", mode="before")
    @classmethod
    def _yaml_switch(cls, value: Any) -> Any:
        """YAML reads `on` and `off` as true and false."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class TierConfig(Section):
    """Where blocks go that the tier above it gives up."""

    memory_bytes: ByteSize = Field(ByteSize(0), description="limit of the tier in one replica; 0 is without it")
    eviction: Eviction | None = Field(None, description="which block goes first; as prefix_cache.eviction if absent")
    storage: BlockStorage = Field("model", description="format of the blocks; fp8 and kivi4 need allow_lossy")


class DiskConfig(TierConfig):
    path: Path | None = Field(None, description="folder; every replica of a machine takes a folder of its own in it")
    wait_seconds: float = Field(
        5.0, gt=0, description="longest time a request waits for its files; then its prompt is computed instead"
    )

    @model_validator(mode="after")
    def _check(self) -> DiskConfig:
        if (self.memory_bytes > 0) != (self.path is not None):
            raise ValueError("a disk tier needs both path and memory_bytes")
        return self


class PrefixCacheConfig(Section):
    enabled: bool = True
    automatic: bool = Field(True, description="store every full block of every prompt, not only up to breakpoints")
    block_size: int = Field(64, ge=1, description="tokens in a block")
    memory_bytes: AutoBytes = Field(
        "auto", description="limit of stored blocks on the device of a replica; auto: memory_share of what is free"
    )
    memory_share: float = Field(
        1 / 3,
        ge=0,
        lt=1,
        description="share that memory_bytes: auto takes of what engine.kv_bytes: auto would have; with a third, a "
        "request can have twice what is stored: its slot and the workspace of its prompt",
    )
    eviction: Eviction = Field("lru", description="which block goes first: lru, lfu, length (longest prefix) or cost")
    storage: BlockStorage = Field("model", description="format of blocks on the device; fp8 and kivi4 need allow_lossy")
    host: TierConfig = Field(TierConfig(), description="host memory, pinned where the device is a GPU")
    disk: DiskConfig = Field(DiskConfig(), description="files that survive a restart")
    allow_lossy: bool = Field(
        False, description="whether a tier may keep blocks in fp8 or kivi4, which changes answers"
    )
    moving_bytes: ByteSize = Field(
        ByteSize(256 << 20),
        description="limit of evicted blocks that are not in a lower tier yet; more are dropped",
    )
    tenant_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of every tier that nobody else can evict a tenant from; 0 is one queue for all",
    )
    attention_tokens: int = Field(
        8192, ge=1, description="prompt tokens before a token that double its cost, for eviction by cost"
    )
    packs: tuple[Path, ...] = Field(
        (), description="folders of `warmkv packs build`, loaded at start and never evicted"
    )
    ttls: dict[str, float] = Field({"5m": 300.0, "1h": 3600.0}, description="names a client may use, in seconds")
    default_ttl: str = Field("5m", description="TTL of automatic blocks and of marks that name none")
    min_tokens: int = Field(64, ge=0, description="a breakpoint before this many tokens is ignored")
    max_breakpoints: int = Field(4, ge=0)
    lookback: int = Field(
        20, ge=0, description="content blocks before a breakpoint that are checked for an earlier write"
    )

    @property
    def memory_limit(self) -> int:
        """Return memory_bytes. Raises RuntimeError while it is auto."""
        return _planned(self.memory_bytes, "prefix_cache.memory_bytes")

    @model_validator(mode="after")
    def _check(self) -> PrefixCacheConfig:
        if self.default_ttl not in self.ttls:
            raise ValueError(f"default_ttl {self.default_ttl!r} is not one of ttls: {', '.join(self.ttls)}")
        if not all(0 < seconds < math.inf for seconds in self.ttls.values()):
            raise ValueError("every TTL must be positive and finite")
        for name, storage in (("", self.storage), ("host.", self.host.storage), ("disk.", self.disk.storage)):
            if storage != "model" and not self.allow_lossy:
                raise ValueError(f"{name}storage {storage} changes answers; set allow_lossy to accept that")
        return self


Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class Prices(Section):
    """Dollars per million tokens and the multipliers of the base input price. Hosted prices differ: set your own."""

    input: Price = 3.0
    output: Price = 15.0
    read: Price = Field(0.1, description="times input, for tokens read from the cache")
    write: dict[str, Price] = Field({"5m": 1.25, "1h": 2.0}, description="times input, for tokens written, by TTL")


class ModelPrices(Section):
    """What differs for one model."""

    input: Price | None = None
    output: Price | None = None
    read: Price | None = None
    write: dict[str, Price] = {}


class PricingConfig(Prices):
    models: dict[str, ModelPrices] = Field({}, description="by the model's name in the APIs: prices of its own")

    def of(self, model: str) -> Prices:
        """Return the prices of a model: its own where it has any, else those of all models."""
        own = self.models.get(model, ModelPrices()).model_dump(exclude_none=True)
        return Prices.model_validate({**self.model_dump(exclude={"models"}), **own, "write": self.write | own["write"]})


class RoutingConfig(Section):
    policy: Literal["prefix_cost", "power_of_two", "round_robin", "least_loaded", "sticky_session"] = "prefix_cost"
    load_weight: float = Field(
        4.0,
        ge=0,
        allow_inf_nan=False,
        description="blocks of prefill that one request in flight counts as; less, the busier the replicas are",
    )
    queue_weight: float = Field(
        8.0, ge=0, allow_inf_nan=False, description="further blocks that one counts as which waits for a decode slot"
    )
    prefill_weight: float = Field(
        0.5,
        ge=0,
        allow_inf_nan=False,
        description="blocks that each counts as which is still to compute for a request in flight; less, likewise",
    )
    recent_weight: float = Field(
        0.1,
        ge=0,
        allow_inf_nan=False,
        description="blocks of prefill that having been given all work of late counts as; less for a share",
    )
    host_credit: float = Field(0.75, ge=0, le=1, description="worth of a warm block in host memory; 1 on the device")
    disk_credit: float = Field(0.25, ge=0, le=1, description="worth of a warm block on disk")
    overload: int = Field(
        8, ge=1, description="requests in flight above the least loaded replica's at which warmth is ignored"
    )
    session_blocks: int = Field(
        4, ge=1, description="first blocks of a prompt that name its session, for sticky_session"
    )
    breaker_failures: int = Field(
        3, ge=0, description="failures of a replica in a row after which it gets no requests for a while; 0: never"
    )
    breaker_seconds: float = Field(
        5.0, gt=0, allow_inf_nan=False, description="that while; twice as long after each trial that fails"
    )
    breaker_max_seconds: float = Field(60.0, gt=0, allow_inf_nan=False, description="longest such while")
    allow_request_replica: bool = Field(True, description="whether a request may name the replica it wants")
    transfer: bool = Field(True, description="whether a replica may fetch blocks that another one holds in memory")
    transfer_block: float = Field(
        0.25, ge=0, allow_inf_nan=False, description="blocks of prefill that fetching one block counts as"
    )
    transfer_start: float = Field(
        4.0, ge=0, allow_inf_nan=False, description="blocks of prefill that any fetch counts as besides"
    )
    transfer_min_blocks: int = Field(8, ge=1, description="fewest blocks that are worth a fetch")


class TransferConfig(Section):
    """How blocks move from replica to replica; whether they do is the routing's matter.

    The times are guesses, which hold until a replica has measured its own.
    """

    timeout_seconds: float = Field(2.0, gt=0, description="longest time a request waits for blocks of another replica")
    piece_bytes: ByteSize = Field(ByteSize(32 << 20), ge=1, description="limit of what a replica hands out at a time")
    concurrent: int = Field(4, ge=1, description="fetches that a replica makes, and answers, at a time")
    token_seconds: float = Field(0.0001, gt=0, allow_inf_nan=False, description="prefill, a token")
    start_seconds: float = Field(0.02, ge=0, allow_inf_nan=False, description="a fetch, whatever its size")
    byte_seconds: float = Field(1e-9, ge=0, allow_inf_nan=False, description="a fetch, a byte")
    half_life: float = Field(8.0, gt=0, description="measurements after which an older one counts half")
    handover_seconds: float = Field(
        10.0, ge=0, description="longest time in which a replica that is stopped hands its blocks over; 0: it does not"
    )
    handover_bytes: ByteSize = Field(ByteSize(256 << 20), description="limit of the blocks that it hands over")


class DirectoryConfig(Section):
    publish_seconds: float = Field(0.02, gt=0, description="longest time a replica batches its events")
    heartbeat_seconds: float = Field(1.0, gt=0, description="longest time between two reports of a replica")
    silence_seconds: float = Field(15.0, gt=0, description="a replica that has not reported for so long is forgotten")
    follow_seconds: float = Field(10.0, gt=0, description="how long a router waits for changes before it asks again")
    max_blocks: int = Field(1_000_000, ge=1, description="blocks the directory remembers, summed over replicas")
    log_blocks: int = Field(
        200_000, ge=1, description="blocks in the changes kept for routers that catch up; others get everything anew"
    )
    shards: int = Field(1, ge=1, le=256, description="actors that share the blocks among them, by hash")


class ControlConfig(Section):
    path: Path | None = Field(
        None,
        description="folder for the versions of the policy, on a disk that every node sees; without one they live "
        "in Ray, as long as the head, or as its Redis",
    )
    history: int = Field(100, ge=2, description="versions that are kept")
    max_body_bytes: ByteSize = Field(ByteSize(256 << 10), description="of a request that changes the policy")
    follow_seconds: float = Field(10.0, gt=0, description="how long a gateway waits for a change before it asks again")
    silence_seconds: float = Field(15.0, gt=0, description="a gateway that has not asked for so long is forgotten")
    apply_seconds: float = Field(
        5.0, ge=0, description="how long the answer to a change waits until all gateways have heard of it"
    )
    start_seconds: float = Field(
        60.0, gt=0, description="how long a gateway that starts waits for the policy in force; then it fails"
    )

    @model_validator(mode="after")
    def _check(self) -> ControlConfig:
        if self.silence_seconds <= self.follow_seconds:
            raise ValueError("silence_seconds must be more than follow_seconds")
        return self


Right = Literal["policy", "replica", "ignore_eos"]
"""A field of a request's `warmkv` options that not every tenant may use."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class KeyConfig(Section):
    sha256: Sha256 = Field(description="SHA-256 of the API key; `warmkv hash-key` prints it")
    expires: AwareDatetime | None = Field(None, description="when the key ends, with a time zone; null: never")


class KeyHolder(Section):
    """Who is known by an API key, or by several while one takes the place of another."""

    name: str
    key_sha256: Sha256 | None = Field(None, description="SHA-256 of the API key; `warmkv hash-key` prints it")
    keys: tuple[KeyConfig, ...] = Field((), description="further keys, each with a time at which it ends")

    @property
    def all_keys(self) -> tuple[KeyConfig, ...]:
        """Every key of the holder."""
        return (*(() if self.key_sha256 is None else (KeyConfig(sha256=self.key_sha256),)), *self.keys)

    @model_validator(mode="after")
    def _check(self) -> KeyHolder:
        if not self.all_keys:
            raise ValueError(f"{self.name} has no key: set key_sha256, or keys")
        return self


class OperatorConfig(KeyHolder):
    """May change the policy and see the replicas' state, but asks for no answers: that is a tenant's."""


class LimitsConfig(Section):
    """What a tenant may ask for, in all gateways together; each of them grants its part."""

    requests_per_minute: int = Field(0, ge=0, description="0: no limit")
    tokens_per_minute: int = Field(
        0, ge=0, description="input that is not read from the cache, and output; 0: no limit"
    )
    concurrent_requests: int = Field(0, ge=0, description="0: no limit")
    queue_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of cluster.max_queued_requests that may wait for their first token; 1: no limit",
    )


class TenantLimits(Section):
    """What differs for one tenant."""

    requests_per_minute: int | None = Field(None, ge=0)
    tokens_per_minute: int | None = Field(None, ge=0)
    concurrent_requests: int | None = Field(None, ge=0)
    queue_share: float | None = Field(None, gt=0, le=1)


class TenantConfig(KeyHolder):
    operator: bool = Field(
        False, description="may change the policy, and see the replicas' state, in which all tenants' activity shows"
    )
    rights: tuple[Right, ...] | None = Field(None, description="as gateway.rights if absent")
    limits: TenantLimits = Field(TenantLimits(), description="those of gateway.limits that are absent here")


class IntakeConfig(Section):
    """What a gateway reads, parses and tokenizes at most; what exceeds a limit is refused by the limit's name."""

    total_bytes: ByteSize = Field(
        ByteSize(256 << 20), description="bodies that are read, parsed and tokenized at a time, together (529)"
    )
    read_seconds: float = Field(120.0, gt=0, description="time in which a body must have come (408)")
    max_depth: int = Field(200, ge=1, le=200, description="how deep a body may be nested; the JSON parser ends at 200")
    max_values: int = Field(
        500_000, ge=1, description="JSON values of a body, keys included; in a prompt each takes a token or more"
    )
    max_messages: int = Field(100_000, ge=1)
    max_blocks: int = Field(200_000, ge=1, description="content blocks of a request, in all its messages together")
    max_tools: int = Field(10_000, ge=1)
    max_stop_characters: int = Field(16_384, ge=1, description="of all stop sequences of a request together")
    threads: int = Field(2, ge=1, description="that parse and tokenize; large bodies have one more of their own")
    large_bytes: ByteSize = Field(ByteSize(1 << 20), description="from this size on a body is large")
    max_waiting: int = Field(256, ge=1, description="bodies that wait for a thread; more are refused (529)")
    parse_seconds: float = Field(60.0, gt=0, description="time to parse and tokenize a body, waiting included")


class GatewayConfig(Section):
    host: str = "127.0.0.1"
    port: int = Field(8400, ge=0, le=65535, description="0 takes a free one")
    route_prefix: str = Field("/", pattern=r"^/", description="path under which the APIs are served")
    allow_open: bool = Field(False, description="listen beyond loopback although no tenants are configured")
    tenants: tuple[TenantConfig, ...] = Field(
        (), description="if empty, and without tenants_file, any key is accepted and is its own tenant"
    )
    tenants_file: Path | None = Field(
        None, description="YAML or JSON with further `tenants` and `operators`, read again whenever it changes"
    )
    tenants_file_seconds: float = Field(5.0, gt=0, description="how often a gateway looks whether it has changed")
    operators: tuple[OperatorConfig, ...] = Field((), description="who may change the policy without being a tenant")
    rights: tuple[Right, ...] | None = Field(
        None,
        description="of tenants that name none: policy, replica, ignore_eos; null: all of them where no tenants are "
        "configured, else none",
    )
    limits: LimitsConfig = Field(LimitsConfig(), description="of every tenant; a tenant may have its own")
    limited_tenants: int = Field(
        10_000,
        ge=1,
        description="tenants whose use is remembered; over it, that of the one that asked longest ago goes",
    )
    salt_env: str = Field("WARMKV_SALT", description="environment variable with the secret that salts prefix hashes")
    max_body_bytes: ByteSize = ByteSize(32 << 20)
    intake: IntakeConfig = IntakeConfig()
    max_requests: int | None = Field(
        None,
        ge=1,
        description="requests open at a time in one gateway (529); null: what replicas and queues hold, and some more",
    )
    ping_seconds: float = Field(5.0, gt=0, description="silence of a stream after which it sends a ping")
    max_output_tokens: int = Field(8192, ge=1, description="largest max_tokens a request may ask for")
    default_output_tokens: int = Field(512, ge=1, description="where the API lets a request leave it out")
    request_timeout_seconds: float = Field(600.0, gt=0)
    retries: int = Field(3, ge=0, description="how often a request is sent again because a replica failed")
    retry_seconds: float = Field(
        0.5,
        ge=0,
        description="pause before a second retry, twice as long before each further one; none before the first",
    )
    resume: bool = Field(True, description="whether an answer that had begun goes on in another replica; else it ends")
    stall_seconds: float = Field(
        60.0, gt=0, description="silence of a replica after which it counts as failed; more than the longest step"
    )
    access_log: Path | None = Field(None, description="file for one JSON line per request")
    access_log_bytes: ByteSize = Field(
        ByteSize(1 << 30), description="size at which it becomes access_log.1, and that access_log.2; 0: never"
    )
    access_log_files: int = Field(4, ge=1, description="files that are kept besides the one that is written")
    access_log_queue: int = Field(
        10_000, ge=1, description="lines that may wait for the disk; more are dropped, and counted"
    )
    error_logs_per_minute: int = Field(
        60, ge=1, description="lines about errors of one type and status in a gateway's log; those left out are counted"
    )

    @property
    def is_open(self) -> bool:
        """True where no tenants are configured, so that any key is accepted."""
        return not self.tenants and self.tenants_file is None

    @model_validator(mode="after")
    def _check(self) -> GatewayConfig:
        check_key_holders(self.tenants, self.operators)
        return self


def check_key_holders(tenants: Sequence[TenantConfig], operators: Sequence[OperatorConfig]) -> None:
    """Raise ValueError if a key is that of two holders, or one tenant is listed with different rights or limits."""
    holders: dict[str, tuple[str, str]] = {}
    for kind, listed in (("tenant", tenants), ("operator", operators)):
        for holder in listed:
            for key in holder.all_keys:
                first = holders.setdefault(key.sha256, (kind, holder.name))
                if first != (kind, holder.name):
                    raise ValueError(
                        f"the key {key.sha256[:8]}... is that of {' '.join(first)} and of {kind} {holder.name}"
                    )
    terms: dict[str, TenantConfig] = {}
    for tenant in tenants:
        first_entry = terms.setdefault(tenant.name, tenant)
        if (first_entry.rights, first_entry.limits) != (tenant.rights, tenant.limits):
            raise ValueError(f"tenant {tenant.name} is listed twice, with different rights or limits")


class AutoscalingConfig(Section):
    """More replicas under load and fewer without, within limits."""

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(ge=1)
    target_ongoing_requests: float = Field(8.0, gt=0, description="requests in flight that a replica is meant to have")
    upscale_delay_seconds: float = Field(30.0, ge=0, description="how long there must be more before one is started")
    downscale_delay_seconds: float = Field(
        600.0, ge=0, description="how long there must be fewer before one is stopped"
    )
    look_back_seconds: float = Field(30.0, gt=0, description="time over which the requests are averaged")


class ClusterConfig(Section):
    application: str = Field("warmkv", pattern=r"^[a-z0-9-]+$", description="name of the Serve application")
    replicas: int = Field(1, ge=1, description="with autoscaling, those at the start")
    autoscaling: AutoscalingConfig | None = Field(None, description="null: there are always as many replicas")
    drain_seconds: float = Field(30.0, ge=0, description="time for the requests in flight when a replica is stopped")
    gateways: int = Field(1, ge=1)
    cpus_per_replica: float = Field(1.0, ge=0)
    gpus_per_replica: float = Field(0.0, ge=0, description="0.5 puts two replicas on one GPU")
    max_ongoing_requests: int | None = Field(
        None,
        ge=1,
        description="requests Serve sends to one replica at a time, at most what it takes: "
        "engine.max_slots + engine.max_queue, which null stands for",
    )
    max_queued_requests: int = Field(256, ge=1, description="requests that wait in a gateway; more are refused")
    health_check_seconds: float = Field(10.0, gt=0, description="how often Serve asks replicas and gateways for health")
    health_timeout_seconds: float = Field(
        30.0, gt=0, description="how long it waits for the answer; three in a row without one, and it replaces the part"
    )

    @property
    def most_replicas(self) -> int:
        """Replicas that there may be."""
        return self.autoscaling.max_replicas if self.autoscaling is not None else self.replicas

    @model_validator(mode="after")
    def _check(self) -> ClusterConfig:
        scaling = self.autoscaling
        if scaling is not None and not scaling.min_replicas <= self.replicas <= scaling.max_replicas:
            raise ValueError("replicas must lie between autoscaling.min_replicas and autoscaling.max_replicas")
        return self


class SloConfig(Section):
    """When an answer came in time; both must hold."""

    ttft: float = Field(2.0, gt=0, description="seconds to the first token, at most")
    tpot: float = Field(0.1, gt=0, description="seconds for each token after it, at most, on average")


class RooflineConfig(Section):
    """How near steps come to what a GPU could do."""

    flops_efficiency: Share = Field(0.6, description="of its operations a second, in matrix products")
    bandwidth_efficiency: Share = Field(0.7, description="of its memory's bytes a second")
    overhead_seconds: float = Field(0.001, ge=0, allow_inf_nan=False, description="of each step besides")


class FailureConfig(Section):
    """A replica that dies, with its blocks and the slots of its requests."""

    at: float = Field(ge=0, allow_inf_nan=False, description="seconds after the first arrival")
    replica: int = Field(
        0, ge=0, description="its place: replicas are numbered from 0, and a new one takes a free place"
    )
    seconds: float = Field(
        5.0, ge=0, allow_inf_nan=False, description="until that is known and another one is started in its place"
    )


class SimulatorConfig(Section):
    """Step time in seconds = a + b * tokens computed + c * context tokens read, per engine step.

    A profile, or a model on a GPU, takes the place of a, b and c.
    """

    profile: Path | None = Field(
        None, description="file of `warmkv profile`: measured step times, which take the place of step_*"
    )
    model: ModelShape | None = Field(
        None, description="a model's config.json: step times of its roofline on simulator.gpu, and its KV shape"
    )
    gpu: Gpu = Field(
        Gpu.model_validate("H100-SXM"), description="name in the catalogue (`warmkv replay --gpu list`); also its price"
    )
    roofline: RooflineConfig = RooflineConfig()
    step_a: float = Field(0.004, ge=0)
    step_b: float = Field(0.00012, ge=0)
    step_c: float = Field(2e-8, ge=0)
    host_bandwidth: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="bytes a second at which blocks are read from host memory; null: those of the GPU's PCIe where "
        "step times are its roofline, else at once",
    )
    disk_bandwidth: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="bytes a second at which blocks are read from disk; null: at once"
    )
    overhead_seconds: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="of a request outside its replica: HTTP, tokenizing, routing; a fit to a log finds its own",
    )
    layers: int = Field(6, ge=1)
    kv_heads: int = Field(2, ge=1)
    head_dim: int = Field(32, ge=1)
    dtype_bytes: int = Field(4, ge=1)
    slo: SloConfig = SloConfig()
    index_delay: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds until routers know what a replica sent, which it does at most every "
        "directory.publish_seconds; 0: they know everything at once",
    )
    startup_seconds: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="until a replica takes requests that was started during the run"
    )
    failures: tuple[FailureConfig, ...] = Field((), description="replicas that die in the course of the run")

    @model_validator(mode="before")
    @classmethod
    def _shape_of_model(cls, value: Any) -> Any:
        """Fill in the KV shape of the model, where there is one."""
        if not isinstance(value, dict) or value.get("model") is None:
            return value
        try:
            model = ModelShape.model_validate(value["model"])
        except ValidationError:  # told with its place when the field itself is checked
            return value
        for key in KV:
            if value.get(key, own := getattr(model, key)) != own:
                raise ValueError(f"{key} is {value[key]}, but simulator.model has {own}; leave {key} out")
        return {**value, "model": model, **{key: getattr(model, key) for key in KV}}


class DashboardsConfig(Section):
    grafana_url: str = "http://127.0.0.1:3000"
    token_env: str = Field("GRAFANA_TOKEN", description="environment variable with a service-account token")
    folder: str = "warmkv"
    datasource_uid: str = "prometheus"


class Config(Section):
    """The whole tree; `warmkv config schema` prints it as JSON schema."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    compression: CompressionConfig = CompressionConfig()
    prefix_cache: PrefixCacheConfig = PrefixCacheConfig()
    pricing: PricingConfig = PricingConfig()
    routing: RoutingConfig = RoutingConfig()
    transfer: TransferConfig = TransferConfig()
    directory: DirectoryConfig = DirectoryConfig()
    control: ControlConfig = ControlConfig()
    gateway: GatewayConfig = GatewayConfig()
    cluster: ClusterConfig = ClusterConfig()
    simulator: SimulatorConfig = SimulatorConfig()
    dashboards: DashboardsConfig = DashboardsConfig()

    @property
    def prices(self) -> Prices:
        """The prices of the model that is served."""
        return self.pricing.of(self.model.name)

    @property
    def ongoing_requests(self) -> int:
        """Requests that Serve sends to one replica at a time."""
        return self.cluster.max_ongoing_requests or self.engine.max_slots + self.engine.max_queue

    @model_validator(mode="after")
    def _check(self) -> Config:
        room = self.engine.max_slots + self.engine.max_queue
        if self.ongoing_requests > room:
            raise ValueError(
                f"cluster.max_ongoing_requests {self.ongoing_requests} is more than a replica takes: "
                f"engine.max_slots {self.engine.max_slots} + engine.max_queue {self.engine.max_queue} = {room}; "
                "leave it out, or raise engine.max_queue"
            )
        if missing := sorted(set(self.prefix_cache.ttls) - set(self.pricing.write)):
            raise ValueError(f"pricing.write has no multiplier for the TTL {missing[0]!r} of prefix_cache.ttls")
        for failure in self.simulator.failures:
            if failure.replica >= (most := self.cluster.most_replicas):
                raise ValueError(f"simulator.failures: no replica {failure.replica} of {most}; the first is 0")
        for name, silent in (
            ("engine.beat_seconds", self.engine.beat_seconds),
            ("transfer.timeout_seconds", self.transfer.timeout_seconds),
        ):
            if self.gateway.stall_seconds <= silent:
                raise ValueError(f"gateway.stall_seconds must be more than {name}")
        return self


# --- reading ----------------------------------------------------------------------------------------------------


def load(
    path: Path | None = None,
    *,
    flags: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Read the configuration: file, then environment, then `a.b=value` flags.

    Raises ConfigError with the place of every fault and, for an unknown key, the nearest known one.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            document = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not UTF-8 text") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {error}") from None
        if document is not None and not isinstance(document, dict):
            raise ConfigError(f"{path}: expected a mapping of sections, got {type(document).__name__}")
        tree = document or {}
    for dotted, text in _environment(os.environ if environ is None else environ):
        put(tree, dotted, read_value(dotted, text))
    for flag in flags:
        dotted, equals, text = flag.partition("=")
        if not equals:
            raise ConfigError(f"--set {flag}: write it as section.key=value, as in engine.max_slots=8")
        put(tree, dotted, read_value(dotted, text))
    return parse(tree)


def parse(tree: Mapping[str, Any]) -> Config:
    """Validate a tree of plain values. Raises ConfigError."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(describe(error, Config))) from None


def describe(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line a fault: the dotted place, what is wrong and, for an unknown key, the nearest known one."""
    lines = []
    for fault in error.errors():
        place = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            known = _known_keys(model, fault["loc"][:-1])
            near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            lines.append(f"{place}: unknown key; {hint}")
        else:
            lines.append(f"{place or 'configuration'}: {fault['msg'].removeprefix('Value error, ')}")
    return lines


def _known_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        if isinstance(part, str) and part in model.model_fields:
            candidates = (model.model_fields[part].annotation, *get_args(model.model_fields[part].annotation))
            nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
            if nested:
                model = nested[0]
    return sorted(model.model_fields)


def _environment(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the settings among the environment's variables: those that name a section, `WARMKV_SECTION__KEY`."""
    found = []
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            found.append((name.removeprefix(ENV_PREFIX).lower().replace("__", "."), text))
    return found


def read_value(dotted: str, text: str) -> Any:
    """Parse a value as it is written behind `section.key=`. Raises ConfigError."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{dotted}: {text!r} is not a YAML value: {error}") from None


def put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a value at its place in a tree of plain values. Raises ConfigError where something else is in the way."""
    *parents, leaf = dotted.strip().split(".")
    node = tree
    for depth, parent in enumerate(parents, start=1):
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            place = ".".join(parents[:depth])
            raise ConfigError(f"{dotted}: {place} is already {node!r}; set it as a whole or write it as a mapping")
    node[leaf] = value
