"""Live configuration, and what other settings would do."""

from __future__ import annotations

from warmkv import telemetry as t
from warmkv.dashboards.figures import hit_rate
from warmkv.dashboards.panels import MEASURED, Action, Column, Graph, PanelRow, Table
from warmkv.dashboards.queries import Query, level, quantile, rate
from warmkv.platform.whatif.candidates import NOW

LIVE_CONFIGURATION = PanelRow(
    "Live configuration",
    (
        Graph(
            "Live configuration by gateway",
            "Version of the live configuration in force in each gateway; 0 is the configuration at start.",
            "short",
            [(level(t.LIVE_CONFIG_VERSION, ("replica",)), "{{replica}}")],
            width=6,
            decimals=0,
        ),
        Graph(
            "Live configuration refused",
            "1 while a gateway cannot bring the last version into force, as after a deployment with other settings: "
            "the version before stays, or that of the start. GET /v1/warmkv/policy says why.",
            "short",
            [(level(t.LIVE_CONFIG_REFUSED, ("replica",)), "{{replica}}")],
            width=6,
            decimals=0,
        ),
        Graph(
            "Tenants files read",
            "Changes of gateway.tenants_file per minute that the gateways took, and those that they refused: then the "
            "tenants before stay in force, and GET /v1/warmkv/tenants says why.",
            "cpm",
            [(f"{rate(t.TENANTS_READ, ('result',))} * 60", "{{result}}")],
            width=6,
            none="gateway.tenants_file has not changed",
        ),
        Graph(
            "Tenants file refused",
            "1 while a gateway refuses gateway.tenants_file as it is now, 0 while it has the file in force.",
            "short",
            [(level(t.TENANTS_REFUSED, ("replica",)), "{{replica}}")],
            width=6,
            decimals=0,
            none="There is no gateway.tenants_file",
        ),
    ),
)

_CANDIDATE = ("candidate",)
_MODEL = ("application", "candidate")


def _predicted(metric: t.Metric) -> list[Query]:
    """Build the queries of the candidates that the viewer chose, and of the table's first if another than `now`."""
    others, rank = level(metric, _MODEL, candidate="!" + NOW), level(t.WHATIF_RANK, _MODEL)
    first = f"max by (application) ({others} and on (application, candidate) ({rank} == 1))"
    return [(level(metric, _CANDIDATE, candidate="~$candidate"), "{{candidate}}"), (first, "first in the table")]


WHAT_IF = PanelRow(
    "Predicted and measured",
    (
        Graph(
            "Hit rate",
            "Share of the prompt tokens that are reused: measured, and predicted for the chosen candidates and for the "
            "first in the table; `now` are the settings in force.",
            "percentunit",
            [(hit_rate(), "measured"), *_predicted(t.WHATIF_HIT_RATE)],
            top=1,
            colors=MEASURED,
        ),
        Graph(
            "Stored prefixes",
            "Bytes of stored prefixes in all replicas: measured, and predicted.",
            "bytes",
            [(level(t.PREFIX_BYTES), "measured"), *_predicted(t.WHATIF_BYTES)],
            colors=MEASURED,
        ),
        Graph(
            "Dollars per million tokens",
            "Bill of a million tokens of prompts and answers: measured, and predicted.",
            "currencyUSD",
            [(f"{rate(t.DOLLARS)} / {rate(t.TOKENS)} * 1e6", "measured"), *_predicted(t.WHATIF_DOLLARS)],
            colors=MEASURED,
        ),
        Graph(
            "Time to first token p50",
            "Time to first token that half of the requests stay under: measured, and predicted.",
            "s",
            [(quantile(0.5, t.TTFT), "measured"), *_predicted(t.WHATIF_TTFT_P50)],
            colors=MEASURED,
        ),
        Graph(
            "Time to first token p99",
            "Time to first token that 99% of the requests stay under: measured, and predicted.",
            "s",
            [(quantile(0.99, t.TTFT), "measured"), *_predicted(t.WHATIF_TTFT_P99)],
            colors=MEASURED,
        ),
        Graph(
            "Cost of replicas per million tokens",
            "Predicted cost of the replicas for a million tokens of prompts and answers.",
            "currencyUSD",
            _predicted(t.WHATIF_GPU_DOLLARS),
            colors=MEASURED,
        ),
        Graph(
            "Error of the model",
            "What the model predicts for the settings in force, against what was measured of the same requests: hit "
            "rate and share in the SLO as a difference, other figures relative. Cut at 200%.",
            "percentunit",
            [(level(t.WHATIF_ERROR, ("figure",)), "{{figure}}")],
            least=-1,
            top=2,
            width=6,
        ),
        Graph(
            "Quality",
            "Share of the full cache's score that a candidate's policy kept in the evaluation.",
            "percentunit",
            _predicted(t.WHATIF_QUALITY),
            colors=MEASURED,
            width=6,
            none="Give an evaluation: control.whatif.quality",
        ),
        Graph(
            "Requests in the window",
            "Latest requests, which a round replays.",
            "short",
            [(level(t.WHATIF_WINDOW), "requests")],
            width=4,
        ),
        Graph(
            "Rounds of replays",
            "Rounds per minute, by how they ended.",
            "cpm",
            [(f"{rate(t.WHATIF_ROUNDS, ('result',))} * 60", "{{result}}")],
            width=4,
        ),
        Graph(
            "Failed in a row",
            "Rounds of replays, and decisions of the autopilot, that failed since the last one that did not: "
            "GET /v1/warmkv/whatif says why.",
            "short",
            [(level(t.WHATIF_FAILED, ("loop",)), "{{loop}}")],
            width=4,
            decimals=0,
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
            "'pareto': pareto, 'restart': $count(restart) > 0, "
            "'version': $type(version) = 'number' ? version : $version, 'actions': ''}])",
            (
                Column("candidate", width=130),
                Column("changes"),
                Column("hit rate", "percentunit", 80),
                Column("bytes", "bytes", 90),
                Column("TTFT p99", "s", 90),
                Column("$ per M tokens", "currencyUSD", 120),
                Column("replicas $ per M", "currencyUSD", 130),
                Column("quality", "percentunit", 75),
                Column("pareto", "bool", 70),
                Column("restart", "bool", 70),
                Column("version", "none", 75),
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
            height=16,
            none="control.whatif is off, or nothing was replayed yet",
        ),
    ),
)

SETTINGS = PanelRow(
    "Settings in force",
    (
        Table(
            "TTLs and budget",
            "Seconds that prefixes stay, by name, and the policy of requests that name none.",
            "/v1/warmkv/policy",
            "[{'policy': settings.`compression.policy`, 'TTLs': $string(settings.`prefix_cache.ttls`), "
            "'default TTL': settings.`prefix_cache.default_ttl`, 'version': version, 'actions': ''}]",
            (
                Column("policy"),
                Column("TTLs"),
                Column("default TTL", width=110),
                Column("version", "none", 75),
            ),
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
            actions_width=190,
            height=3,
        ),
        Table(
            "Versions",
            "Versions of the live configuration, the newest first. Roll back brings the settings of a version into "
            "force anew, and is refused if another version than the latest that is shown came into force since.",
            "/v1/warmkv/policy/history",
            "($latest := versions[0].version; [versions.{'version': version, 'when': when, 'who': who, 'why': why, "
            "'changes': $string(changes), 'latest': $latest, 'actions': ''}])",
            (
                Column("version", "none", 75),
                Column("when", "dateTimeAsIso", 160),
                Column("who", width=80),
                Column("why"),
                Column("changes"),
                Column("latest", "none", 75),
            ),
            (
                Action(
                    "Roll back",
                    "POST",
                    "/v1/warmkv/policy/rollback",
                    '{"to": ${__data.fields.version}, "version": ${__data.fields.latest}, "why": "$why"}',
                    "Bring the settings of version ${__data.fields.version} into force again?",
                    _WHY,
                ),
                Action(
                    "Roll back to the start",
                    "POST",
                    "/v1/warmkv/policy/rollback",
                    '{"to": 0, "version": ${__data.fields.latest}, "why": "$why"}',
                    "Bring the configuration that the service was started with into force again?",
                    _WHY,
                ),
            ),
            actions_width=280,
            height=7,
            none="The settings are those of the start",
        ),
        Table(
            "Live settings",
            "Settings that a running service can change, as they are in force. TTLs are replaced as a whole.",
            "/v1/warmkv/policy",
            "($version := version; $each(settings, function($value, $setting) {"
            "{'setting': $setting, 'value': $string($value), 'version': $version, 'actions': ''}}))",
            (Column("setting", width=300), Column("value"), Column("version", "none", 75)),
            (
                Action(
                    "Change",
                    "PUT",
                    "/v1/warmkv/policy",
                    '{"changes": {"${__data.fields.setting}": $value}, "version": ${__data.fields.version}, '
                    '"why": "$why"}',
                    "Change ${__data.fields.setting}, which is ${__data.fields.value}?",
                    {"value": 'JSON, as in 0.5, "1h" or {"5m": 300}', **_WHY},
                ),
            ),
            actions_width=90,
            height=12,
        ),
    ),
)
