"""Panels as this project makes them: numbered, described, with a unit, reading the dashboard's data source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import common as options
from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common

from warmkv import telemetry
from warmkv.dashboards.queries import quantile

DATASOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")

Query = tuple[str, str]  # expression, legend
PERCENTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))


def percentiles(histogram: telemetry.Metric, by: str, shares: Sequence[tuple[float, str]] = PERCENTILES) -> list[Query]:
    return [(quantile(share, histogram, (by,)), f"{{{{{by}}}}} {name}") for share, name in shares]


class Panels:
    """Numbers rows and panels in the order they are made, so that no two share an id and a build repeats itself."""

    def __init__(self) -> None:
        self._id = 0

    def row(self, title: str) -> Any:
        self._id += 1
        return dashboard.Row(title).id(self._id)

    def graph(
        self,
        title: str,
        description: str,
        unit: str,
        queries: Sequence[Query],
        *,
        width: int = 12,
        stacked: bool = False,
        least: float | None = 0,
        top: float | None = None,
    ) -> Any:
        legend = options.VizLegendOptions().display_mode(common.LegendDisplayMode.LIST).show_legend(True)
        panel = (
            self._common(timeseries.Panel(), title, description, unit, queries)
            .height(8)
            .span(width)
            .fill_opacity(30 if stacked else 8)
            .legend(legend.placement(common.LegendPlacement.BOTTOM))
            .tooltip(
                options.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
            )
        )
        if stacked:
            panel.stacking(options.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
        if least is not None:
            panel.min(least)
        return panel if top is None else panel.max(top)

    def number(self, title: str, description: str, unit: str, query: str) -> Any:
        return (
            self._common(stat.Panel(), title, description, unit, [(query, "{{application}}")])
            .height(4)
            .span(4)
            .graph_mode(common.BigValueGraphMode.AREA)
            .reduce_options(options.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        )

    def _common(self, panel: Any, title: str, description: str, unit: str, queries: Sequence[Query]) -> Any:
        self._id += 1
        panel.id(self._id).title(title).description(description).unit(unit).datasource(DATASOURCE)
        for number, (expression, legend) in enumerate(queries):
            reference = chr(ord("A") + number)
            panel.with_target(prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(reference))
        return panel
