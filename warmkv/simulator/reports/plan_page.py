"""What a plan shows: the choice and why, other GPUs, what would be cheaper; in the terminal, as JSON and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rich.console import Console

from warmkv.model_shape import ModelShape
from warmkv.policies.memory_plan import amount
from warmkv.report_page import figure, page, table
from warmkv.simulator.cluster import memory
from warmkv.simulator.reports.figure_text import figure_text
from warmkv.simulator.studies.plans.peer_plan import PeerPlan
from warmkv.simulator.studies.plans.sizing import Machine, Sized, SizingTrial, rows_of
from warmkv.simulator.studies.sweeps.grid import Configure, label, point
from warmkv.simulator.studies.sweeps.tune import TuneConstraint
from warmkv.simulator.workload.source import LoadedTrace
from warmkv.terminal import plain_table, show_table

COLUMNS = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "hit_rate_tokens", "quality")
HEADS = ("TTFT p50", "p99", "TPOT p50", "p99", "hit", "quality")


def document(
    sized: Sized,
    configure: Configure,
    model: ModelShape,
    trace: LoadedTrace,
    peers: Sequence[tuple[PeerPlan, SizingTrial | None]] = (),
) -> dict[str, Any]:
    """Return the plan as JSON has it, and those of a peer; what people see is made of this."""
    chosen = sized.chosen
    gpus = [_of_gpu(sized, one) for one in sized.machines]
    return {
        "trace": {
            "file": trace.source.path.name,
            "sha256": trace.sha256,
            "requests": len(trace.requests.records),
        },
        "slo": [limit.text for limit in sized.limits],
        "why": why(sized),
        "chosen": chosen and {**chosen.to_json(), "dollars_month": chosen.dollars},
        "step_times": list(sized.step_times),
        "memory": chosen and _memory(chosen, configure, model),
        "gpus": gpus,
        "peer": [
            {
                **planned.to_json(),
                "replayed": trial and trial.to_json(),
                "says": peer_text(planned, trial, sized.limits),
            }
            for planned, trial in peers
        ],
        "cheaper": [{**one.to_json(), "misses": misses(one, sized.limits)} for one in sized.cheaper()],
        "trials": [trial.to_json() for trial in sized.trials],
    }


def _of_gpu(sized: Sized, one: Machine) -> dict[str, Any]:
    best = sized.best[one.gpu.name]
    refused = sized.refusal(one)
    trial = None if refused else best or sized.nearest(one.gpu.name)
    price = {"dollars_hour": one.gpu.dollars, "as_of": str(one.gpu.as_of), "source": one.gpu.source}
    return {"gpu": one.gpu.name, "met": best is not None, "refused": refused, "price": price} | {
        "trial": trial and {**trial.to_json(), "misses": misses(trial, sized.limits)}
    }


def _memory(trial: SizingTrial, configure: Configure, model: ModelShape) -> dict[str, Any]:
    """Return the memory plan of a replica, and what its lower tiers take."""
    config = point(trial.settings, configure).config
    planned = memory.plan(config, model, config.simulator.gpu)
    tiers = {"host": int(config.prefix_cache.host.memory_bytes), "disk": int(config.prefix_cache.disk.memory_bytes)}
    return {**planned.to_json(), "tiers": tiers}


def misses(trial: SizingTrial, limits: Sequence[TuneConstraint]) -> list[str]:
    """Return every limit that a trial misses, with its figure; of a policy of lower quality that, limited or not."""
    if trial.refused:
        return [trial.refused]
    missed = [limit for limit in limits if not limit.met(trial.figures)]
    said = [f"{_figure(trial, limit)} (limit {limit.sign} {limit.bound:g})" for limit in missed]
    if trial.lowered and not any(limit.name == "quality" for limit in missed):
        said.append(f"quality {figure_text('quality', trial.figures.get('quality'))}")
    return said


def _figure(trial: SizingTrial, limit: TuneConstraint) -> str:
    return f"{limit.name} {figure_text(limit.name, trial.figures.get(limit.name))}"


def named(trial: SizingTrial) -> str:
    """Name a deployment in a few words."""
    choice = f" with {label(trial.choice)}" if trial.choice else ""
    return f"{trial.replicas} x {trial.gpu}{choice}"


def why(sized: Sized) -> list[str]:
    """Return the choice and its reasons, a sentence each."""
    chosen = sized.chosen
    if chosen is None:
        nearest = sized.nearest()
        if nearest is None or nearest.refused:
            refused = "; ".join(f"{one.gpu.name}: {sized.refusal(one)}" for one in sized.machines)
            return [f"Nothing can be planned: {refused}."]
        missed = ", ".join(misses(nearest, sized.limits))
        return [f"No deployment that was tried meets the SLO; the nearest, {named(nearest)}, has {missed}."]
    kept = ", ".join(_figure(chosen, limit) for limit in sized.limits if limit.name != "refused")
    said = [f"{named(chosen)} for ${chosen.dollars:,.0f} a month: {kept}."]
    for group, count in sized.groups.items():
        said.append(f"That has {count} replica{'s' * (count > 1)} of group {group} beside them, and their cost.")
    fewer = next(
        (
            one
            for one in sized.trials
            if (one.gpu, one.replicas, one.choice) == (chosen.gpu, chosen.replicas - 1, chosen.choice)
        ),
        None,
    )
    if fewer is not None:
        said.append(f"One replica fewer has {', '.join(misses(fewer, sized.limits))}.")
    for settings, count in sized.saved.get(chosen.gpu, ()):
        said.append(f"With {label(settings)} it is {count} replica{'s' * (count > 1)} less.")
    for one in sized.machines:
        if one.gpu.name != chosen.gpu:
            said.append(_beside(sized, one))
    return said


def _beside(sized: Sized, one: Machine) -> str:
    name, best = one.gpu.name, sized.best[one.gpu.name]
    if refused := sized.refusal(one):
        return f"{name}: {refused}."
    if best is not None:
        return f"{name} needs {best.replicas} replica{'s' * (best.replicas > 1)} for ${best.dollars:,.0f}."
    nearest = sized.nearest(name)
    assert nearest is not None
    return (
        f"{name} does not meet the SLO: the nearest, {named(nearest)}, has {', '.join(misses(nearest, sized.limits))}."
    )


def peer_text(planned: PeerPlan, trial: SizingTrial | None, limits: Sequence[TuneConstraint]) -> str:
    """Return what a peer plans, and what a replay makes of as many replicas of this engine."""
    begin = "AIConfigurator, for vLLM and the means of the trace"
    if planned.refused:
        return f"{begin}: nothing on {planned.gpu}: {planned.refused}."
    times = f"TTFT {figure_text('ttft', planned.ttft)}, TPOT {figure_text('tpot', planned.tpot)}"
    said = f"{begin}: {planned.gpus} x {planned.gpu} for ${planned.dollars_month:,.0f} a month, {times}."
    if trial is None:
        return f"{said} It spreads a replica over {planned.gpus_per_replica} GPUs, which is not replayed."
    missed = ", ".join(misses(trial, limits))
    return f"{said} Replayed, {trial.replicas} here {f'have {missed}' if missed else 'meet the SLO'}."


def show(document: dict[str, Any], console: Console) -> None:
    """Print the plan: a screen of text."""
    shown = plain_table("GPU", "replicas", "a month", *HEADS, gap=2)
    for row in _gpu_rows(document):
        shown.add_row(*row)
    show_table(shown, console)
    console.print("* within the SLO\n")
    if (planned := document["memory"]) is not None:
        tiers = ", ".join(f"{name} tier {amount(size)}" for name, size in planned["tiers"].items() if size)
        console.print(planned["summary"] + (f"; {tiers}" if tiers else ""))
    if document["cheaper"]:
        console.print("\ncheaper, at a cost:")
        lines = plain_table("", "a month", "misses", gap=2, left=3)
        for row in _cheaper_rows(document):
            lines.add_row(*row)
        show_table(lines, console)
    console.print()
    for sentence in _sentences(document):
        console.print(sentence)


def _sentences(document: dict[str, Any]) -> list[str]:
    """Return the reasons, a peer's plans, and where step times come from."""
    times = [f"Step times: {said}." for said in document["step_times"]]
    return [*document["why"], *(one["says"] for one in document["peer"]), *times]


def _gpu_rows(document: dict[str, Any]) -> list[list[str]]:
    rows = []
    for one in document["gpus"]:
        trial = one["trial"]
        if trial is None:
            rows.append([one["gpu"], one["refused"]])
            continue
        figures = [figure_text(name, trial["figures"].get(name)) for name in COLUMNS]
        dollars = f"${trial['figures']['dollars_month']:,.0f}"
        rows.append([f"{one['gpu']}{'*' * one['met']}", str(trial["replicas"]), dollars, *figures])
    return rows


def _cheaper_rows(document: dict[str, Any]) -> list[list[str]]:
    rows = []
    for one in document["cheaper"]:
        choice = f" with {label(one['choice'])}" if one["choice"] else ""
        dollars = f"${one['figures']['dollars_month']:,.0f}"
        rows.append([f"{one['replicas']} x {one['gpu']}{choice}", dollars, ", ".join(one["misses"])])
    return rows


def render(document: dict[str, Any], sized: Sized, configure: Configure) -> str:
    """Render the page: the choice and why, GPUs side by side, what is cheaper, charts over all trials."""
    from warmkv.simulator.reports import sweep_charts as charts

    rows = rows_of(sized, configure)
    limited = [limit.name for limit in sized.limits if limit.name not in ("refused", "quality", "dollars_month")]
    axes = list(dict.fromkeys(["dollars_month", *(limited or ["ttft_p99"])]))
    name = escape(document["trace"]["file"])
    parts = [
        f"<h1>Plan for {name}</h1>",
        f'<p class="soft">{document["trace"]["requests"]:,} requests; {escape(", ".join(document["slo"]))}; '
        f"{len(rows)} replays.</p>",
        *(f"<p>{escape(sentence)}</p>" for sentence in _sentences(document)),
        "<h2>GPUs side by side</h2>",
        table(["GPU", "replicas", "a month", *HEADS], [row for row in _gpu_rows(document) if len(row) > 2]),
        "<h2>Cheaper, at a cost</h2>",
        table(["deployment", "a month", "misses"], _cheaper_rows(document), names=3)
        if document["cheaper"]
        else "<p>Nothing that was tried is cheaper.</p>",
        "<h2>Against replicas</h2>",
        "<p>A line for every GPU and choice of settings.</p>",
        figure(charts.against(rows, "cluster.replicas", "replicas")),
        "<h2>Dollars of a month against the SLO</h2>",
        "<p>Filled: nothing that was tried is at least as good in all of these and better in one.</p>",
        figure(charts.pareto_front(rows, axes)),
    ]
    if document["memory"] is not None:
        parts += ["<h2>Memory of a replica</h2>", f"<p>{escape(document['memory']['summary'])}</p>"]
    return page(f"warmkv plan: {document['trace']['file']}", parts)
