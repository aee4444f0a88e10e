"""`warmkv cachesim`: hit rates of prefix caches of many sizes and lifetimes. Imports when it runs, for instant help."""

from __future__ import annotations

import math
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from warmkv.cli.command import fail, writing
from warmkv.cli.options import JsonOptions, Scope, SettingsOptions, TraceOptions, lifetimes, split
from warmkv.config import Eviction
from warmkv.extras import require
from warmkv.terminal import bar, plain_table, show_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmkv.simulator.studies.cachesim import Hits, LruCurve
    from warmkv.simulator.studies.quantities import Capacity, Unit
    from warmkv.simulator.traces import Trace

CURVE_POINTS = 200  # of a plotted line
OPTIMAL = "optimal"  # knows the future: no order finds more
EVICTIONS = (*get_args(Eviction), OPTIMAL)


class EvictFirst(StrEnum):
    HEAD = "head"
    TAIL = "tail"


def cachesim(
    source: TraceOptions,
    capacity: Annotated[
        list[str],
        typer.Option(
            help="Size: `10k`, `1M tokens`, `5000 blocks`, `2GiB`, `unlimited`. May be repeated, or a list with "
            "commas; round sizes if left out.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 (Typer copies it)
    ttl: Annotated[
        list[str],
        typer.Option(
            help="Lifetime after each use: `300`, `5m`, `1h`, `unlimited`. May be repeated, or a list.",
            show_default="unlimited",
        ),
    ] = [],  # noqa: B006
    eviction: Annotated[
        str, typer.Option(help=f"Orders of eviction, a list with commas: {', '.join(EVICTIONS)}.")
    ] = "lru",
    scope: Annotated[
        Scope, typer.Option(help="One cache for all, or one of that size for each session or tenant.")
    ] = Scope.GLOBAL,
    evict_first: Annotated[
        EvictFirst,
        typer.Option(
            help="Of a prompt's blocks under lru: its head, as in the published figures, or its tail, as in warmkv's "
            "stores and under all other orders."
        ),
    ] = EvictFirst.HEAD,
    partial_hit_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens found beyond the last block of a hit that ends within the prompt.")
    ] = 0,
    min_hit_tokens: Annotated[int, typer.Option(min=0, help="Tokens that any hit counts at least.")] = 0,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a model, or its config.json, for sizes in bytes.")
    ] = None,
    token_bytes: Annotated[int | None, typer.Option(min=1, help="KV bytes of a token, for sizes in bytes.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the curve to this file (.svg, .png); needs the extra `eval`; `-` prints only it, as SVG."
        ),
    ] = None,
    *,
    output: JsonOptions,
    options: SettingsOptions,
) -> None:
    """Show hit rates of prefix caches for a trace, at many capacities and lifetimes, without simulating time.

    Examples: `warmkv cachesim trace.jsonl --capacity 100k,1M,10M`,
    `warmkv cachesim trace.jsonl --capacity 16GiB --token-bytes 131072 --ttl 5m,1h --json -`,
    `warmkv cachesim sessions.jsonl.gz --scope session --ttl 60,300,3600 --plot curve.svg`
    """
    from warmkv.policies.eviction import PrefillCost, order
    from warmkv.simulator.studies import cachesim as sim
    from warmkv.simulator.studies import quantities

    options.read()  # refuses what is no configuration
    evictions = split([eviction]) or ["lru"]
    if unknown := [name for name in evictions if name not in EVICTIONS]:
        fail(f"--eviction {unknown[0]}: there are {', '.join(EVICTIONS)}")
    if model is not None and token_bytes is not None:
        fail("--model and --token-bytes exclude each other")
    if model is not None:
        token_bytes = quantities.model_token_bytes(model)
    capacities = [quantities.capacity(text, token_bytes) for text in split(capacity)]
    ttls = lifetimes("--ttl", ttl) or [math.inf]
    if plot is not None and len({one.unit for one in capacities if not math.isinf(one.amount)}) > 1:
        fail("--plot: capacities in tokens and in blocks have no axis in common; give one kind of them")
    to_output = output.leaves_output_to("--plot", plot)
    if plot is not None:
        require("--plot", "matplotlib")

    requests = source.read_blocks()
    correction = sim.Correction(partial_hit_tokens, min_hit_tokens)
    units: list[Unit] = sorted({one.unit for one in capacities}) or ["tokens"]
    curves: dict[Unit, LruCurve] = {}
    with bar("looking up", len(units)) as progress:
        for number, unit in enumerate(units):
            progress(number)
            curves[unit] = sim.lru(
                requests,
                unit=unit,
                scope=scope.value,
                correction=correction,
                tail_first=evict_first is EvictFirst.TAIL,
            )
    if not capacities:
        sizes = [*sim.round_capacities(curves["tokens"].enough), math.inf] if not ttl else [math.inf]
        capacities = [quantities.Capacity(size, "tokens", _short(size)) for size in sizes]

    points = [("lru", size, life, curves[size.unit].hits(size.amount, life)) for size in capacities for life in ttls]
    points = points if "lru" in evictions else []
    cost = PrefillCost()
    others = [name for name in EVICTIONS if name in evictions and name != "lru"]
    walks = [(name, size, life) for name in others for size in capacities for life in ttls]
    with bar("walking", len(walks) * len(requests)) as progress:
        for number, (name, size, life) in enumerate(walks):
            walk: Callable[..., Hits] = (
                sim.optimal if name == OPTIMAL else partial(sim.by_order, order=order(name, cost))
            )
            hits = walk(
                requests,
                capacity=size.amount,
                ttl=life,
                unit=size.unit,
                scope=scope.value,
                correction=correction,
                progress=lambda done, number=number: progress(number * len(requests) + done),
            )
            points.append((name, size, life, hits))
    ideal = curves[units[0]].hits(math.inf)
    if plot is not None:
        _plot(curves[units[0]], points, ideal, units[0], plot)
    document = {
        "trace": _summary(requests),
        "rules": {
            "scope": scope.value,
            "evict_first": evict_first.value,
            "partial_hit_tokens": partial_hit_tokens,
            "min_hit_tokens": min_hit_tokens,
            "token_bytes": token_bytes,
        },
        "ideal": _figures(ideal),
        "points": [_point(*point) for point in points],
    }
    output.give(document, lambda: None if to_output else _show(requests, points, ideal))


def _summary(trace: Trace) -> dict[str, Any]:
    import numpy as np

    return {
        "format": trace.format,
        "requests": len(trace),
        "seconds": float(trace.arrival[-1] - trace.arrival[0]),
        "input_tokens": int(trace.input_tokens.sum(dtype=np.int64)),
        "output_tokens": int(trace.output_tokens.sum(dtype=np.int64)),
        "block_size": trace.block_size,
        "blocks": len(trace.blocks),
        "distinct_blocks": len(np.unique(trace.blocks)),
        "broken": trace.broken,
        "skipped": trace.skipped,
        "unrecognised": list(trace.unrecognised),
    }


def _point(name: str, size: Capacity, life: float, hits: Hits) -> dict[str, Any]:
    """Return a point with null for unlimited: JSON has no infinity."""
    return {
        "eviction": name,
        "capacity": size.text,
        "amount": None if math.isinf(size.amount) else size.amount,
        "unit": size.unit,
        "ttl": None if math.isinf(life) else life,
        **_figures(hits),
    }


def _figures(hits: Hits) -> dict[str, Any]:
    return {
        "token_hit_rate": hits.token_rate,
        "block_hit_rate": hits.block_rate,
        "hit_tokens": hits.tokens,
        "hit_blocks": hits.blocks,
    }


def _show(trace: Trace, points: list[tuple[str, Capacity, float, Hits]], ideal: Hits) -> None:
    summary = _summary(trace)
    print(
        f"{trace.format}: {summary['requests']:,} requests over {summary['seconds']:,.0f} s, "
        f"{summary['input_tokens']:,} prompt tokens,\n{summary['blocks']:,} blocks of {trace.block_size} tokens, "
        f"{summary['distinct_blocks']:,} of them distinct; "
        f"an unlimited cache finds {ideal.token_rate:.2%} of the tokens\n"
    )
    table = plain_table("eviction", "capacity", "TTL s", "hit tokens", "hit blocks")
    for name, size, life, hits in points:
        lasting = "unlimited" if math.isinf(life) else f"{life:g}"
        table.add_row(name, size.text, lasting, f"{hits.token_rate:.4f}", f"{hits.block_rate:.4f}")
    show_table(table)


def _short(amount: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= amount < math.inf:
            return f"{amount / size:g}{letter}"
    return "unlimited" if math.isinf(amount) else f"{amount:g}"


def _plot(
    curve: LruCurve, points: list[tuple[str, Capacity, float, Hits]], ideal: Hits, unit: Unit, file: Path
) -> None:
    """Draw hit rates by capacity, a line for each order and TTL; by TTL where the only capacity is unlimited.

    The line of lru is the whole curve, those of other orders go from one point that was walked to the next.
    """
    import numpy as np

    from warmkv.simulator.reports import hit_rate_chart

    sizes = sorted({size.amount for _, size, _, _ in points if not math.isinf(size.amount)})
    ttls = list(dict.fromkeys(life for _, _, life, _ in points))
    by_size = bool(sizes) or all(math.isinf(life) for life in ttls)
    orders = {name: f"{name}, " for name, *_ in points}
    if list(orders) == ["lru"]:
        orders = {"lru": ""}
    marks: dict[str, list[tuple[float, float]]] = {}
    for name, size, life, hits in points:
        lasting = ("no TTL" if math.isinf(life) else f"TTL {life:g} s") if by_size else "unlimited capacity"
        asked = marks.setdefault(f"{orders[name]}{lasting}", [])
        if not math.isinf(at := size.amount if by_size else life):
            asked.append((at, hits.token_rate))
    lines = {label: sorted(asked) or [(1.0, ideal.token_rate)] for label, asked in marks.items()}
    if by_size and "lru" in orders:
        most = max([curve.enough, *sizes, 2.0])
        grid = np.geomspace(min([*sizes, max(1.0, most / 1e4)]), most, CURVE_POINTS).tolist()
        for life in ttls:
            label = f"{orders['lru']}{'no TTL' if math.isinf(life) else f'TTL {life:g} s'}"
            lines[label] = [(at, curve.hits(at, life).token_rate) for at in grid]
    with writing(file):
        axis = f"capacity, {unit}" if by_size else "TTL, seconds"
        hit_rate_chart.save(lines, marks, ideal.token_rate, axis, file)
