"""`report.html` of a replay: its figures and how the cluster filled, on one page without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from warmkv.chart_style import COLOURS, STYLE
from warmkv.report_page import figure, page, svg, table
from warmkv.simulator.reports.conclusion import duration
from warmkv.simulator.studies.replays.replay import Result, Run

TENANTS = 20  # shown, those with the highest bills
WINDOWS = 50  # in which the hit rate is taken over time
SHARES = np.linspace(0, 1, 201)  # at which distributions are drawn


def render(run: Run, series: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    """Render the page of a run; `series` are its columns over time, `meta` what was replayed and how."""
    result, title = run.result, f"Replay of {meta['trace']['file']}"
    ttl = "as marked" if result.ttl is None else duration(result.ttl)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{result.requests:,} requests over {result.seconds:,.0f} s, policy {escape(result.policy)}, '
        f"TTL {ttl}, step times: {escape(str(meta['step_times']['source']))}</p>",
        "<h2>Figures</h2>",
        table(("figure", "value"), _figures(result, meta)),
        "<h2>Latency</h2>",
        table(("", "p50", "p90", "p95", "p99"), _latencies(result)),
        figure(_latency_chart(run)),
        "<h2>Over time</h2>",
        figure(_time_chart(series)),
        "<h2>Bills</h2>",
        table(("tenant", "dollars"), _bills(result)),
        "<h2>Settings</h2>",
        f"<pre>{escape(_listed(meta['config']))}</pre>",
    ]
    return page(title, parts)


def _figures(result: Result, meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    slo, gpu = meta["config"]["simulator"]["slo"], meta["config"]["simulator"]["gpu"]
    in_time = result.in_slo / result.requests if result.requests else 0.0
    price = f"at ${gpu['dollars']:g} an hour ({gpu['name']}, {gpu['as_of']})"
    if any("gpu" in tree.get("simulator", {}) for tree in meta["config"]["cluster"]["groups"].values()):
        price = "of all groups, each at the price of its own"
    return [
        ("prompt tokens not computed", f"{result.token_hit_rate:.1%}"),
        ("full blocks found", f"{result.block_hit_rate:.1%}"),
        *((f"{tier}: stored at most", _bytes(level.peak)) for tier, level in result.tiers.items()),
        ("slots: at most", _bytes(result.slots.peak)),
        ("evicted, expired", f"{result.evictions:,}, {result.expirations:,}"),
        ("refused", f"{result.refused:,}"),
        *_disturbances(result),
        (f"TTFT within {slo['ttft']:g} s and TPOT within {slo['tpot']:g} s", f"{in_time:.1%}"),
        ("goodput", f"{result.goodput:.3g} requests/s"),
        ("GPU hours", f"{result.gpu_hours:,.2f}"),
        (f"GPU cost {price}", f"${result.gpu_dollars:,.2f}"),
        ("a million tokens cost", f"${result.gpu_dollars_per_million_tokens:,.4f}"),
        ("tenants are billed", f"${result.dollars:,.2f}"),
        ("without caching they would be", f"${result.dollars_uncached:,.2f}"),
        ("so caching saves them", f"{result.saving:.1%}"),
    ]


def _disturbances(result: Result) -> list[tuple[str, str]]:
    """Describe only what there was."""
    rows = []
    if result.retries or result.resumptions:
        rows.append(("sent again before, after the first token", f"{result.retries:,}, {result.resumptions:,}"))
    if result.failed:
        rows.append(("failed with their replica", f"{result.failed:,}"))
    if result.fetches:
        rows.append(("fetched from other replicas", f"{result.fetches:,} times, {_bytes(result.fetched_bytes)}"))
    if result.handed_bytes:
        rows.append(("left to others by stopped replicas", _bytes(result.handed_bytes)))
    if result.replicas.mean != result.replicas.peak:
        rows.append(("replicas on average, at most", f"{result.replicas.mean:.2f}, {result.replicas.peak}"))
    return rows


def _latencies(result: Result) -> list[tuple[str, ...]]:
    rows = (("TTFT, ms", result.ttft, 1e3), ("TPOT, ms", result.tpot, 1e3), ("E2E, s", result.e2e, 1.0))
    return [
        (name, *(f"{value * factor:,.3g}" for value in (found.p50, found.p90, found.p95, found.p99)))
        for name, found, factor in rows
    ]


def _bills(result: Result) -> list[tuple[str, str]]:
    bills = sorted(result.bills.items(), key=lambda item: -item[1])
    rows = [(tenant, f"${dollars:,.4f}") for tenant, dollars in bills[:TENANTS]]
    if rest := bills[TENANTS:]:
        rows.append((f"{len(rest):,} others", f"${sum(dollars for _, dollars in rest):,.4f}"))
    return rows


def _latency_chart(run: Run) -> str:
    """Draw the cumulative distributions of TTFT, TPOT and E2E."""
    served = run.jobs.served()
    arrival, first, end = (run.jobs.column(name)[served] for name in ("arrival", "first", "finished"))
    steps = run.jobs.records.output_tokens[served] - 1
    panels = {
        "TTFT, seconds": first - arrival,
        "TPOT, seconds": (end - first)[steps > 0] / steps[steps > 0],
        "E2E, seconds": end - arrival,
    }
    with mpl.rc_context(STYLE):
        drawing = Figure(figsize=(8.4, 2.5), layout="constrained")
        for at, (ax, (label, values)) in enumerate(
            zip(drawing.subplots(1, 3, sharey=True), panels.items(), strict=True)
        ):
            some = len(values) > 0
            ax.plot(np.quantile(values, SHARES) if some else [], SHARES if some else [], color=COLOURS[at])
            ax.set_xlabel(label)
            ax.set_ylim(0, 1.02)
            ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
        return svg(drawing, "latency")


def _time_chart(series: Mapping[str, Any]) -> str:
    times = series["seconds"]
    panels: list[tuple[str, Callable[[Axes], None]]] = [
        ("requests", lambda ax: _lines(ax, times, {name: series[name] for name in ("running", "waiting")})),
        ("GiB", lambda ax: _lines(ax, times, {n: c / 2**30 for n, c in series.items() if n.endswith("_bytes")})),
        ("prompt tokens\nnot computed", lambda ax: _hit_rate(ax, series)),
    ]
    if len(set(series["replicas"].tolist())) > 1:
        panels.append(("replicas", lambda ax: _lines(ax, times, {"alive": series["replicas"]})))
    with mpl.rc_context(STYLE):
        drawing = Figure(figsize=(8.4, 1.8 * len(panels)), layout="constrained")
        axes = drawing.subplots(len(panels), 1, sharex=True)
        for ax, (label, draw) in zip(axes, panels, strict=True):
            draw(ax)
            ax.set_ylabel(label)
            ax.set_ylim(bottom=0)
        axes[-1].set_xlabel("seconds")
        return svg(drawing, "time")


def _lines(ax: Axes, times: Any, columns: Mapping[str, Any]) -> None:
    for at, (name, values) in enumerate(columns.items()):
        ax.plot(times, values, color=COLOURS[at % len(COLOURS)], label=name.replace("_", " "), drawstyle="steps-post")
    ax.legend(loc="best", ncols=len(columns))


def _hit_rate(ax: Axes, series: Mapping[str, Any]) -> None:
    """Return the hit rate in windows; one without a prompt has no rate."""
    ends = np.linspace(0, len(series["seconds"]) - 1, WINDOWS + 1).astype(int)
    prompt, reused = (np.diff(series[name][ends]) for name in ("prompt_tokens", "reused_tokens"))
    rate = np.divide(reused, prompt, out=np.full(WINDOWS, np.nan), where=prompt > 0)
    middles = (series["seconds"][ends][1:] + series["seconds"][ends][:-1]) / 2
    ax.plot(middles, rate, color=COLOURS[2], marker=".")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))


def _listed(tree: Mapping[str, Any], prefix: str = "") -> str:
    """List settings as one `path = value` a line."""
    lines = []
    for name, value in tree.items():
        path = f"{prefix}{name}"
        lines.append(_listed(value, f"{path}.") if isinstance(value, Mapping) and value else f"{path} = {value}")
    return "\n".join(lines)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.3g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"
