"""Where dashboards are published."""

from __future__ import annotations

from pydantic import Field

from warmkv.config.base import Section


class DashboardsConfig(Section):
    grafana_url: str = Field("http://127.0.0.1:3000", description="address of Grafana")
