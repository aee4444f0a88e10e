"""Which of warmkv's own options a tenant may use."""

from __future__ import annotations

from collections.abc import Sequence

from warmkv.config import Capabilities, Config, Needs, Right, refusal
from warmkv.platform.gateway.apis.errors import ApiError, invalid
from warmkv.platform.gateway.apis.schema import WarmkvOptions
from warmkv.platform.tenants import Tenant


def check_options(options: WarmkvOptions, tenant: Tenant, config: Config, groups: Sequence[Capabilities]) -> None:
    """Raise ApiError for an option that the tenant has no right to, that is switched off, or that no replica has."""
    wanted: dict[Right, bool] = {
        "policy": options.policy is not None,
        "replica": options.replica is not None,
        "ignore_eos": options.ignore_eos,
    }
    switches = {
        "policy": ("compression.allow_request_policy", config.compression.allow_request_policy),
        "replica": ("routing.allow_request_replica", config.routing.allow_request_replica),
    }
    for right, is_wanted in wanted.items():
        if not is_wanted:
            continue
        if right not in tenant.rights:
            raise ApiError("permission_error", f"warmkv.{right}: this key lacks the right {right!r} (gateway.rights)")
        setting, allowed = switches.get(right, ("", True))
        if not allowed:
            raise ApiError("permission_error", f"warmkv.{right}: this server does not let requests choose ({setting})")
    if options.policy is not None and (fault := refusal(groups, Needs(options.policy))):
        raise invalid(f"warmkv.policy: {fault}")
