"""KV memory of the replicas."""

from __future__ import annotations

from warmkv import telemetry as t
from warmkv.dashboards.panels import Graph, Row
from warmkv.dashboards.queries import level

KV_MEMORY = Row(
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
