"""Panels and rows as values: described, with a unit, reading the dashboard's data source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from grafana_foundation_sdk.builders import common as options
from grafana_foundation_sdk.builders import dashboard, prometheus, stat, table, text, timeseries
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import ActionType, DynamicConfigValue, HttpRequestMethod
from grafana_foundation_sdk.models.text import TextMode

from warmkv.dashboards.queries import Query

DATASOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
INFINITY = "yesoreyeram-infinity-datasource"  # reads JSON from the control API, on Grafana's server
API = common.DataSourceRef(type_val=INFINITY, uid="${api}")
TOKENS_PER_SECOND = "suffix: tok/s"


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
class TextPanel:
    """Markdown without a frame."""

    title: str
    markdown: str

    def build(self, number: int) -> Any:
        panel = text.Panel().id(number).title(self.title).height(4).span(24)
        return panel.mode(TextMode.MARKDOWN).content(self.markdown)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; without a unit it holds text."""

    name: str
    unit: str = "string"


@dataclass(frozen=True, slots=True)
class Action:
    """A request to the control API that a viewer sends from a row of a table.

    It asks for confirmation, for the operator's key and for `asks` (variable: what it is called). The viewer's browser
    sends the key and nobody keeps it: no dashboard holds a secret.
    """

    title: str
    method: str
    path: str
    body: str  # JSON, with `$variable` of what is asked for and `${__data.fields.COLUMN}` of the row
    confirmation: str
    asks: Mapping[str, str] = field(default_factory=dict)

    def build(self) -> Any:
        asked = {**self.asks, "key": "API key of an operator"}
        return (
            dashboard.Action()
            .type(ActionType.FETCH)
            .title(self.title)
            .confirmation(self.confirmation)
            .variables([dashboard.ActionVariable().key(key).name(name) for key, name in asked.items()])
            .fetch(
                dashboard.FetchOptions()
                .method(HttpRequestMethod(self.method))
                .url("${gateway}" + self.path)
                .body(self.body)
                .query_params([])
                .headers([["Content-Type", "application/json"], ["x-api-key", "$key"]])
            )
            .build()
        )


class InfinityQuery(Dataquery):
    """JSON from an address, as rows that a JSONata expression makes of it. The SDK has no builder for it."""

    def __init__(self, url: str, rows: str, columns: Sequence[Column]) -> None:
        self._url, self._rows, self._columns = url, rows, columns

    def build(self) -> InfinityQuery:
        return self

    def to_json(self) -> dict[str, Any]:
        kinds = {"string": "string", "bool": "boolean"}
        return {
            "refId": "A",
            "datasource": {"type": API.type_val, "uid": API.uid},
            "type": "json",
            "parser": "backend",
            "source": "url",
            "format": "table",
            "url": self._url,
            "url_options": {"method": "GET", "data": ""},
            "root_selector": self._rows,
            "columns": [
                {"selector": column.name, "text": column.name, "type": kinds.get(column.unit, "number")}
                for column in self._columns
            ],
            "filters": [],
        }


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of JSON from the control API or another address, with actions on each. `rows` is a JSONata expression."""

    title: str
    description: str
    url: str
    rows: str
    columns: Sequence[Column]
    actions: Sequence[Action] = ()
    width: int = 24
    height: int = 10

    def build(self, number: int) -> Any:
        panel = table.Panel().id(number).title(self.title).description(self.description).datasource(API)
        panel.height(self.height).span(self.width).unit("none")
        for column in self.columns:
            if column.unit != "string":
                panel.override_by_name(column.name, [DynamicConfigValue("unit", column.unit)])
        columns = [*self.columns]
        if self.actions:
            panel.actions(list(self.actions))
            columns.append(Column(ACTIONS))
            panel.override_by_name(ACTIONS, [DynamicConfigValue("custom.cellOptions", {"type": "actions"})])
        return panel.with_target(InfinityQuery(self.url, self.rows, columns))


ACTIONS = "actions"
"""Column of a table that shows its actions as buttons."""


@dataclass(frozen=True, slots=True)
class PanelRow:
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
