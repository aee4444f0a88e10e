"""PromQL for the metrics of `warmkv.telemetry`. A label that a metric does not have is refused while building.

Every query sums the series of all processes (Ray labels each with its worker) and is filtered by the dashboard's
variables: `$application`, and `$policy`, `$model` and `$tenant` where the metric knows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from warmkv.telemetry import Metric

NOTHING: Mapping[str, str] = MappingProxyType({})
Query = tuple[str, str]  # expression, legend
PERCENTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))

SERVE_LABELS = ("application", "deployment", "replica")  # Ray Serve adds these to every metric
RANGE = "$__rate_interval"


def rate(counter: Metric, by: tuple[str, ...] = ("application",), **match: str) -> str:
    """Build the query of a counter's growth per second. `match` filters: `"!x"` is all but x, `"~x"` an expression."""
    _expect(counter, "counter")
    series = f"{counter.exported}{selector(counter, match)}"
    return f"sum by ({_labels(counter, by)}) (rate({series}[{RANGE}]))"


def level(gauge: Metric, by: tuple[str, ...] = ("application",), **match: str) -> str:
    """Build the query of a gauge's present value."""
    _expect(gauge, "gauge")
    return f"sum by ({_labels(gauge, by)}) ({gauge.exported}{selector(gauge, match)})"


def quantile(share: float, histogram: Metric, by: tuple[str, ...] = ("application",), **match: str) -> str:
    """Build the query of a quantile: the value that a share of the observations stays under."""
    _expect(histogram, "histogram")
    series = f"{histogram.exported}_bucket{selector(histogram, match)}"
    return f"histogram_quantile({share}, sum by (le, {_labels(histogram, by)}) (rate({series}[{RANGE}])))"


def observed(histogram: Metric, by: tuple[str, ...] = ("application",), **match: str) -> str:
    """Build the query of a histogram's observations per second."""
    _expect(histogram, "histogram")
    series = f"{histogram.exported}_count{selector(histogram, match)}"
    return f"sum by ({_labels(histogram, by)}) (rate({series}[{RANGE}]))"


def within(bound: float, histogram: Metric, by: tuple[str, ...] = ("application",), **match: str) -> str:
    """Build the query of a histogram's observations per second up to a bound of its buckets.

    There is none of a mean: Ray counts every observation as the middle of its bucket, the last as twice its bound.
    """
    _expect(histogram, "histogram")
    if bound not in histogram.buckets:
        raise ValueError(f"{histogram.name} has no bucket up to {bound:g}")
    series = f'{histogram.exported}_bucket{selector(histogram, match)[:-1]}, le="{bound:g}"}}'
    return f"sum by ({_labels(histogram, by)}) (rate({series}[{RANGE}]))"


def percentiles(histogram: Metric, by: str, shares: Sequence[tuple[float, str]] = PERCENTILES) -> list[Query]:
    """Build the queries of several quantiles, each with its legend."""
    return [(quantile(share, histogram, (by,)), f"{{{{{by}}}}} {name}".strip()) for share, name in shares]


def _expect(metric: Metric, kind: str) -> None:
    if metric.kind != kind:
        raise ValueError(f"{metric.name} is a {metric.kind}, not a {kind}")


def _labels(metric: Metric, labels: tuple[str, ...]) -> str:
    if unknown := [label for label in labels if label not in (*metric.labels, *SERVE_LABELS)]:
        raise ValueError(f"{metric.name} has no label {unknown[0]!r}; it has {', '.join(metric.labels) or 'none'}")
    return ", ".join(labels)


def selector(metric: Metric, match: Mapping[str, str] = NOTHING) -> str:
    """Build the filter of a metric's series: by the dashboard's variables, and by `match`."""
    _labels(metric, tuple(match))
    terms = ['application=~"$application"']
    terms += [f'{label}=~"${label}"' for label in ("policy", "model", "tenant") if label in metric.labels]
    for label, value in match.items():
        operator = {"!": "!=", "~": "=~"}.get(value[:1], "=")
        terms.append(f'{label}{operator}"{value if operator == "=" else value[1:]}"')
    return "{" + ", ".join(terms) + "}"
