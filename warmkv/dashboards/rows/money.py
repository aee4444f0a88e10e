"""What answers cost, and what the cache saves."""

from __future__ import annotations

from warmkv import telemetry as t
from warmkv.dashboards.figures import WITH_CACHE, WITHOUT_CACHE
from warmkv.dashboards.panels import Graph, Row
from warmkv.dashboards.queries import rate

MONEY = Row(
    "Money",
    (
        Graph(
            "Dollars per hour by part",
            "Price of the answers at the configured prices, as dollars per hour.",
            "currencyUSD",
            [(f"{rate(t.DOLLARS, ('part',))} * 3600", "{{part}}")],
            stacked=True,
        ),
        Graph(
            "Price by policy",
            "Price of the answers at the configured prices, as dollars per hour, by the policy that answered.",
            "currencyUSD",
            [(f"{rate(t.DOLLARS, ('policy',))} * 3600", "{{policy}}")],
            stacked=True,
        ),
        Graph(
            "Prompts with and without the cache",
            "Dollars per hour for prompts: as billed, and as if every prompt token were a plain input token. The "
            "distance is the saving; it is negative while prefixes are written and not yet read.",
            "currencyUSD",
            [(WITHOUT_CACHE, "{{application}} without"), (WITH_CACHE, "{{application}} as billed")],
        ),
    ),
)
