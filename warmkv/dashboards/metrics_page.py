"""The page of the docs that lists every metric, as Markdown made from `warmkv.telemetry`."""

from __future__ import annotations

from collections.abc import Sequence

from warmkv import telemetry
from warmkv.telemetry import Metric

HEAD = """# Metrics

Every metric of the service, as Prometheus sees it: Ray writes `ray_` before each name and `_total` behind a counter,
and exports it on the metrics port of every node. Ray Serve adds the labels `application`, `deployment` and `replica`
(the gateway or the replica that recorded it). A counter appears with its first event. The
[dashboards](operations.md#dashboards) show all of them. This page is written by `make dashboards` from
`warmkv/telemetry.py`.
"""
SECTIONS: Sequence[tuple[str, Sequence[Metric]]] = (
    ("Requests, recorded by gateways", telemetry.GATEWAY),
    ("Replicas", telemetry.REPLICA),
    ("Transfer between replicas", telemetry.TRANSFER),
    ("Routers", telemetry.ROUTER),
    ("Prefix directory", telemetry.DIRECTORY),
    ("What-if service, where `control.whatif` is set", telemetry.WHATIF),
)


def page() -> str:
    return "\n".join([HEAD, *(_section(title, metrics) for title, metrics in SECTIONS)])


def _section(title: str, metrics: Sequence[Metric]) -> str:
    rows = [f"| `{m.exported}` | {m.kind} | {m.unit} | {_labels(m)} | {m.help}{_range(m)} |" for m in metrics]
    return "\n".join([f"## {title}", "", "| metric | kind | unit | labels | |", "|---|---|---|---|---|", *rows, ""])


def _labels(metric: Metric) -> str:
    return ", ".join(f"`{label}`" for label in metric.labels)


def _range(metric: Metric) -> str:
    return f"; buckets from {metric.buckets[0]:g} to {metric.buckets[-1]:g}" if metric.buckets else ""
