"""Results of simulations that were written to files."""

from __future__ import annotations

from warmkv.dashboards.panels import Column, PanelRow, Table

SWEEP = PanelRow(
    "Sweep",
    (
        Table(
            "Points of a sweep",
            "Points that `warmkv sweep` replayed, with their figures and whether they are on the Pareto front. The "
            "variable Results is the address of its results.json.",
            "${results}",
            "[points.{'settings': $join($each(settings, function($value, $path) {"
            "$split($path, '.')[-1] & '=' & $string($value)}), ', '), 'front': front, "
            "'hit rate': figures.hit_rate_tokens, 'stored': figures.resident_bytes_mean, "
            "'slots': figures.slot_bytes_mean, 'TTFT p50': figures.ttft_p50, "
            "'TTFT p99': figures.ttft_p99, 'in SLO': figures.in_slo, "
            "'$ per M tokens': figures.dollars_per_million_tokens, "
            "'replicas $ per M': figures.gpu_dollars_per_million_tokens, 'quality': figures.quality}]",
            (
                Column("settings"),
                Column("front", "bool", 70),
                Column("hit rate", "percentunit", 110, bar=True),
                Column("stored", "bytes", 95),
                Column("slots", "bytes", 95),
                Column("TTFT p50", "s", 90),
                Column("TTFT p99", "s", 90),
                Column("in SLO", "percentunit", 80),
                Column("$ per M tokens", "currencyUSD", 130, bar=True),
                Column("replicas $ per M", "currencyUSD", 130, bar=True),
                Column("quality", "percentunit", 75),
            ),
            height=20,
        ),
    ),
)
