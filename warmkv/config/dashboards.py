"""Where dashboards are published."""

from __future__ import annotations

from warmkv.config.base import Section


class DashboardsConfig(Section):
    grafana_url: str = "http://127.0.0.1:3000"
    folder: str = "warmkv"
    datasource_uid: str = "prometheus"
