"""What answers cost, and what the cache saves."""

from __future__ import annotations

from warmkv import telemetry as t
from warmkv.dashboards.figures import hit_rate, saved, with_cache, without_cache
from warmkv.dashboards.panels import Graph, PanelRow
from warmkv.dashboards.queries import rate

MONEY = PanelRow(
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
            [(without_cache(), "{{application}} without"), (with_cache(), "{{application}} as billed")],
            colors={".* without": "orange", ".* as billed": "green"},
        ),
    ),
)

_TENANT = ("application", "tenant")

TENANTS = PanelRow(
    "Tenants",
    (
        Graph(
            "Spent by tenant",
            "Price of the answers at the configured prices, as dollars per hour, by tenant. Beyond 100 tenants of a "
            "gateway the rest is `other`; without tenants all are `open`.",
            "currencyUSD",
            [(f"{rate(t.DOLLARS, ('tenant',))} * 3600", "{{tenant}}")],
            width=12,
            stacked=True,
        ),
        Graph(
            "Saved by tenant",
            "Dollars per hour that cached prefixes save on a tenant's prompts; below 0 it writes more than it reads.",
            "currencyUSD",
            [(saved(_TENANT), "{{tenant}}")],
            width=12,
            least=None,
        ),
        Graph(
            "Hit rate by tenant",
            "Share of a tenant's prompt tokens whose KV was reused.",
            "percentunit",
            [(hit_rate(("tenant",)), "{{tenant}}")],
            width=12,
            top=1,
        ),
        Graph(
            "Requests by tenant",
            "Requests answered per second, by tenant.",
            "reqps",
            [(rate(t.REQUESTS, ("tenant",)), "{{tenant}}")],
            width=12,
            stacked=True,
        ),
    ),
)
