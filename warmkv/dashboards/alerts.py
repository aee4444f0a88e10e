"""Alerts for Prometheus: an expression, how long it must hold, what to say; a runbook each in docs/operations.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from warmkv import telemetry as t
from warmkv.telemetry import Metric

RUNBOOKS = "docs/operations.md"
SLO_SECONDS = 2.5  # until the first token; a bound of the histogram's buckets
SLO_SHARE = 0.05  # of the requests that may take longer
SAVING = 0.1  # by a what-if candidate, from which on it is worth a look
LIMITS = "requests_per_minute|tokens_per_minute|concurrent_requests|queue_share"
"""Reasons of refusals that a tenant's own limits gave."""
BY_CLUSTER = "application, ray_io_cluster"
"""Labels that keep the two clusters of an upgrade apart; PodMonitors give the second, which is absent elsewhere."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. `lasting` is in Prometheus's notation; `description` may name its labels and its value."""

    name: str
    severity: Literal["critical", "warning"]
    lasting: str
    expression: str
    summary: str
    description: str

    def rule(self) -> dict[str, Any]:
        """Return the alert as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook": f"{RUNBOOKS}#{self.name.lower()}",
            },
        }


def groups() -> dict[str, Any]:
    """Return all alerts as a file of rules."""
    return {"groups": [{"name": "warmkv", "rules": [alert.rule() for alert in ALERTS]}]}


def prometheus_rule() -> dict[str, Any]:
    """Return all alerts as an object of the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "warmkv", "labels": {"app.kubernetes.io/name": "warmkv"}},
        "spec": groups(),
    }


def _sum(metric: Metric, by: str = "application") -> str:
    return f"sum by ({by}) ({metric.exported})"


def _rate(counter: Metric, minutes: int, match: str = "") -> str:
    return f"sum by (application) (rate({counter.exported}{match}[{minutes}m]))"


def _quantile(share: float, histogram: Metric, minutes: int) -> str:
    return f"histogram_quantile({share}, sum by (le, application) (rate({histogram.exported}_bucket[{minutes}m])))"


def _grew(counter: Metric, minutes: int, match: str = "") -> str:
    """Return the query of a counter's growth. One appears with its first event, which `increase` does not see."""
    series = f"{counter.exported}{match}"
    new = f"({series} unless {series} offset {minutes}m)"
    return f"sum by (application) (increase({series}[{minutes}m]) > 0 or {new}) > 0"


def _gone(metric: Metric) -> str:
    """Return the query of applications that had the metric within a day, and have it no more."""
    had = f"count by (application) (last_over_time({metric.exported}[1d]))"
    return f"({had} unless count by (application) ({metric.exported}))"


def _hit_rate(window: str) -> str:
    """Return the share of the prompt tokens that were read; 0 where none ever was."""
    read = f"sum by (application) (rate({t.CACHED_TOKENS.exported}[{window}]))"
    prompt = f'sum by (application) (rate({t.TOKENS.exported}{{kind!="output"}}[{window}]))'
    return f"({read} or 0 * {prompt}) / {prompt}"


def _slow_share(window: str) -> str:
    """Return the share of the requests whose first token came later than `SLO_SECONDS`."""
    within, every = (
        f'sum by (application) (rate({t.TTFT.exported}_bucket{{le="{bound}"}}[{window}]))'
        for bound in (SLO_SECONDS, "+Inf")
    )
    return f"(1 - {within} / {every})"


def _of_use(use: str) -> str:
    return f'sum by (application, replica) ({t.KV_BYTES.exported}{{use="{use}"}})'


def _now(metric: Metric) -> str:
    return f'sum by (application) ({metric.exported}{{candidate="now"}})'


def _best(metric: Metric) -> str:
    """Return a figure of the what-if's first candidate, if that is another than the settings in force."""
    other = f'{metric.exported}{{candidate!="now"}}'
    first = f"({t.WHATIF_RANK.exported} == 1)"
    return f"sum by (application) ({other} and on (application, candidate) {first})"


def _for_each_request(events: str, minutes: int) -> str:
    """Return the query of events for each request; 1 where no request was counted."""
    return f"{events} / ({_rate(t.REQUESTS, minutes)} or {events})"


_EVICTED = '{reason="evicted"}'

ALERTS = (
    Alert(
        "WarmkvDown",
        "critical",
        "2m",
        f"{_gone(t.LIVE_CONFIG_VERSION)} or absent_over_time({t.LIVE_CONFIG_VERSION.exported}[1d])",
        "No gateway reports metrics",
        "No gateway{{ with $labels.application }} of {{ . }}{{ end }} has reported for 2 minutes: the service does "
        "not answer, or its metrics are not scraped.",
    ),
    Alert(
        "WarmkvNoReplicas",
        "critical",
        "2m",
        f"{_sum(t.LIVE_CONFIG_VERSION)} unless {_sum(t.DECODING)}",
        "No replica runs",
        "Gateways of {{ $labels.application }} answer, but no replica reports: every request fails.",
    ),
    Alert(
        "WarmkvErrors",
        "critical",
        "5m",
        _for_each_request(_rate(t.ERRORS, 5, '{status=~"500|504",api!="warmkv"}'), 5) + " > 0.02",
        "Requests fail",
        "{{ $value | humanizePercentage }} of the requests of {{ $labels.application }} end with an error of ours.",
    ),
    Alert(
        "WarmkvRefuses",
        "warning",
        "10m",
        _for_each_request(_rate(t.REJECTED, 10, f'{{reason!~"{LIMITS}"}}'), 10) + " > 0.05",
        "Requests are refused for want of room",
        "{{ $value | humanizePercentage }} of the requests of {{ $labels.application }} are refused for full queues. "
        "Limits of tenants are not counted.",
    ),
    Alert(
        "WarmkvSlow",
        "warning",
        "10m",
        f"{_quantile(0.99, t.TTFT, 10)} > 10",
        "The first token takes long",
        "1% of the requests of {{ $labels.application }} wait {{ $value | humanizeDuration }} or longer for the first "
        "token.",
    ),
    Alert(
        "WarmkvSloBurns",
        "critical",
        "5m",
        f"({_slow_share('5m')} > {6 * SLO_SHARE:g} and {_slow_share('1h')} > {6 * SLO_SHARE:g}) "
        f"or ({_slow_share('30m')} > {2 * SLO_SHARE:g} and {_slow_share('6h')} > {2 * SLO_SHARE:g})",
        "First tokens come later than the objective allows",
        f"{{{{ $value | humanizePercentage }}}} of the requests of {{{{ $labels.application }}}} waited longer than "
        f"{SLO_SECONDS:g} s for the first token; {SLO_SHARE:.0%} may, over a month.",
    ),
    Alert(
        "WarmkvQueues",
        "warning",
        "10m",
        f"{_quantile(0.95, t.QUEUE, 10)} > 5",
        "Requests wait for a slot",
        "5% of the requests of {{ $labels.application }} wait {{ $value | humanizeDuration }} or longer in a replica.",
    ),
    Alert(
        "WarmkvMemoryShort",
        "warning",
        "10m",
        f"({_of_use('slots')} + {_of_use('workspace')}) / {_sum(t.SLOT_LIMIT_BYTES, 'application, replica')} > 0.9 "
        f"and on (application, replica) {_sum(t.WAITING, 'application, replica')} > 0",
        "A replica's memory for slots is used up",
        "Slots and workspaces of replica {{ $labels.replica }} of {{ $labels.application }} take "
        "{{ $value | humanizePercentage }} of their memory, and requests wait.",
    ),
    Alert(
        "WarmkvReplicaFaults",
        "warning",
        "0m",
        _grew(t.FAILED, 15, '{fault=~"memory|device"}'),
        "A replica ran out of memory or lost its device",
        "{{ $value }} requests of {{ $labels.application }} failed in a replica within 15 minutes. They were sent to "
        "another one.",
    ),
    Alert(
        "WarmkvRetries",
        "warning",
        "10m",
        _for_each_request(_rate(t.RETRIED, 10), 10) + " > 0.05",
        "Requests are sent again",
        "{{ $value | humanizePercentage }} of the requests of {{ $labels.application }} were sent again, because a "
        "replica failed or was full.",
    ),
    Alert(
        "WarmkvHitRateFell",
        "warning",
        "30m",
        f"{_hit_rate('30m')} < 0.5 * ({_hit_rate('1d')})",
        "The cache hit rate has halved",
        "{{ $value | humanizePercentage }} of the prompt tokens of {{ $labels.application }} were read from the cache, "
        "less than half of the day's share.",
    ),
    Alert(
        "WarmkvEvictsWithinTtl",
        "warning",
        "30m",
        f"{_rate(t.EVICTED_BLOCKS, 30, _EVICTED)} / ({_rate(t.EVICTED_BLOCKS, 30, _EVICTED)} "
        f"+ ({_rate(t.EXPIRED_BLOCKS, 30)} or 0 * {_rate(t.EVICTED_BLOCKS, 30, _EVICTED)})) > 0.5",
        "Most prefixes are evicted before their TTL",
        "{{ $value | humanizePercentage }} of the blocks that {{ $labels.application }} gave up for good were evicted "
        "to make room, though clients were promised their TTL.",
    ),
    Alert(
        "WarmkvWhatIfSaves",
        "warning",
        "1h",
        f"1 - {_best(t.WHATIF_GPU_DOLLARS)} / {_now(t.WHATIF_GPU_DOLLARS)} > {SAVING:g} "
        f"or 1 - {_best(t.WHATIF_DOLLARS)} / {_now(t.WHATIF_DOLLARS)} > {SAVING:g} "
        f"or 1 - {_best(t.WHATIF_BYTES)} / {_now(t.WHATIF_BYTES)} > {SAVING:g}",
        "Other settings would save",
        "The first candidate of the what-if service of {{ $labels.application }} would save "
        "{{ $value | humanizePercentage }} of the cost, the bill or the memory of prefixes.",
    ),
    Alert(
        "WarmkvWhatIfFails",
        "warning",
        "10m",
        f"max by (application, loop) ({t.WHATIF_FAILED.exported}) > 2",
        "What-if rounds fail one after the other",
        "The what-if service of {{ $labels.application }} failed {{ $value }} times in a row ({{ $labels.loop }}): "
        "what it shows is old, and the autopilot does nothing.",
    ),
    Alert(
        "WarmkvIndexStale",
        "warning",
        "10m",
        f"{_quantile(0.99, t.STALENESS, 10)} > 5",
        "Routers learn late which blocks are warm",
        "Changes in replicas of {{ $labels.application }} reach the routers after {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "WarmkvRouterLost",
        "warning",
        "5m",
        f"min by (application, shard) ({t.FOLLOWING.exported}) < 1",
        "A router does not follow the prefix directory",
        "A router of {{ $labels.application }} has no connection to shard {{ $labels.shard }} of the prefix directory.",
    ),
    Alert(
        "WarmkvDirectoryFull",
        "warning",
        "0m",
        f"sum by (application, shard) (delta({t.DIRECTORY_LEFT_OUT.exported}[15m])) > 0",
        "The prefix directory is full",
        "Shard {{ $labels.shard }} of {{ $labels.application }} left out {{ $value | humanize }} blocks in 15 minutes.",
    ),
    Alert(
        "WarmkvTenantsRefused",
        "warning",
        "0m",
        f"max by (application) ({t.TENANTS_REFUSED.exported}) > 0",
        "The tenants file is refused",
        "Gateways of {{ $labels.application }} cannot take the tenants file; the last valid one stays in force.",
    ),
    Alert(
        "WarmkvVersionsDiffer",
        "warning",
        "5m",
        f"max by ({BY_CLUSTER}) ({t.LIVE_CONFIG_VERSION.exported}) "
        f"- min by ({BY_CLUSTER}) ({t.LIVE_CONFIG_VERSION.exported}) > 0 "
        f"or max by ({BY_CLUSTER}) ({t.LIVE_CONFIG_REFUSED.exported}) > 0",
        "Gateways do not go by the last live configuration",
        "A gateway of {{ $labels.application }} has not heard of the last version of the live configuration, or "
        "refuses it.",
    ),
    Alert(
        "WarmkvLogLost",
        "warning",
        "0m",
        _grew(t.DROPPED_LINES, 15, '{log=~"access|audit"}'),
        "Lines of the access log or the audit log are lost",
        "{{ $value | humanize }} lines of {{ $labels.application }} are not in its access log or audit log.",
    ),
)
