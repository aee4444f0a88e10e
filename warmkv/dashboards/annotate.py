"""Changes of the live configuration as annotations that Grafana keeps, for longer than Prometheus its series."""

from __future__ import annotations

from typing import Any

import requests
from pydantic import ValidationError

from warmkv.dashboards.boards import TAG
from warmkv.dashboards.publish import PublishError, Target, connected
from warmkv.platform.live_config import Version, described

KIND = "configuration"  # the tag of these annotations beside that of the dashboards
MOST = 1000  # annotations that are looked through


def annotate(target: Target) -> list[Version]:
    """Write the versions of the target's gateway that Grafana has no annotation of; return them.

    Raises PublishError.
    """
    versions = history(target)
    with connected(target) as grafana:
        known = grafana.api.GET(f"/annotations?type=annotation&tags={TAG}&tags={KIND}&limit={MOST}")
        times = {(one["time"], tag) for one in known for tag in one["tags"]}
        missing = [version for version in versions if (_time(version), _tag(version)) not in times]
        for version in reversed(missing):
            said = described(version)
            grafana.api.POST(
                "/annotations",
                {
                    "time": _time(version),
                    "tags": [TAG, KIND, _tag(version)],
                    "text": f"{_tag(version)} by {said['who']}: {said['what']} ({said['why']})",
                },
            )
    return missing


def history(target: Target) -> list[Version]:
    """Return the versions that the target's gateway keeps, the last one first. Raises PublishError."""
    if not target.gateway:
        raise PublishError("no gateway: give the address of the service whose changes are to be marked")
    url = f"{target.gateway.rstrip('/')}/v1/warmkv/policy/history"
    try:
        answer = requests.get(url, headers={"x-api-key": target.key}, timeout=target.timeout)
        body: Any = answer.json()
        if answer.status_code != 200:
            raise PublishError(f"{url} answered {answer.status_code}: {body['error']['message']}")
        return [_version(one) for one in body["versions"]]
    except requests.JSONDecodeError as error:
        raise PublishError(f"{url} answered, but not as a gateway does: is its address right?") from error
    except requests.RequestException as error:
        raise PublishError(f"cannot reach the gateway at {url}: is it running?") from error
    except (KeyError, TypeError, ValidationError) as error:
        raise PublishError(f"{url} answered, but not as a gateway does: is its address right?") from error


def _version(told: dict[str, Any]) -> Version:
    """Return a version as the history of the control API tells it."""
    fields = {name: told[name] for name in ("who", "when", "why", "changes", "rolled_back_to")}
    return Version.model_validate({"number": told["version"], **fields})


def _time(version: Version) -> int:
    """Return Unix time in milliseconds."""
    return round(version.when.timestamp() * 1000) if version.when is not None else 0


def _tag(version: Version) -> str:
    return f"version {version.number}"
