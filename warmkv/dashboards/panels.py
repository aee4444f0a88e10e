"""Panels and rows as values: described, with a unit, reading the dashboard's data source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from grafana_foundation_sdk.builders import common as options
from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common

from warmkv.dashboards.queries import Query

DATASOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")


class Panel(Protocol):
    """What a row holds."""

    def build(self, number: int) -> Any:
        """Return the panel as the SDK's builder; `number` is its id."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Time series of one or more queries."""

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    width: int = 12
    stacked: bool = False
    least: float | None = 0
    top: float | None = None

    def build(self, number: int) -> Any:
        legend = options.VizLegendOptions().display_mode(common.LegendDisplayMode.LIST).show_legend(True)
        panel = (
            _common(timeseries.Panel(), number, self.title, self.description, self.unit, self.queries)
            .height(8)
            .span(self.width)
            .fill_opacity(30 if self.stacked else 8)
            .legend(legend.placement(common.LegendPlacement.BOTTOM))
            .tooltip(
                options.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
            )
        )
        if self.stacked:
            panel.stacking(options.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
        if self.least is not None:
            panel.min(self.least)
        return panel if self.top is None else panel.max(self.top)


@dataclass(frozen=True, slots=True)
class Number:
    """One present value for each application."""

    title: str
    description: str
    unit: str
    query: str

    def build(self, number: int) -> Any:
        queries = [(self.query, "{{application}}")]
        return (
            _common(stat.Panel(), number, self.title, self.description, self.unit, queries)
            .height(4)
            .span(4)
            .graph_mode(common.BigValueGraphMode.AREA)
            .reduce_options(options.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A heading and its panels."""

    title: str
    panels: Sequence[Panel]

    def add_to(self, board: dashboard.Dashboard, numbers: Iterator[int]) -> None:
        """Add the row to a dashboard; rows and panels take their ids from `numbers`."""
        board.with_row(dashboard.Row(self.title).id(next(numbers)))
        for panel in self.panels:
            board.with_panel(panel.build(next(numbers)))


def _common(panel: Any, number: int, title: str, description: str, unit: str, queries: Sequence[Query]) -> Any:
    panel.id(number).title(title).description(description).unit(unit).datasource(DATASOURCE)
    for at, (expression, legend) in enumerate(queries):
        panel.with_target(prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + at)))
    return panel
