"""The overview dashboard: traffic, prefix cache, latency, memory, routing and money of an application."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, VariableOption, VariableRefresh, VariableSort

from warmkv import telemetry
from warmkv.dashboards.panels import DATASOURCE, Panels, percentiles
from warmkv.dashboards.queries import level, quantile, rate

UID = "warmkv-overview"
TAG = "warmkv"  # of the dashboard, and of the annotations it shows

TOKENS_PER_SECOND = "suffix: tok/s"
GRAFANA = common.DataSourceRef(type_val="grafana", uid="-- Grafana --")  # Grafana's own store of annotations

# What the prompts would have cost without a cache: all their tokens at the price of an input token. That price is
# read off the metrics themselves, so that a dashboard never holds a second copy of it.
WITHOUT_CACHE = "({} / {} * {} * 3600)".format(
    rate(telemetry.DOLLARS, part="input"),
    rate(telemetry.TOKENS, kind="input"),
    rate(telemetry.TOKENS, kind="!output"),
)
WITH_CACHE = f"({rate(telemetry.DOLLARS, part='!output')} * 3600)"


def hit_rate(by: tuple[str, ...] = ("application",)) -> str:
    """Share of the prompt tokens whose KV was reused; 0 and not a gap where none ever was."""
    prompt = rate(telemetry.TOKENS, by, kind="!output")
    return f"({rate(telemetry.CACHED_TOKENS, by)} or 0 * {prompt}) / {prompt}"


def build() -> Any:
    """Build the dashboard as the SDK's object; `warmkv.dashboards.build` writes it as JSON."""
    panels, t = Panels(), telemetry
    graph, number = panels.graph, panels.number
    board = (
        dashboard.Dashboard("warmkv overview")
        .uid(UID)
        .description("Serving with compressed KV caches and prefix reuse: traffic, cache, latency, memory, money.")
        .tags([TAG])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("application", "Application", t.REQUESTS))
        .with_variable(_variable("policy", "Compression policy", t.REQUESTS))
        .with_variable(_variable("model", "Model", t.REQUESTS))
        .annotation(_annotation("Annotations & Alerts", "dashboard", []).built_in(1))
        .annotation(_annotation("Changes of warmkv", "tags", [TAG]))
    )

    board.with_row(panels.row("At a glance"))
    for panel in (
        number("Requests", "Requests answered per second.", "reqps", rate(t.REQUESTS)),
        number("Cache hit rate", "Share of the prompt tokens whose KV was reused.", "percentunit", hit_rate()),
        number("TTFT p95", "Time to first token that 95% of the requests stay under.", "s", quantile(0.95, t.TTFT)),
        number("Waiting", "Requests that wait in a replica for a slot.", "short", level(t.WAITING)),
        number("KV memory", "Bytes of KV resident in all replicas, whatever the use.", "bytes", level(t.KV_BYTES)),
        number(
            "Saved per hour",
            "Dollars per hour that cached prefixes save on prompts, at the configured prices.",
            "currencyUSD",
            f"{WITHOUT_CACHE} - {WITH_CACHE}",
        ),
    ):
        board.with_panel(panel)

    board.with_row(panels.row("Traffic"))
    for panel in (
        graph(
            "Requests by status",
            "Requests answered per second, by how they ended.",
            "reqps",
            [(rate(t.REQUESTS, ("status",)), "{{status}}")],
            width=8,
            stacked=True,
        ),
        graph(
            "Requests by policy",
            "Requests answered per second, by compression policy.",
            "reqps",
            [(rate(t.REQUESTS, ("policy",)), "{{policy}}")],
            width=8,
            stacked=True,
        ),
        graph(
            "Requests by API",
            "Requests answered per second, by the API they came through.",
            "reqps",
            [(rate(t.REQUESTS, ("api",)), "{{api}}")],
            width=8,
            stacked=True,
        ),
        graph(
            "Tokens by kind",
            "Tokens per second as they are billed: input, read from the cache, written to it by TTL, output.",
            TOKENS_PER_SECOND,
            [(rate(t.TOKENS, ("kind",)), "{{kind}}")],
            stacked=True,
        ),
        graph(
            "Decoding and waiting",
            "Requests that decode, or wait for a slot, in all replicas; whose answer has not begun, in all gateways.",
            "short",
            [
                (level(t.DECODING), "{{application}} decoding"),
                (level(t.WAITING), "{{application}} waiting"),
                (level(t.GATEWAY_WAITING), "{{application}} not begun"),
            ],
        ),
        graph(
            "Requests by model",
            "Requests answered per second, by the model that answered.",
            "reqps",
            [(rate(t.REQUESTS, ("model",)), "{{model}}")],
            stacked=True,
        ),
        graph(
            "Preemptions",
            "Requests per second that were set aside in a replica for others, by why.",
            "reqps",
            [(rate(t.PREEMPTED, ("reason",)), "{{reason}}")],
            stacked=True,
        ),
    ):
        board.with_panel(panel)

    board.with_row(panels.row("Errors"))
    for panel in (
        graph(
            "Errors by type",
            "Errors per second that clients got, mistakes of their own among them, by type and status.",
            "reqps",
            [(rate(t.ERRORS, ("type", "status")), "{{status}} {{type}}")],
            stacked=True,
        ),
        graph(
            "Errors by API",
            "Errors per second that clients got, by the API they called.",
            "reqps",
            [(rate(t.ERRORS, ("api",)), "{{api}}")],
            stacked=True,
        ),
        graph(
            "Rejections by reason",
            "Requests per second that were refused for want of room or by a limit, by the queue or limit.",
            "reqps",
            [(rate(t.REJECTED, ("reason",)), "{{reason}}")],
            stacked=True,
        ),
        graph(
            "Failures in replicas",
            "Requests per second that failed in a replica: by their own fault, for want of memory, or by the device's.",
            "reqps",
            [(rate(t.FAILED, ("fault",)), "{{fault}}")],
            stacked=True,
        ),
        graph(
            "Lines left out of logs",
            "Lines per second that the access log lost, to a full queue or a failing disk, and lines about errors that "
            "were too many.",
            "short",
            [(rate(t.DROPPED_LINES, ("log",)), "{{log}}")],
            stacked=True,
        ),
    ):
        board.with_panel(panel)

    board.with_row(panels.row("Prefix cache"))
    for panel in (
        graph(
            "Hit rate by token",
            "Share of the prompt tokens whose KV was reused, by compression policy.",
            "percentunit",
            [(hit_rate(("policy",)), "{{policy}}")],
            top=1,
        ),
        graph(
            "Stored blocks",
            "Prefix blocks and tails resident in each replica.",
            "short",
            [(level(t.STORED_BLOCKS, ("replica",)), "{{replica}}")],
            stacked=True,
        ),
        graph(
            "Stored prefixes by tier",
            "Bytes of prefix blocks in all replicas: on the device, in host memory, on disk.",
            "bytes",
            [(level(t.PREFIX_BYTES, ("tier",)), "{{tier}}")],
            stacked=True,
        ),
        graph(
            "Evictions and expiries by tier",
            "Blocks and tails per second that left a tier: to make room or dropped, and by their TTL.",
            "short",
            [
                (rate(t.EVICTED_BLOCKS, ("tier",)), "{{tier}} evicted"),
                (rate(t.EXPIRED_BLOCKS, ("tier",)), "{{tier}} expired"),
            ],
        ),
    ):
        board.with_panel(panel)

    board.with_row(panels.row("Latency"))
    for panel in (
        graph(
            "Time to first token, warm and cold",
            "Percentiles of the time to first token: warm requests reused cached KV, cold ones did not.",
            "s",
            percentiles(t.TTFT, "cache"),
        ),
        graph(
            "Time to first token by policy",
            "Percentiles of the time to first token, by compression policy.",
            "s",
            percentiles(t.TTFT, "policy"),
        ),
        graph(
            "Time per output token by policy",
            "Percentiles of the time per output token after the first, by compression policy.",
            "s",
            percentiles(t.TPOT, "policy"),
        ),
        graph(
            "End to end by policy",
            "Percentiles of the time to the last token, by compression policy.",
            "s",
            percentiles(t.E2E, "policy"),
        ),
        graph(
            "Time in the queue",
            "Percentiles of the time that requests waited in their replica before their prompt was computed.",
            "s",
            percentiles(t.QUEUE, "model"),
        ),
    ):
        board.with_panel(panel)

    board.with_row(panels.row("KV memory"))
    for panel in (
        graph(
            "KV memory by use",
            "Bytes of KV in all replicas: decode slots, prefill workspace, stored prefixes.",
            "bytes",
            [(level(t.KV_BYTES, ("use",)), "{{use}}")],
            stacked=True,
        ),
        graph(
            "KV memory by replica",
            "Bytes of KV in each replica, whatever the use.",
            "bytes",
            [(level(t.KV_BYTES, ("replica",)), "{{replica}}")],
        ),
        graph(
            "Weights by replica",
            "Bytes of the model's weights on each replica's device.",
            "bytes",
            [(level(t.WEIGHT_BYTES, ("replica",)), "{{replica}}")],
        ),
    ):
        board.with_panel(panel)

    board.with_row(panels.row("Routing"))
    routed = rate(t.ROUTED, ("reason",))
    for panel in (
        graph(
            "Routing decisions",
            "Decisions per second, by why the replica was taken.",
            "reqps",
            [(routed, "{{reason}}")],
            stacked=True,
        ),
        graph(
            "Share of routing reasons",
            "Each reason's share of all decisions.",
            "percentunit",
            [(f"{routed} / on () group_left () {rate(t.ROUTED, ())}", "{{reason}}")],
            stacked=True,
            top=1,
        ),
        graph(
            "Requests sent again",
            "Requests per second that were sent again since a replica had failed: while waiting, or while streaming.",
            "reqps",
            [(rate(t.RETRIED, ("when",)), "{{when}}")],
        ),
        graph(
            "Staleness of the routers",
            "Percentiles of the time from a change in a replica until a router knew of it, by their wall clocks.",
            "s",
            percentiles(t.STALENESS, "application"),
        ),
        graph(
            "Routers that follow",
            "Routers whose copy of the index follows the directory, by shard; the others go on with what they had.",
            "short",
            [(level(t.FOLLOWING, ("shard",)), "shard {{shard}}")],
        ),
        graph(
            "Prefix directory",
            "Memory of the prefix directory by shard.",
            "bytes",
            [(level(t.DIRECTORY_BYTES, ("shard",)), "shard {{shard}}")],
            stacked=True,
        ),
        graph(
            "Blocks in the prefix directory",
            "Distinct blocks that the directory knows, and those that it has had no room for since it started.",
            "short",
            [
                (level(t.DIRECTORY_BLOCKS), "{{application}} known"),
                (level(t.DIRECTORY_LEFT_OUT), "{{application}} left out"),
            ],
        ),
    ):
        board.with_panel(panel)

    board.with_row(panels.row("Transfer"))
    for panel in (
        graph(
            "Fetches by result",
            "Fetches of blocks from another replica per second, by what became of them; `slower`: computing was faster "
            "by the times that the replica measured, so nothing was asked for.",
            "reqps",
            [(rate(t.FETCHES, ("result",)), "{{result}}")],
            stacked=True,
        ),
        graph(
            "Blocks moved between replicas",
            "Bytes per second that replicas fetched, and took over from those that were stopped.",
            "Bps",
            [
                (rate(t.FETCHED_BYTES), "{{application}} fetched"),
                (rate(t.HANDED_BYTES), "{{application}} taken over"),
            ],
        ),
        graph(
            "Time of a fetch",
            "Percentiles of the time that a fetch from another replica took, blocks stored.",
            "s",
            percentiles(t.FETCH_SECONDS, "application"),
        ),
    ):
        board.with_panel(panel)

    board.with_row(panels.row("Live configuration"))
    board.with_panel(
        graph(
            "Live configuration by gateway",
            "Version of the live configuration in force in each gateway; 0 is the configuration at start.",
            "short",
            [(level(t.LIVE_CONFIG_VERSION, ("replica",)), "{{replica}}")],
        )
    )
    board.with_panel(
        graph(
            "Tenants files read",
            "Changes of gateway.tenants_file that the gateways took, and those that they refused: then the tenants "
            "before stay in force, and GET /v1/warmkv/tenants says why.",
            "short",
            [(rate(t.TENANTS_READ, ("result",)), "{{result}}")],
        )
    )

    board.with_row(panels.row("What-if"))
    for panel in (
        graph(
            "Hit rate, predicted",
            "Predicted share of the prompt tokens that are reused, by candidate, and the measured one; `now` are the "
            "settings in force.",
            "percentunit",
            [(level(t.WHATIF_HIT_RATE, ("candidate",)), "{{candidate}}"), (hit_rate(), "{{application}} measured")],
            top=1,
        ),
        graph(
            "Stored prefixes, predicted",
            "Predicted bytes of stored prefixes in all replicas, by candidate.",
            "bytes",
            [
                (level(t.WHATIF_BYTES, ("candidate",)), "{{candidate}}"),
                (level(t.PREFIX_BYTES), "{{application}} measured"),
            ],
        ),
        graph(
            "Time to first token, predicted",
            "Predicted p50 and p99 of the time to first token, by candidate.",
            "s",
            [
                (level(t.WHATIF_TTFT_P50, ("candidate",)), "{{candidate}} p50"),
                (level(t.WHATIF_TTFT_P99, ("candidate",)), "{{candidate}} p99"),
            ],
        ),
        graph(
            "Dollars per million tokens, predicted",
            "Predicted bill of a million tokens of prompts and answers, by candidate.",
            "currencyUSD",
            [(level(t.WHATIF_DOLLARS, ("candidate",)), "{{candidate}}")],
        ),
        graph(
            "Quality of candidates",
            "Share of the full cache's score that a candidate's policy kept in the evaluation, if one was given.",
            "percentunit",
            [(level(t.WHATIF_QUALITY, ("candidate",)), "{{candidate}}")],
        ),
        graph(
            "Error of the model",
            "What the model predicts for the settings in force, against what was measured of the same requests: hit "
            "rate and share in the SLO as a difference, other figures relative.",
            "percentunit",
            [(level(t.WHATIF_ERROR, ("figure",)), "{{figure}}")],
            least=None,
        ),
        graph(
            "Requests in the what-if window",
            "Requests that can be replayed, and rounds of replays per minute by how they ended.",
            "short",
            [
                (level(t.WHATIF_WINDOW), "{{application}} requests"),
                (f"{rate(t.WHATIF_ROUNDS, ('result',))} * 60", "{{result}} a minute"),
            ],
        ),
    ):
        board.with_panel(panel)

    board.with_row(panels.row("Money"))
    for panel in (
        graph(
            "Dollars per hour by part",
            "Price of the answers at the configured prices, as dollars per hour.",
            "currencyUSD",
            [(f"{rate(t.DOLLARS, ('part',))} * 3600", "{{part}}")],
            stacked=True,
        ),
        graph(
            "Price by policy",
            "Price of the answers at the configured prices, as dollars per hour, by the policy that answered.",
            "currencyUSD",
            [(f"{rate(t.DOLLARS, ('policy',))} * 3600", "{{policy}}")],
            stacked=True,
        ),
        graph(
            "Prompts with and without the cache",
            "Dollars per hour for prompts: as billed, and as if every prompt token were a plain input token. The "
            "distance is the saving; it is negative while prefixes are written and not yet read.",
            "currencyUSD",
            [(WITHOUT_CACHE, "{{application}} without"), (WITH_CACHE, "{{application}} as billed")],
        ),
    ):
        board.with_panel(panel)
    return board.build()


def _variable(label: str, title: str, metric: telemetry.Metric) -> Any:
    """Build a variable of a label's present values; all of them unless the viewer picks some."""
    return (
        dashboard.QueryVariable(label)
        .label(title)
        .datasource(DATASOURCE)
        .query(f"label_values({metric.exported}, {label})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all"))
    )


def _annotation(name: str, kind: str, tags: list[str]) -> Any:
    target = dashboard.AnnotationTarget().type(kind).tags(tags).match_any(False).limit(100)
    return dashboard.AnnotationQuery().name(name).datasource(GRAFANA).enable(True).icon_color("blue").target(target)
