"""Live configuration, and what other settings would do."""

from __future__ import annotations

from warmkv import telemetry as t
from warmkv.dashboards.figures import hit_rate
from warmkv.dashboards.panels import Graph, Row
from warmkv.dashboards.queries import level, rate

LIVE_CONFIGURATION = Row(
    "Live configuration",
    (
        Graph(
            "Live configuration by gateway",
            "Version of the live configuration in force in each gateway; 0 is the configuration at start.",
            "short",
            [(level(t.LIVE_CONFIG_VERSION, ("replica",)), "{{replica}}")],
        ),
        Graph(
            "Tenants files read",
            "Changes of gateway.tenants_file that the gateways took, and those that they refused: then the tenants "
            "before stay in force, and GET /v1/warmkv/tenants says why.",
            "short",
            [(rate(t.TENANTS_READ, ("result",)), "{{result}}")],
        ),
    ),
)

WHAT_IF = Row(
    "What-if",
    (
        Graph(
            "Hit rate, predicted",
            "Predicted share of the prompt tokens that are reused, by candidate, and the measured one; `now` are the "
            "settings in force.",
            "percentunit",
            [(level(t.WHATIF_HIT_RATE, ("candidate",)), "{{candidate}}"), (hit_rate(), "{{application}} measured")],
            top=1,
        ),
        Graph(
            "Stored prefixes, predicted",
            "Predicted bytes of stored prefixes in all replicas, by candidate.",
            "bytes",
            [
                (level(t.WHATIF_BYTES, ("candidate",)), "{{candidate}}"),
                (level(t.PREFIX_BYTES), "{{application}} measured"),
            ],
        ),
        Graph(
            "Time to first token, predicted",
            "Predicted p50 and p99 of the time to first token, by candidate.",
            "s",
            [
                (level(t.WHATIF_TTFT_P50, ("candidate",)), "{{candidate}} p50"),
                (level(t.WHATIF_TTFT_P99, ("candidate",)), "{{candidate}} p99"),
            ],
        ),
        Graph(
            "Dollars per million tokens, predicted",
            "Predicted bill of a million tokens of prompts and answers, by candidate.",
            "currencyUSD",
            [(level(t.WHATIF_DOLLARS, ("candidate",)), "{{candidate}}")],
        ),
        Graph(
            "Quality of candidates",
            "Share of the full cache's score that a candidate's policy kept in the evaluation, if one was given.",
            "percentunit",
            [(level(t.WHATIF_QUALITY, ("candidate",)), "{{candidate}}")],
        ),
        Graph(
            "Error of the model",
            "What the model predicts for the settings in force, against what was measured of the same requests: hit "
            "rate and share in the SLO as a difference, other figures relative.",
            "percentunit",
            [(level(t.WHATIF_ERROR, ("figure",)), "{{figure}}")],
            least=None,
        ),
        Graph(
            "Requests in the what-if window",
            "Requests that can be replayed, and rounds of replays per minute by how they ended.",
            "short",
            [
                (level(t.WHATIF_WINDOW), "{{application}} requests"),
                (f"{rate(t.WHATIF_ROUNDS, ('result',))} * 60", "{{result}} a minute"),
            ],
        ),
    ),
)
