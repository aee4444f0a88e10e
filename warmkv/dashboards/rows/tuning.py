"""Live configuration, and what other settings would do."""

from __future__ import annotations

from warmkv import telemetry as t
from warmkv.dashboards.figures import hit_rate
from warmkv.dashboards.panels import Action, Column, Graph, PanelRow, Table
from warmkv.dashboards.queries import level, rate

LIVE_CONFIGURATION = PanelRow(
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

WHAT_IF = PanelRow(
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
            "Cost of replicas, predicted",
            "Predicted cost of the replicas for a million tokens of prompts and answers, by candidate.",
            "currencyUSD",
            [(level(t.WHATIF_GPU_DOLLARS, ("candidate",)), "{{candidate}}")],
        ),
        Graph(
            "Order of candidates",
            "Place of each candidate in the order of the table; 1 is the best.",
            "short",
            [(level(t.WHATIF_RANK, ("candidate",)), "{{candidate}}")],
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

_WHY = {"why": "Reason, kept with the version"}

CANDIDATES = PanelRow(
    "Candidates",
    (
        Table(
            "What other settings would do",
            "Candidates of the what-if service, the best first, and what each would do to the recent requests. Apply "
            "brings a candidate into force for all gateways; those that need a restart are refused.",
            "/v1/warmkv/whatif",
            "($version := version; [candidates.{"
            "'candidate': candidate, 'changes': $string(changes), 'hit rate': figures.hit_rate, "
            "'bytes': figures.bytes, 'TTFT p99': figures.ttft_p99, "
            "'$ per M tokens': figures.dollars_per_million_tokens, "
            "'replicas $ per M': figures.gpu_dollars_per_million_tokens, 'quality': figures.quality, "
            "'pareto': pareto, 'restart': $join(restart, ', '), 'version': $version, 'actions': ''}])",
            (
                Column("candidate"),
                Column("changes"),
                Column("hit rate", "percentunit"),
                Column("bytes", "bytes"),
                Column("TTFT p99", "s"),
                Column("$ per M tokens", "currencyUSD"),
                Column("replicas $ per M", "currencyUSD"),
                Column("quality", "percentunit"),
                Column("pareto", "bool"),
                Column("restart"),
                Column("version", "none"),
            ),
            (
                Action(
                    "Apply candidate",
                    "PUT",
                    "/v1/warmkv/policy",
                    '{"changes": ${__data.fields.changes}, "version": ${__data.fields.version}, '
                    '"why": "what-if: ${__data.fields.candidate}"}',
                    "Bring ${__data.fields.candidate} into force: ${__data.fields.changes}?",
                ),
            ),
        ),
    ),
)

SETTINGS = PanelRow(
    "Settings in force",
    (
        Table(
            "Live settings",
            "Settings that a running service can change, as they are in force. TTLs are replaced as a whole.",
            "/v1/warmkv/policy",
            "($version := version; $each(settings, function($value, $setting) {"
            "{'setting': $setting, 'value': $string($value), 'version': $version, 'actions': ''}}))",
            (Column("setting"), Column("value"), Column("version", "none")),
            (
                Action(
                    "Set TTL",
                    "PUT",
                    "/v1/warmkv/policy",
                    '{"changes": {"prefix_cache.ttls": $ttls}, "version": ${__data.fields.version}, "why": "$why"}',
                    "Change the TTLs of all prefixes that are written from now on?",
                    {"ttls": 'Seconds by name, as in {"5m": 300, "1h": 3600}', **_WHY},
                ),
                Action(
                    "Set budget",
                    "PUT",
                    "/v1/warmkv/policy",
                    '{"changes": {"compression.policy.budget": $budget}, "version": ${__data.fields.version}, '
                    '"why": "$why"}',
                    "Change what the default policy keeps of later prompts?",
                    {"budget": "Share of the prompt that is kept, as in 0.3", **_WHY},
                ),
            ),
            width=10,
        ),
        Table(
            "Versions",
            "Versions of the live configuration, the newest first. Roll back brings the settings of a version into "
            "force anew.",
            "/v1/warmkv/policy/history",
            "[versions.{'version': version, 'when': when, 'who': who, 'why': why, 'changes': $string(changes), "
            "'actions': ''}]",
            (Column("version", "none"), Column("when"), Column("who"), Column("why"), Column("changes")),
            (
                Action(
                    "Roll back",
                    "POST",
                    "/v1/warmkv/policy/rollback",
                    '{"to": ${__data.fields.version}, "why": "$why"}',
                    "Bring the settings of version ${__data.fields.version} into force again?",
                    _WHY,
                ),
                Action(
                    "Roll back to the start",
                    "POST",
                    "/v1/warmkv/policy/rollback",
                    '{"to": 0, "why": "$why"}',
                    "Bring the configuration that the service was started with into force again?",
                    _WHY,
                ),
            ),
            width=14,
        ),
    ),
)
