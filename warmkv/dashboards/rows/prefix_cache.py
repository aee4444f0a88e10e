"""What is reused, what is stored, what leaves."""

from __future__ import annotations

from warmkv import telemetry as t
from warmkv.dashboards.figures import hit_rate
from warmkv.dashboards.panels import BLOCKS_PER_SECOND, TOKENS_PER_SECOND, WARM_AND_COLD, Graph, PanelRow
from warmkv.dashboards.queries import level, observed, percentiles, rate

PREFIX_CACHE = PanelRow(
    "Prefix cache",
    (
        Graph(
            "Hit rate by token",
            "Share of the prompt tokens whose KV was reused, by compression policy.",
            "percentunit",
            [(hit_rate(("policy",)), "{{policy}}")],
            top=1,
        ),
        Graph(
            "Why prompts were cold",
            "Prompt tokens per second before the last breakpoint that were not read, by why.",
            TOKENS_PER_SECOND,
            [(rate(t.MISSED_TOKENS, ("reason",)), "{{reason}}")],
            stacked=True,
        ),
        Graph(
            "Stored prefixes by tier",
            "Bytes of prefix blocks in all replicas: on the device, in host memory, on disk.",
            "bytes",
            [(level(t.PREFIX_BYTES, ("tier",)), "{{tier}}")],
            stacked=True,
        ),
    ),
)

STORED = PanelRow(
    "Stored blocks",
    (
        Graph(
            "Stored blocks",
            "Prefix blocks and tails resident in each replica.",
            "short",
            [(level(t.STORED_BLOCKS, ("replica",)), "{{replica}}")],
            width=6,
            stacked=True,
        ),
        Graph(
            "Room in the tiers",
            "Share of its limit that stored prefixes take in each tier. A full tier is no fault; what leaves it before "
            "its TTL tells.",
            "percentunit",
            [(f"{level(t.PREFIX_BYTES, ('tier',))} / {level(t.PREFIX_LIMIT_BYTES, ('tier',))}", "{{tier}}")],
            width=6,
            top=1,
        ),
        Graph(
            "Evictions and expiries by tier",
            "Blocks and tails per second that left a tier: demoted to a lower one, evicted to make room, dropped by an "
            "operator, and expired by their TTL.",
            BLOCKS_PER_SECOND,
            [
                (rate(t.EVICTED_BLOCKS, ("tier", "reason")), "{{tier}} {{reason}}"),
                (rate(t.TOUCHED), "touched prefixes"),
                (rate(t.EXPIRED_BLOCKS, ("tier",)), "{{tier}} expired"),
            ],
            width=6,
            none="No block has left a tier",
        ),
        Graph(
            "Lost blocks",
            "Blocks and tails per second whose bytes a tier lost: damaged on disk, or not brought into it, as the disk "
            "fails or is full, or more was on its way than prefix_cache.moving_bytes. It is computed again.",
            BLOCKS_PER_SECOND,
            [(rate(t.LOST_BLOCKS, ("tier",)), "{{tier}}")],
            width=6,
            none="No block was lost",
        ),
    ),
)

REUSE = PanelRow(
    "Reads and writes",
    (
        Graph(
            "Read and written by TTL",
            "Prompt tokens per second as they are billed: plain input, read from the cache, written to it by TTL.",
            TOKENS_PER_SECOND,
            [(rate(t.TOKENS, ("kind",), kind="!output"), "{{kind}}")],
            width=12,
            stacked=True,
        ),
        Graph(
            "Reused tokens by tier and TTL",
            "Prompt tokens per second whose KV was reused, by the tier it came from and the TTL that it is kept under.",
            TOKENS_PER_SECOND,
            [(rate(t.CACHED_TOKENS, ("tier", "ttl")), "{{tier}} {{ttl}}")],
            width=12,
            stacked=True,
        ),
    ),
)

MISSES = PanelRow(
    "Misses",
    (
        Graph(
            "Warm and cold requests",
            "Requests per second that reused cached KV, and those that found nothing.",
            "reqps",
            [(observed(t.TTFT, ("cache",)), "{{cache}}")],
            width=12,
            stacked=True,
            colors=WARM_AND_COLD,
        ),
        Graph(
            "Tokens that were expected warm",
            "Prompt tokens per second that the router expected to be warm where it sent them: found, and missing since "
            "they had left meanwhile.",
            TOKENS_PER_SECOND,
            [(rate(t.EXPECTED_TOKENS, ("outcome",), outcome="!unexpected"), "{{outcome}}")],
            width=12,
            stacked=True,
            colors={"found": "green", "missing": "red"},
        ),
    ),
)

_FEW_HALF_MOST = ((0.05, "p5"), (0.5, "p50"), (0.95, "p95"))

RESIDENCY = PanelRow(
    "Residency",
    (
        Graph(
            "Gap between reuses",
            "Percentiles of the time between two uses of a stored prefix. A TTL below the p95 loses one reuse in 20.",
            "dthms",
            percentiles(t.REUSE_GAP, "application"),
            none="No prefix was reused",
        ),
        Graph(
            "Lifetime of a block",
            "Percentiles of the time from storing a block until it left its tier, by tier.",
            "dthms",
            percentiles(t.BLOCK_LIFETIME, "tier", _FEW_HALF_MOST),
            none="No block has left a tier",
        ),
        Graph(
            "Idle before eviction",
            "Percentiles of the time since its last use after which a block was evicted or demoted. Below the gap "
            "between reuses memory is short: what would be read again is gone.",
            "dthms",
            percentiles(t.BLOCK_IDLE, "tier", _FEW_HALF_MOST),
            none="No block was evicted: there is memory for all",
        ),
    ),
)
