"""KV memory of the replicas."""

from __future__ import annotations

from warmkv import telemetry as t
from warmkv.dashboards.figures import slots_used
from warmkv.dashboards.panels import Graph, PanelRow
from warmkv.dashboards.queries import level, rate

_POLICY = ("policy",)

KV_MEMORY = PanelRow(
    "KV memory",
    (
        Graph(
            "KV memory by use",
            "Bytes of KV in all replicas: decode slots, prefill workspace, stored prefixes.",
            "bytes",
            [(level(t.KV_BYTES, ("use",)), "{{use}}")],
            stacked=True,
        ),
        Graph(
            "KV memory by replica",
            "Bytes of KV in each replica, whatever the use.",
            "bytes",
            [(level(t.KV_BYTES, ("replica",)), "{{replica}}")],
        ),
        Graph(
            "Weights by replica",
            "Bytes of the model's weights on each replica's device.",
            "bytes",
            [(level(t.WEIGHT_BYTES, ("replica",)), "{{replica}}")],
        ),
    ),
)

LIMITS = PanelRow(
    "Room",
    (
        Graph(
            "Slots against their limit",
            "Share of their memory that decode slots and prefill workspaces take in each replica. Rows that are free "
            "again count until another request takes them: it is short where requests wait as well.",
            "percentunit",
            [(slots_used(("replica",)), "{{replica}}")],
            width=12,
            top=1,
        ),
        Graph(
            "Waiting by replica",
            "Requests that wait in each replica for a slot or for memory.",
            "short",
            [(level(t.WAITING, ("replica",)), "{{replica}}")],
            width=12,
            decimals=0,
        ),
    ),
)

COMPRESSION = PanelRow(
    "Compression",
    (
        Graph(
            "Compression ratio by policy",
            "Bytes that prompts and answers would take uncompressed, for each byte of their decode slots. Slots are "
            "rounded up, so without compression it is a little below 1.",
            "short",
            [(f"{rate(t.WHOLE_BYTES, _POLICY)} / {rate(t.SLOT_BYTES, _POLICY)}", "{{policy}}")],
            width=12,
        ),
        Graph(
            "Kept tokens by policy",
            "Share of the prompts' tokens that slots keep, of a layer and KV head on average.",
            "percentunit",
            [(f"{rate(t.KEPT_TOKENS, _POLICY)} / {rate(t.COMPRESSED_TOKENS, _POLICY)}", "{{policy}}")],
            width=12,
            top=1,
        ),
        Graph(
            "Time of compression by policy",
            "Mean time for selecting what a prompt keeps and filling its slot; on a GPU without copies that go on "
            "behind.",
            "s",
            [(f"{rate(t.COMPRESSION_SECONDS, _POLICY)} / {rate(t.COMPRESSED_PROMPTS, _POLICY)}", "{{policy}}")],
            width=12,
        ),
        Graph(
            "Prompts by policy",
            "Prompts per second that were handed over to a decode slot, by policy.",
            "reqps",
            [(rate(t.COMPRESSED_PROMPTS, _POLICY), "{{policy}}")],
            width=12,
            stacked=True,
        ),
    ),
)
