"""Traffic, errors and latency of an application."""

from __future__ import annotations

from warmkv import telemetry as t
from warmkv.dashboards.alerts import SLO_SECONDS
from warmkv.dashboards.figures import failed, hit_rate, saved, spent
from warmkv.dashboards.panels import TOKENS_PER_SECOND, Graph, Number, PanelRow
from warmkv.dashboards.queries import PERCENTILES, level, percentiles, quantile, rate

AT_A_GLANCE = PanelRow(
    "At a glance",
    (
        Number("Requests", "Requests answered per second.", "reqps", rate(t.REQUESTS)),
        Number(
            "Failed",
            "Share of the requests that were accepted and ended with an error. Those refused are under Errors and "
            "refusals.",
            "percentunit",
            failed(),
            ((None, "green"), (0.01, "orange"), (0.05, "red")),
        ),
        Number("Cache hit rate", "Share of the prompt tokens whose KV was reused.", "percentunit", hit_rate()),
        Number(
            "TTFT p95",
            f"Time to first token that 95% of the requests stay under; red above the objective of {SLO_SECONDS:g} s.",
            "s",
            quantile(0.95, t.TTFT),
            ((None, "green"), (SLO_SECONDS, "red")),
        ),
        Number(
            "Waiting",
            "Requests that wait in a replica for a slot.",
            "short",
            level(t.WAITING),
            ((None, "green"), (1, "orange")),
            decimals=0,
        ),
        Number("KV memory", "Bytes of KV resident in all replicas, whatever the use.", "bytes", level(t.KV_BYTES)),
        Number("Spent per hour", "Dollars per hour for the answers, at the configured prices.", "currencyUSD", spent()),
        Number(
            "Saved per hour",
            "Dollars per hour that cached prefixes save on prompts, at the configured prices.",
            "currencyUSD",
            saved(),
            ((None, "red"), (0, "green")),
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
            stacked=True,
            colors={"ok": "green", "error": "red"},
        ),
        Graph(
            "Requests by policy",
            "Requests answered per second, by compression policy.",
            "reqps",
            [(rate(t.REQUESTS, ("policy",)), "{{policy}}")],
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
            decimals=0,
        ),
        Graph(
            "Requests by API",
            "Requests answered per second, by the API they came through.",
            "reqps",
            [(rate(t.REQUESTS, ("api",)), "{{api}}")],
            stacked=True,
        ),
        Graph(
            "Requests by model",
            "Requests answered per second, by the model that answered.",
            "reqps",
            [(rate(t.REQUESTS, ("model",)), "{{model}}")],
            stacked=True,
        ),
    ),
)

ERRORS = PanelRow(
    "Errors and refusals",
    (
        Graph(
            "Errors by type",
            "Errors per second that clients got, mistakes of their own among them, by type and status.",
            "reqps",
            [(rate(t.ERRORS, ("type", "status")), "{{status}} {{type}}")],
            height=6,
            stacked=True,
            shades="red",
            none="No client has got an error",
        ),
        Graph(
            "Errors by API",
            "Errors per second that clients got, by the API they called.",
            "reqps",
            [(rate(t.ERRORS, ("api",)), "{{api}}")],
            height=6,
            stacked=True,
            shades="red",
            none="No client has got an error",
        ),
        Graph(
            "Rejections by reason",
            "Requests per second that were refused for want of room or by a limit, by the queue or limit.",
            "reqps",
            [(rate(t.REJECTED, ("reason",)), "{{reason}}")],
            height=6,
            stacked=True,
            shades="orange",
            none="No request was refused",
        ),
        Graph(
            "Failures in replicas",
            "Requests per second that failed in a replica: by their own fault, for want of memory, or by the device's.",
            "reqps",
            [(rate(t.FAILED, ("fault",)), "{{fault}}")],
            height=6,
            stacked=True,
            shades="red",
            none="No request has failed in a replica",
        ),
        Graph(
            "Preemptions",
            "Requests per second that were set aside in a replica for others: for fairness among tenants, or, over "
            "vLLM, for memory.",
            "reqps",
            [(rate(t.PREEMPTED, ("reason",)), "{{reason}}")],
            height=6,
            stacked=True,
            shades="yellow",
            none="No request was set aside for others",
        ),
        Graph(
            "Lines left out of logs",
            "Lines per second that the access log lost, to a full queue or a failing disk, and lines about errors that "
            "were too many.",
            "si:lines/s",
            [(rate(t.DROPPED_LINES, ("log",)), "{{log}}")],
            height=6,
            stacked=True,
            shades="orange",
            none="No line was left out",
        ),
    ),
)

_P95 = ((0.95, ""),)

LATENCY = PanelRow(
    "Latency",
    (
        Graph(
            "Time to first token",
            f"Percentiles of the time to first token of all requests. Dashed: the objective of {SLO_SECONDS:g} s.",
            "s",
            percentiles(t.TTFT, "application"),
            limit=SLO_SECONDS,
        ),
        Graph(
            "Time to first token, warm and cold",
            "Median and p95 of the time to first token: warm requests reused cached KV, cold ones did not.",
            "s",
            percentiles(t.TTFT, "cache", PERCENTILES[:2]),
            colors={"cold p50": "light-blue", "cold p95": "blue", "warm p50": "light-orange", "warm p95": "orange"},
        ),
        Graph(
            "Time in the queue",
            "Percentiles of the time that requests waited in their replica before their prompt was computed.",
            "s",
            percentiles(t.QUEUE, "model"),
        ),
        Graph(
            "Time to first token p95 by policy",
            "Time to first token that 95% of the requests stay under, by compression policy.",
            "s",
            percentiles(t.TTFT, "policy", _P95),
        ),
        Graph(
            "Time per output token p95 by policy",
            "Time per output token after the first that 95% of the requests stay under, by compression policy.",
            "s",
            percentiles(t.TPOT, "policy", _P95),
        ),
        Graph(
            "End to end p95 by policy",
            "Time to the last token that 95% of the requests stay under, by compression policy.",
            "s",
            percentiles(t.E2E, "policy", _P95),
        ),
    ),
)
