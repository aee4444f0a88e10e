"""Panels and rows as values: described, with a unit, reading the dashboard's data source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from grafana_foundation_sdk.builders import common as options
from grafana_foundation_sdk.builders import dashboard, prometheus, stat, table, text, timeseries
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import (
    ActionType,
    DynamicConfigValue,
    FieldColorModeId,
    HttpRequestMethod,
    Threshold,
    ThresholdsMode,
)
from grafana_foundation_sdk.models.text import TextMode

from warmkv.dashboards.queries import Query

DATASOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
INFINITY = "yesoreyeram-infinity-datasource"  # reads JSON from the control API, on Grafana's server
API = common.DataSourceRef(type_val=INFINITY, uid="${api}")
TOKENS_PER_SECOND = "si:tok/s"
BLOCKS_PER_SECOND = "si:blocks/s"
WARM_AND_COLD = {"warm": "orange", "cold": "blue"}
MEASURED = {"measured": "text", "now": "yellow", "first": "blue"}  # beside what other candidates would do
ACTIONS = "actions"
"""Column of a table that shows its actions as buttons."""

Step = tuple[float | None, str]  # of a threshold: from this value on (None: from the least), this colour
PLAIN: Sequence[Step] = ((None, "blue"),)  # of a number that is neither good nor bad


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
    width: int = 8
    height: int = 8
    stacked: bool = False
    least: float | None = 0
    top: float | None = None
    decimals: int | None = None  # on the axis; 0 for what is counted
    limit: float | None = None  # drawn as a dashed line
    none: str | None = None  # what it says while there is nothing to show, as in a healthy service
    colors: Mapping[str, str] = field(default_factory=dict)  # of series whose legend begins so
    shades: str | None = None  # one colour for all series, as of what should not happen

    def build(self, number: int) -> Any:
        legend = options.VizLegendOptions().display_mode(common.LegendDisplayMode.LIST).show_legend(True)
        panel = (
            _common(timeseries.Panel(), number, self.title, self.description, self.unit, self.queries)
            .height(self.height)
            .span(self.width)
            .line_width(1 if self.stacked else 2)
            .point_size(4)
            .fill_opacity(30 if self.stacked else 0)
            .legend(legend.placement(common.LegendPlacement.BOTTOM))
            .tooltip(
                options.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
            )
        )
        if self.stacked:
            panel.stacking(options.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
        for value, setter in (
            (self.least, panel.min),
            (self.top, panel.max),
            (self.decimals, panel.decimals),
            (self.none, panel.no_value),
        ):
            if value is not None:
                setter(value)
        if self.limit is not None:
            panel.thresholds(_thresholds(((None, "transparent"), (self.limit, "red"))))
            panel.thresholds_style(options.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED))
        if self.decimals == 0:
            panel.axis_soft_max(1)  # else the axis of a constant 0 goes to 100
        if self.shades is not None:
            panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.SHADES).fixed_color(self.shades))
        for beginning, color in self.colors.items():
            panel.override_by_regexp(f"/^{beginning}/", [_color(color)])
        return panel


@dataclass(frozen=True, slots=True)
class Number:
    """One present value for each application, and its course behind it."""

    title: str
    description: str
    unit: str
    query: str
    steps: Sequence[Step] = PLAIN
    decimals: int | None = None

    def build(self, number: int) -> Any:
        queries = [(self.query, "{{application}}")]
        panel = (
            _common(stat.Panel(), number, self.title, self.description, self.unit, queries)
            .height(4)
            .span(6)
            .graph_mode(common.BigValueGraphMode.AREA)
            .reduce_options(options.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
            .thresholds(_thresholds(self.steps))
            .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
        )
        return panel if self.decimals is None else panel.decimals(self.decimals)


@dataclass(frozen=True, slots=True)
class TextPanel:
    """Markdown without a frame."""

    title: str
    markdown: str

    def build(self, number: int) -> Any:
        panel = text.Panel().id(number).title(self.title).height(3).span(24)
        return panel.mode(TextMode.MARKDOWN).content(self.markdown)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; without a unit it holds text. Those without a width share what is left."""

    name: str
    unit: str = "string"
    width: int | None = None
    bar: bool = False  # drawn behind the number, as long as it is large beside the column's largest

    def properties(self) -> list[DynamicConfigValue]:
        """Return how the column is shown."""
        found = [DynamicConfigValue("noValue", "–")]
        if self.unit == "bool":
            shown = {"true": {"text": "yes", "color": "green"}, "false": {"text": "–", "color": "text"}}
            found.append(DynamicConfigValue("mappings", [{"type": "value", "options": shown}]))
            found.append(DynamicConfigValue("custom.cellOptions", {"type": "color-text"}))
        elif self.unit != "string":
            found.append(DynamicConfigValue("unit", self.unit))
        if self.bar:
            found.append(DynamicConfigValue("custom.cellOptions", {"type": "gauge", "mode": "basic"}))
            found.append(DynamicConfigValue("min", 0))
            found.append(DynamicConfigValue("fieldMinMax", True))  # else the largest of all columns
            found.append(_color("blue"))
        if self.width is not None:
            found.append(DynamicConfigValue("custom.width", self.width))
        return found


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
        kinds = {"string": "string", "bool": "boolean", "dateTimeAsIso": "timestamp"}
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
    actions_width: int = 150
    width: int = 24
    height: int = 10
    none: str | None = None  # what it says without rows

    def build(self, number: int) -> Any:
        panel = table.Panel().id(number).title(self.title).description(self.description).datasource(API)
        panel.height(self.height).span(self.width).unit("none")
        if self.none is not None:
            panel.no_value(self.none)
        columns = [*self.columns]
        for column in columns:
            panel.override_by_name(column.name, column.properties())
        if self.actions:
            columns.append(Column(ACTIONS))
            buttons = [
                DynamicConfigValue("custom.cellOptions", {"type": "actions"}),
                DynamicConfigValue("custom.width", self.actions_width),
                DynamicConfigValue("actions", [action.build() for action in self.actions]),
            ]
            panel.override_by_name(ACTIONS, buttons)
        return panel.with_target(InfinityQuery(self.url, self.rows, columns))


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


def _thresholds(steps: Sequence[Step]) -> Any:
    found = [Threshold(value, color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(found)


def _color(name: str) -> DynamicConfigValue:
    return DynamicConfigValue("color", {"mode": "fixed", "fixedColor": name})
