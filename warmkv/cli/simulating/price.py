"""`warmkv price`: what a cached prefix costs, and from when on caching it pays."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated, Any

import typer

from warmkv.cli.options import JsonOptions, SettingsOptions
from warmkv.config import Config
from warmkv.policies import pricing
from warmkv.terminal import plain_table, show_table


def price(
    options: SettingsOptions,
    output: JsonOptions,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prefix.")] = 50_000,
    rest: Annotated[int, typer.Option(min=0, help="Tokens behind it in each request: the question.")] = 200,
    uses: Annotated[int, typer.Option(min=1, help="Requests that begin with it, each within the TTL.")] = 10,
    per_hour: Annotated[
        float | None,
        typer.Option(min=0, help="Requests per hour that begin with it, coming at random.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Its own prices (pricing.models), if it has any.", show_default="the one served")
    ] = None,
) -> None:
    """Show what a prefix costs with and without caching, by TTL, and from how many uses on caching is cheaper.

    Examples: `warmkv price --tokens 50000 --rest 200 --uses 10 --set pricing.input=5`,
    `warmkv price --tokens 8000 --per-hour 4`, `warmkv price --set 'pricing.write={5m: 1.25, 1h: 1.6}' --json -`
    """
    settings = options.read()
    document = _document(settings, model or settings.model.name, tokens, rest, uses, per_hour)
    output.give(document, lambda: _show(document))


def _document(
    settings: Config, model: str, tokens: int, rest: int, uses: int, per_hour: float | None
) -> dict[str, Any]:
    """Return all figures, in dollars; what is infinite is null."""
    prices, cache = settings.pricing.of(model), settings.prefix_cache
    plain = pricing.uncached(tokens, rest, prices)
    rows = []
    for cost in pricing.prefix_costs(tokens, rest, uses, prices, cache.ttls):
        row = asdict(cost)
        if per_hour is not None:
            hits = pricing.hit_chance(per_hour, cost.seconds)
            steady = hits * cost.later + (1 - hits) * cost.first
            row |= {"hits": hits, "steady": steady, "steady_saved": 1 - steady / plain if plain else 0.0}
        rows.append({name: None if value == math.inf else value for name, value in row.items()})
    return {
        "model": model,
        "tokens": tokens,
        "rest": rest,
        "uses": uses,
        "per_hour": per_hour,
        "input_per_million": prices.input,
        "min_tokens": cache.min_tokens,
        "cached": cache.enabled and tokens >= cache.min_tokens,
        "uncached": plain,
        "uncached_uses": uses * plain,
        "ttls": rows,
    }


def _show(document: dict[str, Any]) -> None:
    steady = document["per_hour"] is not None
    print(
        f"{document['tokens']:,} tokens of prefix and {document['rest']:,} behind it, {document['model']} at "
        f"${document['input_per_million']:g} per million input tokens\n"
    )
    headings = ["write", "read", "pays from", "or per hour", "first", "later", f"{document['uses']} uses", "saved"]
    headings += [f"at {document['per_hour']:g}/h", "saved"] if steady else []
    table = plain_table("TTL", *headings, gap=2)
    plain = f"${document['uncached']:.4f}"
    row = ["none", "", "", "", "", plain, plain, f"${document['uncached_uses']:.4f}", ""]
    table.add_row(*row, *([plain, ""] if steady else []))
    for cost in document["ttls"]:
        table.add_row(
            cost["ttl"],
            f"{cost['write']:g}x",
            f"{cost['read']:g}x",
            _number(cost["break_even_uses"], "uses"),
            _number(cost["break_even_per_hour"], ""),
            *(f"${cost[name]:.4f}" for name in ("first", "later", "uses")),
            f"{cost['saved']:.1%}",
            *([f"${cost['steady']:.4f}", f"{cost['steady_saved']:.1%}"] if steady else []),
        )
    show_table(table)
    print(
        "\npays from: uses from which caching is cheaper, (w - r) / (1 - r), each within the TTL of the one before;\n"
        "or requests per hour that come at random for ever. Output tokens cost the same either way."
    )
    if not document["cached"]:
        print(
            f"This prefix would not be cached: under prefix_cache.min_tokens ({document['min_tokens']}), or disabled."
        )


def _number(value: float | None, unit: str) -> str:
    return "never" if value is None else f"{value:.2f} {unit}".strip()
