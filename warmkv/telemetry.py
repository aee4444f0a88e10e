"""Every metric warmkv exports, as values: `recorders` record them, the dashboards and alerts name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_FETCH_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SECONDS = (*_FETCH_SECONDS, 120.0, 300.0, 600.0)  # up to the default of gateway.request_timeout_seconds
_RESIDENCY_SECONDS = (0.1, 1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 86400.0)


@dataclass(frozen=True, slots=True, eq=False)  # each is there once, and looked up by itself
class Metric:
    """One metric. Ray exports it as `ray_` + name, a counter with `_total` behind it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    unit: str  # seconds, bytes, tokens, dollars, requests, blocks, files, lines, routers, rounds, share, version, rank
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exported(self) -> str:
        """Return the series name in Prometheus; for a histogram, without `_bucket`, `_sum` and `_count`."""
        return f"ray_{self.name}{'_total' if self.kind == 'counter' else ''}"


# Recorded by the gateway, per request.
_WHOSE = ("policy", "model", "tenant")  # `tenant` is bounded: see `Bounded`
REQUESTS = Metric("warmkv_requests", "counter", "Requests answered", "requests", ("api", "status", *_WHOSE))
TOKENS = Metric("warmkv_tokens", "counter", "Tokens by how they are billed", "tokens", ("kind", *_WHOSE))
DOLLARS = Metric("warmkv_dollars", "counter", "Price of the answers, by part", "dollars", ("part", *_WHOSE))
CACHED_TOKENS = Metric(
    "warmkv_cached_tokens",
    "counter",
    "Prompt tokens whose KV was reused, by the tier it came from and the TTL it was kept under",
    "tokens",
    ("tier", "ttl", *_WHOSE),
)
MISSED_TOKENS = Metric(
    "warmkv_missed_tokens",
    "counter",
    "Prompt tokens before the last breakpoint that were not read, by why: never_written, changed, expired and others",
    "tokens",
    ("reason", "model"),
)
RETRIED = Metric(
    "warmkv_retried",
    "counter",
    "Requests sent again because a replica failed or was full, by when",
    "requests",
    ("when",),
)
TTFT = Metric(
    "warmkv_ttft_seconds", "histogram", "Time to first token", "seconds", ("cache", "policy", "model"), _SECONDS
)
E2E = Metric("warmkv_e2e_seconds", "histogram", "Time to the last token", "seconds", ("policy", "model"), _SECONDS)
TPOT = Metric(
    "warmkv_tpot_seconds",
    "histogram",
    "Time per output token after the first",
    "seconds",
    ("policy", "model"),
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
QUEUE = Metric(
    "warmkv_queue_seconds", "histogram", "Time a request waited in its replica", "seconds", ("model",), _SECONDS
)
GATEWAY_WAITING = Metric(
    "warmkv_gateway_waiting_requests",
    "gauge",
    "Requests that a gateway has sent on and whose answer has not begun",
    "requests",
)
ERRORS = Metric(
    "warmkv_errors",
    "counter",
    "Errors that clients got, in streams as well, by the API that was called",
    "requests",
    ("type", "status", "api"),
)
REJECTED = Metric(
    "warmkv_rejected", "counter", "Requests refused for want of room or by a limit", "requests", ("reason",)
)
DROPPED_LINES = Metric(
    "warmkv_dropped_lines",
    "counter",
    "Lines left out of a log: of the access log for a full queue or a failing disk, of errors by their limit",
    "lines",
    ("log",),
)
# Recorded by the gateway, at every change.
LIVE_CONFIG_VERSION = Metric(
    "warmkv_live_config_version", "gauge", "Version of the live configuration that a gateway has in force", "version"
)
LIVE_CONFIG_REFUSED = Metric(
    "warmkv_live_config_refused",
    "gauge",
    "1 while a gateway cannot bring the last version of the live configuration into force, 0 while that is in force",
    "version",
)
LIVE_CONFIG_CHANGE = Metric(
    "warmkv_live_config_change_info",
    "gauge",
    "The last change of the live configuration, always 1: who changed what and why, each at most 200 characters",
    "version",
    ("version", "who", "what", "why"),
)
TENANTS_READ = Metric(
    "warmkv_tenants_read", "counter", "Tenants files read anew by a gateway: taken, refused", "files", ("result",)
)
TENANTS_REFUSED = Metric(
    "warmkv_tenants_file_refused",
    "gauge",
    "1 while a gateway refuses the tenants file as it is, 0 while the file is in force",
    "files",
)
# Recorded by every replica, about once a second.
DECODING = Metric("warmkv_decoding_requests", "gauge", "Requests that are decoding", "requests")
WAITING = Metric("warmkv_waiting_requests", "gauge", "Requests that wait in a replica", "requests")
KV_BYTES = Metric("warmkv_kv_bytes", "gauge", "KV memory by use: slots, workspace, store", "bytes", ("use",))
WEIGHT_BYTES = Metric("warmkv_weight_bytes", "gauge", "Bytes of the model's weights on the replica's device", "bytes")
STORED_BLOCKS = Metric("warmkv_stored_blocks", "gauge", "Prefix blocks and tails resident", "blocks")
TOUCHED = Metric("warmkv_touched_prefixes", "counter", "Prefixes touched so that vLLM does not evict them", "prefixes")
PREEMPTED = Metric(
    "warmkv_preempted",
    "counter",
    "Requests set aside for others, by why: fairness among tenants, or memory (vLLM's cache was full)",
    "requests",
    ("reason",),
)
FAILED = Metric(
    "warmkv_failed",
    "counter",
    "Requests that failed in a replica, by whose fault it was: request, memory, device",
    "requests",
    ("fault",),
)
EVICTED_BLOCKS = Metric(
    "warmkv_evicted_blocks",
    "counter",
    "Prefix blocks and tails that left a tier before their TTL: demoted to a lower one, evicted for good, dropped",
    "blocks",
    ("tier", "reason"),
)
EXPIRED_BLOCKS = Metric(
    "warmkv_expired_blocks", "counter", "Prefix blocks and tails that outlived their TTL", "blocks", ("tier",)
)
LOST_BLOCKS = Metric(
    "warmkv_lost_blocks",
    "counter",
    "Prefix blocks and tails that a tier lost: damaged on disk, or not brought into it",
    "blocks",
    ("tier",),
)
PREFIX_BYTES = Metric(
    "warmkv_prefix_bytes", "gauge", "Bytes of stored prefixes by tier: device, host, disk", "bytes", ("tier",)
)
PREFIX_LIMIT_BYTES = Metric(
    "warmkv_prefix_limit_bytes", "gauge", "Bytes that stored prefixes may take in a tier", "bytes", ("tier",)
)
SLOT_LIMIT_BYTES = Metric(
    "warmkv_slot_limit_bytes", "gauge", "Bytes that decode slots and prefill workspaces may take together", "bytes"
)
BLOCK_LIFETIME = Metric(
    "warmkv_kv_block_lifetime_seconds",
    "histogram",
    "Time from storing a prefix block until it left a tier, of one block in 16",
    "seconds",
    ("tier",),
    _RESIDENCY_SECONDS,
)
BLOCK_IDLE = Metric(
    "warmkv_kv_block_idle_before_evict_seconds",
    "histogram",
    "Time from the last use of a prefix block until it was evicted or demoted, of one block in 16",
    "seconds",
    ("tier",),
    _RESIDENCY_SECONDS,
)
REUSE_GAP = Metric(
    "warmkv_kv_reuse_gap_seconds",
    "histogram",
    "Time between two uses of a stored prefix, one for each prompt that reuses one",
    "seconds",
    (),
    _RESIDENCY_SECONDS,
)
COMPRESSED_PROMPTS = Metric(
    "warmkv_compressed_prompts", "counter", "Prompts handed over to a decode slot", "requests", ("policy",)
)
COMPRESSED_TOKENS = Metric(
    "warmkv_compressed_tokens", "counter", "Tokens of the prompts handed over to a decode slot", "tokens", ("policy",)
)
KEPT_TOKENS = Metric(
    "warmkv_kept_tokens",
    "counter",
    "Of these, tokens that the slot keeps in a layer and KV head, on average",
    "tokens",
    ("policy",),
)
WHOLE_BYTES = Metric(
    "warmkv_uncompressed_bytes",
    "counter",
    "Bytes that prompts handed over and their answers may take uncompressed",
    "bytes",
    ("policy",),
)
SLOT_BYTES = Metric(
    "warmkv_compressed_bytes", "counter", "Bytes of the decode slots that they were given", "bytes", ("policy",)
)
COMPRESSION_SECONDS = Metric(
    "warmkv_compression_seconds",
    "counter",
    "Time of replicas for selecting what is kept and filling the slots",
    "seconds",
    ("policy",),
)
FETCHES = Metric("warmkv_fetches", "counter", "Fetches of blocks from another replica", "requests", ("result",))
FETCHED_BYTES = Metric("warmkv_fetched_bytes", "counter", "Bytes of blocks fetched from other replicas", "bytes")
FETCH_SECONDS = Metric(
    "warmkv_fetch_seconds", "histogram", "Time of a fetch from another replica", "seconds", (), _FETCH_SECONDS
)
HANDED_BYTES = Metric(
    "warmkv_handed_bytes", "counter", "Bytes of blocks that replicas took over from one that was stopped", "bytes"
)
# Recorded by the router.
ROUTED = Metric("warmkv_routed", "counter", "Routing decisions, by why the replica was taken", "requests", ("reason",))
MATCH = Metric(
    "warmkv_match_share",
    "histogram",
    "Share of a prompt's blocks that the router takes to be warm in the replica it chooses",
    "share",
    ("reason",),
    (0.001, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.999),
)
EXPECTED_TOKENS = Metric(
    "warmkv_expected_tokens",
    "counter",
    "Prompt tokens by what the router expected: found, missing (expected warm, computed), unexpected (warm, not "
    "expected, as tails at breakpoints are)",
    "tokens",
    ("outcome",),
)
FOLLOWING = Metric(
    "warmkv_routers_following", "gauge", "Routers that follow the prefix directory", "routers", ("shard",)
)
STALENESS = Metric(
    "warmkv_directory_staleness_seconds",
    "histogram",
    "Time from a change in a replica until a router knew of it",
    "seconds",
    (),
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
# Recorded by every actor of the prefix directory, with each report of a replica.
DIRECTORY_BYTES = Metric("warmkv_directory_bytes", "gauge", "Memory of the prefix directory", "bytes", ("shard",))
DIRECTORY_BLOCKS = Metric(
    "warmkv_directory_blocks", "gauge", "Distinct blocks in the prefix directory", "blocks", ("shard",)
)
DIRECTORY_LEFT_OUT = Metric(
    "warmkv_directory_left_out", "gauge", "Blocks so far that the full directory had no room for", "blocks", ("shard",)
)
# Recorded by the what-if service: figures with each replay of a candidate, whose names are few (platform/whatif).
WHATIF_HIT_RATE = Metric(
    "warmkv_whatif_hit_rate", "gauge", "Predicted share of the prompt tokens that are reused", "share", ("candidate",)
)
WHATIF_BYTES = Metric(
    "warmkv_whatif_resident_bytes", "gauge", "Predicted bytes of stored prefixes, all replicas", "bytes", ("candidate",)
)
WHATIF_TTFT_P50 = Metric(
    "warmkv_whatif_ttft_p50_seconds", "gauge", "Predicted median time to first token", "seconds", ("candidate",)
)
WHATIF_TTFT_P99 = Metric(
    "warmkv_whatif_ttft_p99_seconds", "gauge", "Predicted p99 of the time to first token", "seconds", ("candidate",)
)
WHATIF_DOLLARS = Metric(
    "warmkv_whatif_dollars_per_million_tokens", "gauge", "Predicted bill of a million tokens", "dollars", ("candidate",)
)
WHATIF_GPU_DOLLARS = Metric(
    "warmkv_whatif_gpu_dollars_per_million_tokens",
    "gauge",
    "Predicted cost of the replicas for a million tokens",
    "dollars",
    ("candidate",),
)
WHATIF_RANK = Metric(
    "warmkv_whatif_rank",
    "gauge",
    "Place of a candidate in the order of the table, the best is 1",
    "rank",
    ("candidate",),
)
WHATIF_QUALITY = Metric(
    "warmkv_whatif_quality", "gauge", "Share of the full cache's score that the policy keeps", "share", ("candidate",)
)
WHATIF_ERROR = Metric(
    "warmkv_whatif_model_error",
    "gauge",
    "Prediction for the settings in force against what was measured: shares as a difference, others relative",
    "share",
    ("figure",),
)
WHATIF_WINDOW = Metric("warmkv_whatif_window_requests", "gauge", "Requests that can be replayed", "requests")
WHATIF_ROUNDS = Metric(
    "warmkv_whatif_rounds",
    "counter",
    "Rounds of replays: done, stopped by load or changes, failed",
    "rounds",
    ("result",),
)
WHATIF_FAILED = Metric(
    "warmkv_whatif_failed_in_a_row",
    "gauge",
    "Failures since the last success, of the what-if service's loops: replays, autopilot",
    "rounds",
    ("loop",),
)

REQUEST = (REQUESTS, TOKENS, DOLLARS, CACHED_TOKENS, MISSED_TOKENS, RETRIED, TTFT, E2E, TPOT, QUEUE)
LIVE_CONFIG = (LIVE_CONFIG_VERSION, LIVE_CONFIG_REFUSED, LIVE_CONFIG_CHANGE)
GATEWAY = (*REQUEST, GATEWAY_WAITING, ERRORS, REJECTED, DROPPED_LINES, *LIVE_CONFIG, TENANTS_READ, TENANTS_REFUSED)
RESIDENCY = (BLOCK_LIFETIME, BLOCK_IDLE, REUSE_GAP)
STORE = (STORED_BLOCKS, PREFIX_BYTES, PREFIX_LIMIT_BYTES, EVICTED_BLOCKS, EXPIRED_BLOCKS, LOST_BLOCKS, *RESIDENCY)
COMPRESSION = (
    COMPRESSED_PROMPTS,
    COMPRESSED_TOKENS,
    KEPT_TOKENS,
    WHOLE_BYTES,
    SLOT_BYTES,
    COMPRESSION_SECONDS,
)
REPLICA = (
    DECODING,
    WAITING,
    PREEMPTED,
    TOUCHED,
    FAILED,
    WEIGHT_BYTES,
    KV_BYTES,
    SLOT_LIMIT_BYTES,
    *STORE,
    *COMPRESSION,
)
TRANSFER = (FETCHES, FETCHED_BYTES, FETCH_SECONDS, HANDED_BYTES)
ROUTER = (ROUTED, MATCH, EXPECTED_TOKENS, FOLLOWING, STALENESS)
DIRECTORY = (DIRECTORY_BYTES, DIRECTORY_BLOCKS, DIRECTORY_LEFT_OUT)
WHATIF_FIGURES = {
    "hit_rate": WHATIF_HIT_RATE,
    "resident_bytes": WHATIF_BYTES,
    "ttft_p50": WHATIF_TTFT_P50,
    "ttft_p99": WHATIF_TTFT_P99,
    "dollars_per_million_tokens": WHATIF_DOLLARS,
    "gpu_dollars_per_million_tokens": WHATIF_GPU_DOLLARS,
    "quality": WHATIF_QUALITY,
}
WHATIF = (*WHATIF_FIGURES.values(), WHATIF_RANK, WHATIF_ERROR, WHATIF_WINDOW, WHATIF_ROUNDS, WHATIF_FAILED)
ALL: tuple[Metric, ...] = (*GATEWAY, *REPLICA, *TRANSFER, *ROUTER, *DIRECTORY, *WHATIF)
