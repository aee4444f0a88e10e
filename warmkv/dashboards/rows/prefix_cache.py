"""What is reused, what is stored, what leaves."""

from __future__ import annotations

from warmkv import telemetry as t
from warmkv.dashboards.figures import hit_rate
from warmkv.dashboards.panels import Graph, Row
from warmkv.dashboards.queries import level, rate

PREFIX_CACHE = Row(
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
            "Tokens per second that were not read before the last breakpoint, by why.",
            "short",
            [(rate(t.MISSED_TOKENS, ("reason",)), "{{reason}}")],
            stacked=True,
        ),
        Graph(
            "Stored blocks",
            "Prefix blocks and tails resident in each replica.",
            "short",
            [(level(t.STORED_BLOCKS, ("replica",)), "{{replica}}")],
            stacked=True,
        ),
        Graph(
            "Stored prefixes by tier",
            "Bytes of prefix blocks in all replicas: on the device, in host memory, on disk.",
            "bytes",
            [(level(t.PREFIX_BYTES, ("tier",)), "{{tier}}")],
            stacked=True,
        ),
        Graph(
            "Evictions and expiries by tier",
            "Blocks and tails per second that left a tier: to make room or dropped, and by their TTL.",
            "short",
            [
                (rate(t.EVICTED_BLOCKS, ("tier",)), "{{tier}} evicted"),
                (rate(t.EXPIRED_BLOCKS, ("tier",)), "{{tier}} expired"),
            ],
        ),
    ),
)
