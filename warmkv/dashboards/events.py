"""Events that every dashboard marks on its graphs, as queries of the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard

from warmkv import telemetry as t
from warmkv.dashboards.panels import DATASOURCE
from warmkv.dashboards.queries import selector

WINDOW = "1m"  # for which an event is marked: longer than Prometheus waits between two scrapes


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened while its query has a result. `text` may name its labels."""

    name: str
    color: str
    expression: str
    text: str

    def build(self) -> Any:
        return (
            dashboard.AnnotationQuery()
            .name(self.name)
            .datasource(DATASOURCE)
            .enable(True)
            .icon_color(self.color)
            .expr(self.expression)
            .step("15s")
            .title_format(self.name)
            .text_format(self.text)
        )


def _new(metric: t.Metric, by: str) -> str:
    """Return the query that counts series of a gauge which were not there before."""
    series = f"{metric.exported}{selector(metric)}"
    return f"count by ({by}) ({series} unless {series} offset {WINDOW})"


def _grew(counter: t.Metric, by: str, **match: str) -> str:
    """Return the query of a counter's growth. One appears with its first event, which `increase` does not see."""
    series = f"{counter.exported}{selector(counter, match)}"
    new = f"({series} unless {series} offset {WINDOW})"
    return f"sum by ({by}) (increase({series}[{WINDOW}]) > 0 or {new}) > 0"


_VERSION = f"max by (application) ({t.LIVE_CONFIG_VERSION.exported}{selector(t.LIVE_CONFIG_VERSION)}"
_CHANGE = f"max by (application, {', '.join(t.LIVE_CONFIG_CHANGE.labels)}) ("
_CHANGE += f"{t.LIVE_CONFIG_CHANGE.exported}{selector(t.LIVE_CONFIG_CHANGE)}"

EVENTS = (
    Event(
        "Configuration",
        "blue",
        f"({_CHANGE}) unless {_CHANGE} offset {WINDOW})) "
        f"and on (application) {_VERSION}) != {_VERSION} offset {WINDOW})",  # no gateway that only starts
        "{{application}}, version {{version}} by {{who}}: {{what}} ({{why}})",
    ),
    Event(
        "Deploy",
        "green",
        f"{_new(t.LIVE_CONFIG_VERSION, 'application, deployment')} or {_new(t.DECODING, 'application, deployment')}",
        "{{application}}: {{deployment}} started",
    ),
    Event(
        "Fault",
        "red",
        f"{_grew(t.FAILED, 'application, fault', fault='!request')} "
        f"or {_grew(t.RETRIED, 'application, when', when='!full')}",
        "{{application}}: requests failed in a replica ({{fault}}{{when}})",
    ),
)
