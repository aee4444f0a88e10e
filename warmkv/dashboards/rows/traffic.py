"""Traffic, errors and latency of an application."""

from __future__ import annotations

from warmkv import telemetry as t
from warmkv.dashboards.figures import hit_rate, saved
from warmkv.dashboards.panels import TOKENS_PER_SECOND, Graph, Number, PanelRow
from warmkv.dashboards.queries import level, percentiles, quantile, rate

AT_A_GLANCE = PanelRow(
    "At a glance",
    (
        Number("Requests", "Requests answered per second.", "reqps", rate(t.REQUESTS)),
        Number("Cache hit rate", "Share of the prompt tokens whose KV was reused.", "percentunit", hit_rate()),
        Number("TTFT p95", "Time to first token that 95% of the requests stay under.", "s", quantile(0.95, t.TTFT)),
        Number("Waiting", "Requests that wait in a replica for a slot.", "short", level(t.WAITING)),
        Number("KV memory", "Bytes of KV resident in all replicas, whatever the use.", "bytes", level(t.KV_BYTES)),
        Number(
            "Saved per hour",
            "Dollars per hour that cached prefixes save on prompts, at the configured prices.",
            "currencyUSD",
            saved(),
        ),
    ),
)

TRAFFIC = PanelRow(
    "Traffic",
    (
        Graph(
            "Requests by status",
            "Requests answered per second, by how they ended.",
            "reqps",
            [(rate(t.REQUESTS, ("status",)), "{{status}}")],
            width=8,
            stacked=True,
        ),
        Graph(
            "Requests by policy",
            "Requests answered per second, by compression policy.",
            "reqps",
            [(rate(t.REQUESTS, ("policy",)), "{{policy}}")],
            width=8,
            stacked=True,
        ),
        Graph(
            "Requests by API",
            "Requests answered per second, by the API they came through.",
            "reqps",
            [(rate(t.REQUESTS, ("api",)), "{{api}}")],
            width=8,
            stacked=True,
        ),
        Graph(
            "Tokens by kind",
            "Tokens per second as they are billed: input, read from the cache, written to it by TTL, output.",
            TOKENS_PER_SECOND,
            [(rate(t.TOKENS, ("kind",)), "{{kind}}")],
            stacked=True,
        ),
        Graph(
            "Decoding and waiting",
            "Requests that decode, or wait for a slot, in all replicas; whose answer has not begun, in all gateways.",
            "short",
            [
                (level(t.DECODING), "{{application}} decoding"),
                (level(t.WAITING), "{{application}} waiting"),
                (level(t.GATEWAY_WAITING), "{{application}} not begun"),
            ],
        ),
        Graph(
            "Requests by model",
            "Requests answered per second, by the model that answered.",
            "reqps",
            [(rate(t.REQUESTS, ("model",)), "{{model}}")],
            stacked=True,
        ),
        Graph(
            "Preemptions",
            "Requests per second that were set aside in a replica for others, by why.",
            "reqps",
            [(rate(t.PREEMPTED, ("reason",)), "{{reason}}")],
            stacked=True,
        ),
    ),
)

ERRORS = PanelRow(
    "Errors",
    (
        Graph(
            "Errors by type",
            "Errors per second that clients got, mistakes of their own among them, by type and status.",
            "reqps",
            [(rate(t.ERRORS, ("type", "status")), "{{status}} {{type}}")],
            stacked=True,
        ),
        Graph(
            "Errors by API",
            "Errors per second that clients got, by the API they called.",
            "reqps",
            [(rate(t.ERRORS, ("api",)), "{{api}}")],
            stacked=True,
        ),
        Graph(
            "Rejections by reason",
            "Requests per second that were refused for want of room or by a limit, by the queue or limit.",
            "reqps",
            [(rate(t.REJECTED, ("reason",)), "{{reason}}")],
            stacked=True,
        ),
        Graph(
            "Failures in replicas",
            "Requests per second that failed in a replica: by their own fault, for want of memory, or by the device's.",
            "reqps",
            [(rate(t.FAILED, ("fault",)), "{{fault}}")],
            stacked=True,
        ),
        Graph(
            "Lines left out of logs",
            "Lines per second that the access log lost, to a full queue or a failing disk, and lines about errors that "
            "were too many.",
            "short",
            [(rate(t.DROPPED_LINES, ("log",)), "{{log}}")],
            stacked=True,
        ),
    ),
)

LATENCY = PanelRow(
    "Latency",
    (
        Graph(
            "Time to first token, warm and cold",
            "Percentiles of the time to first token: warm requests reused cached KV, cold ones did not.",
            "s",
            percentiles(t.TTFT, "cache"),
        ),
        Graph(
            "Time to first token by policy",
            "Percentiles of the time to first token, by compression policy.",
            "s",
            percentiles(t.TTFT, "policy"),
        ),
        Graph(
            "Time per output token by policy",
            "Percentiles of the time per output token after the first, by compression policy.",
            "s",
            percentiles(t.TPOT, "policy"),
        ),
        Graph(
            "End to end by policy",
            "Percentiles of the time to the last token, by compression policy.",
            "s",
            percentiles(t.E2E, "policy"),
        ),
        Graph(
            "Time in the queue",
            "Percentiles of the time that requests waited in their replica before their prompt was computed.",
            "s",
            percentiles(t.QUEUE, "model"),
        ),
    ),
)
