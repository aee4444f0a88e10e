"""Where the service may listen: beyond loopback only with tenants, or where that was asked for."""

from __future__ import annotations

import ipaddress

from warmkv.config import ConfigError, GatewayConfig


def is_loopback(host: str) -> bool:
    """Return True for 127.0.0.0/8, ::1 and localhost. Other names are not resolved: they may change tomorrow."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_listening(gateway: GatewayConfig, host: str | None = None) -> None:
    """Raise ConfigError for an open service beyond loopback, unless `gateway.allow_open` says so."""
    host = gateway.host if host is None else host
    if gateway.is_open and not gateway.allow_open and not is_loopback(host):
        raise ConfigError(
            f"gateway.host: {host} is reached from other machines, and without tenants every key is accepted. List "
            "who may call in gateway.tenants or gateway.tenants_file, or set gateway.allow_open to accept everybody"
        )
