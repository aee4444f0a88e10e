"""Recording the metrics of `telemetry`: through Ray, added up and given to it once a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from warmkv.telemetry import Metric

FLUSH_SECONDS = 1.0
"""Ray forgets a gauge that was not set for two of its reports, of which there is one a second at most."""

Series = tuple[Metric, tuple[tuple[str, str], ...]]
"""Name a metric with labels and their values."""


class Bounded:
    """Bound the values of a label to `most`: whatever comes later is `other`."""

    def __init__(self, most: int = 100) -> None:
        self._most, self._known = most, set[str]()

    def __call__(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) >= self._most:
            return "other"
        self._known.add(value)
        return value


class Recorder(Protocol):
    """Record metrics: `RayRecorder` in the service, a double in tests."""

    def add(self, counter: Metric, value: float, **labels: str) -> None: ...
    def grow(self, counter: Metric, total: float, **labels: str) -> None: ...
    def set(self, gauge: Metric, value: float, **labels: str) -> None: ...
    def forget(self, gauge: Metric, **labels: str) -> None: ...
    def observe(self, histogram: Metric, value: float, **labels: str) -> None: ...


class RayRecorder:
    """Record metrics through Ray Serve, which adds application, deployment and replica labels.

    In another actor than a Serve replica there is nothing to add them from: name the application there. Any thread may
    record. A call of Ray's takes microseconds, so counters are added up here; they and the gauges are given to Ray once
    a second. Gauges keep their last value for as long as the process lives.
    """

    def __init__(self, *metrics: Metric, application: str | None = None) -> None:
        if application is None:
            from ray.serve import metrics as library
        else:
            from ray.util import metrics as library

        kinds = {"counter": library.Counter, "gauge": library.Gauge, "histogram": library.Histogram}
        common = {} if application is None else {"application": application}
        self._metrics: dict[Metric, Any] = {}  # Ray's
        self._lock = threading.Lock()
        self._counted: dict[Series, float] = {}  # since the last flush
        self._gauges: dict[Series, float] = {}
        self._totals: dict[Series, float] = {}
        for metric in metrics:
            extra = {"boundaries": list(metric.buckets)} if metric.kind == "histogram" else {}
            self._metrics[metric] = kinds[metric.kind](
                metric.name, description=metric.help, tag_keys=(*metric.labels, *common), **extra
            )
            if common:
                self._metrics[metric].set_default_tags(common)
        threading.Thread(target=self._keep_flushing, name="metrics", daemon=True).start()

    def add(self, counter: Metric, value: float, **labels: str) -> None:
        """Count `value` more; nothing is recorded for 0. Raises ValueError if a label is missing or unknown."""
        if value > 0:
            series = counter, tuple(labels.items())
            with self._lock:
                before = self._counted.get(series)
                if before is None:
                    self._check(counter, labels)
                self._counted[series] = (before or 0.0) + value

    def grow(self, counter: Metric, total: float, **labels: str) -> None:
        """Count what a total that is kept elsewhere has grown by since the last call with these labels."""
        series = counter, tuple(labels.items())
        before, self._totals[series] = self._totals.get(series, 0.0), total
        self.add(counter, total - before, **labels)

    def set(self, gauge: Metric, value: float, **labels: str) -> None:
        """Set a level. Raises ValueError if a label is missing or unknown."""
        series = gauge, tuple(labels.items())
        with self._lock:
            if series not in self._gauges:
                self._check(gauge, labels)
            self._gauges[series] = value

    def forget(self, gauge: Metric, **labels: str) -> None:
        """End a gauge: Ray drops what is not set any more. Fewer labels than it has stand for all that have these."""
        with self._lock:
            for series in [one for one in self._gauges if one[0] is gauge and labels.items() <= dict(one[1]).items()]:
                del self._gauges[series]

    def observe(self, histogram: Metric, value: float, **labels: str) -> None:
        """Observe a value, at once: Ray takes them one by one."""
        self._metrics[histogram].observe(value, tags=labels)

    def flush(self) -> None:
        """Give Ray what was counted since the last time, and every gauge again."""
        with self._lock:
            counted = [(series, value) for series, value in self._counted.items() if value]
            self._counted.update((series, 0.0) for series, _ in counted)
            gauges = list(self._gauges.items())
        for (counter, labels), value in counted:
            self._metrics[counter].inc(value, tags=dict(labels))
        for (gauge, labels), value in gauges:
            self._metrics[gauge].set(value, tags=dict(labels))

    def _check(self, metric: Metric, labels: Mapping[str, str]) -> None:
        if metric not in self._metrics or labels.keys() != set(metric.labels):
            raise ValueError(f"{metric.name} is not recorded here with the labels {', '.join(labels) or 'none'}")

    def _keep_flushing(self) -> None:
        while True:
            time.sleep(FLUSH_SECONDS)
            self.flush()
