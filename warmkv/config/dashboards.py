"""Where dashboards are published."""

from __future__ import annotations

from pydantic import Field

from warmkv.config.base import Section


class DashboardsConfig(Section):
    grafana_url: str = "http://127.0.0.1:3000"
    token_env: str = Field("GRAFANA_TOKEN", description="environment variable with a service-account token")
    folder: str = "warmkv"
    datasource_uid: str = "prometheus"
