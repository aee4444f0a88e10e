"""Routing decisions, the prefix directory, transfer between replicas."""

from __future__ import annotations

from warmkv import telemetry as t
from warmkv.dashboards.panels import TOKENS_PER_SECOND, WARM_AND_COLD, Graph, PanelRow
from warmkv.dashboards.queries import level, observed, percentiles, rate, within

_ROUTED = rate(t.ROUTED, ("reason",))
_NONE, _MOST, _DECISIONS = within(t.MATCH.buckets[0], t.MATCH), within(t.MATCH.buckets[-1], t.MATCH), observed(t.MATCH)

ROUTING = PanelRow(
    "Routing",
    (
        Graph(
            "Routing decisions",
            "Decisions per second, by why the replica was taken.",
            "reqps",
            [(_ROUTED, "{{reason}}")],
            stacked=True,
            colors=WARM_AND_COLD,
        ),
        Graph(
            "Share of routing reasons",
            "Each reason's share of all decisions.",
            "percentunit",
            [(f"{_ROUTED} / on () group_left () {rate(t.ROUTED, ())}", "{{reason}}")],
            stacked=True,
            top=1,
            colors=WARM_AND_COLD,
        ),
        Graph(
            "Staleness of the routers",
            "Percentiles of the time from a change in a replica until a router knew of it, by their wall clocks.",
            "s",
            percentiles(t.STALENESS, "application"),
        ),
    ),
)

DIRECTORY = PanelRow(
    "Prefix directory",
    (
        Graph(
            "Routers that follow",
            "Routers whose copy of the index follows the directory, by shard; the others go on with what they had.",
            "short",
            [(level(t.FOLLOWING, ("shard",)), "shard {{shard}}")],
            width=6,
            decimals=0,
        ),
        Graph(
            "Memory of the directory",
            "Memory of the prefix directory by shard: its index, and the log of changes that routers read.",
            "bytes",
            [(level(t.DIRECTORY_BYTES, ("shard",)), "shard {{shard}}")],
            width=6,
            stacked=True,
        ),
        Graph(
            "Blocks in the directory",
            "Distinct blocks that the directory knows, and those that it has had no room for since it started.",
            "short",
            [
                (level(t.DIRECTORY_BLOCKS), "{{application}} known"),
                (level(t.DIRECTORY_LEFT_OUT), "{{application}} left out"),
            ],
            width=6,
        ),
        Graph(
            "Requests sent again",
            "Requests per second that were sent again since a replica had failed: while waiting, or while streaming.",
            "reqps",
            [(rate(t.RETRIED, ("when",)), "{{when}}")],
            width=6,
            shades="red",
            none="No request was sent again",
        ),
    ),
)

PREDICTION = PanelRow(
    "Expected and found",
    (
        Graph(
            "Match of decisions",
            "Share of the decisions by how much the router took to be warm in the replica it chose: all blocks of the "
            "prompt, some, none.",
            "percentunit",
            [
                (f"1 - {_MOST} / {_DECISIONS}", "all"),
                (f"({_MOST} - {_NONE}) / {_DECISIONS}", "some"),
                (f"{_NONE} / {_DECISIONS}", "none"),
            ],
            width=12,
            stacked=True,
            top=1,
            colors={"all": "orange", "some": "yellow", "none": "blue"},
        ),
        Graph(
            "Tokens by expectation",
            "Prompt tokens per second: expected warm and found, expected and missing (evicted meanwhile: the index is "
            "behind), warm though not expected (tails at breakpoints, and what came after the decision).",
            TOKENS_PER_SECOND,
            [(rate(t.EXPECTED_TOKENS, ("outcome",)), "{{outcome}}")],
            width=12,
            colors={"found": "green", "missing": "red", "unexpected": "blue"},
            stacked=True,
        ),
    ),
)

REPLICAS = PanelRow(
    "Replicas",
    (
        Graph(
            "Decoding by replica",
            "Requests that decode in each replica.",
            "short",
            [(level(t.DECODING, ("replica",)), "{{replica}}")],
            decimals=0,
            stacked=True,
        ),
        Graph(
            "Waiting by replica",
            "Requests that wait in each replica for a slot or for memory.",
            "short",
            [(level(t.WAITING, ("replica",)), "{{replica}}")],
            decimals=0,
            stacked=True,
        ),
        Graph(
            "Stored prefixes by replica",
            "Bytes of prefix blocks that each replica holds in all tiers.",
            "bytes",
            [(level(t.PREFIX_BYTES, ("replica",)), "{{replica}}")],
            stacked=True,
        ),
    ),
)

TRANSFER = PanelRow(
    "Transfer",
    (
        Graph(
            "Fetches by result",
            "Fetches of blocks from another replica per second, by what became of them; `slower`: computing was faster "
            "by the times that the replica measured, so nothing was asked for.",
            "reqps",
            [(rate(t.FETCHES, ("result",)), "{{result}}")],
            stacked=True,
            none="Nothing was fetched from another replica",
        ),
        Graph(
            "Blocks moved between replicas",
            "Bytes per second that replicas fetched, and took over from those that were stopped.",
            "Bps",
            [
                (rate(t.FETCHED_BYTES), "{{application}} fetched"),
                (rate(t.HANDED_BYTES), "{{application}} taken over"),
            ],
            none="Nothing was fetched from another replica",
        ),
        Graph(
            "Time of a fetch",
            "Percentiles of the time that a fetch from another replica took, blocks stored.",
            "s",
            percentiles(t.FETCH_SECONDS, "application"),
            none="Nothing was fetched from another replica",
        ),
    ),
)
