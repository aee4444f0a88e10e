"""Uploading dashboards to Grafana: into one folder, addressed by uid; what is there already is left alone."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

import requests
from grafana_api import GrafanaFace
from grafana_api.grafana_api import GrafanaClientError, GrafanaServerError

from warmkv.dashboards.panels import INFINITY
from warmkv.faults import UserError


class PublishError(UserError):
    """Grafana has not taken the dashboards; the message says why and what to do."""


TOKEN_ENV = "GRAFANA_TOKEN"  # variable with a service-account token
OLDEST = 12  # Grafana's version since which tables have actions
API_UID = "warmkv-api"  # of the data source that reads the control API

What = Literal["folder", "data source", "dashboard"]
State = Literal["created", "updated", "unchanged"]


@dataclass(frozen=True, slots=True)
class Target:
    """Where dashboards go, and what they read. Data sources are made only where their address is given."""

    url: str
    token: str
    folder: str = "warmkv"
    datasource: str = "prometheus"  # uid of the Prometheus data source that panels open with
    prometheus: str | None = None  # address of Prometheus, for a data source of that uid
    gateway: str | None = None  # address of the service: for actions, and the data source that reads the control API
    key: str = ""  # an operator's, which Grafana keeps and that data source sends
    message: str = "warmkv dashboards publish"
    timeout: float = 10.0


@dataclass(frozen=True, slots=True)
class Published:
    """A folder, data source or dashboard as Grafana keeps it now; with `write=False`, what would become of it."""

    what: What
    uid: str
    title: str
    state: State
    url: str = ""
    version: int | None = None  # Grafana's
    differences: tuple[str, ...] = ()  # places in the JSON where Grafana has something else


def publish(target: Target, dashboards: Mapping[str, Mapping[str, Any]], *, write: bool = True) -> list[Published]:
    """Make folder and data sources if they are missing, and upload the dashboards that differ. Raises PublishError.

    A dashboard that was edited in Grafana is replaced: the code is the source. Grafana keeps its old versions. Without
    `write` nothing is changed.
    """
    address = _address(target.url)
    with connected(target) as grafana:
        _check_version(target.url, grafana.api.GET("/health"))
        done = [_publish_source(grafana, source, write) for source in sources(target)]
        done.append(_publish_folder(grafana, target.folder, write))
        for dashboard in dashboards.values():
            done.append(_publish_board(grafana, target, address, opening(dashboard, target), write))
        return done


@contextmanager
def connected(target: Target) -> Iterator[GrafanaFace]:
    """Yield the target's Grafana; what goes wrong with it is a PublishError that says what to do."""
    address = _address(target.url)
    if not target.token.strip():
        raise PublishError(f"no token: put a Grafana service-account token into {TOKEN_ENV}")
    host = f"[{address.hostname}]" if ":" in (address.hostname or "") else address.hostname
    prefix = address.path.strip("/")
    with _explained(target.url):
        yield GrafanaFace(
            auth=target.token.strip(),
            host=host,
            port=address.port,
            protocol=address.scheme,
            url_path_prefix=f"{prefix}/" if prefix else "",
            timeout=target.timeout,
        )


def folder_uid(title: str) -> str:
    """Return a uid that Grafana accepts: letters, digits, `-` and `_`, at most 40."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", title).strip("-")[:40] or "warmkv"


def opening(dashboard: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Copy a dashboard so that it opens with the target's data sources and gateway; viewers can choose others."""
    document = copy.deepcopy(dict(dashboard))
    chosen = {"datasource": target.datasource, "api": API_UID, "gateway": target.gateway}
    for variable in document.get("templating", {}).get("list", []):
        if value := chosen.get(variable.get("name")):
            variable["current"] = {"text": value, "value": value}
            if variable.get("type") == "textbox":
                variable["query"] = value
    return document


def sources(target: Target) -> list[dict[str, Any]]:
    """Return the data sources to make, as Grafana takes them.

    Grafana never shows a secret again, so a hash of the key beside it tells whether it is still the same.
    """
    found: list[dict[str, Any]] = []
    if target.prometheus:
        found.append(_source(target.datasource, "prometheus", target.prometheus, {"httpMethod": "POST"}))
    if target.gateway:
        settings: dict[str, Any] = {"allowedHosts": [target.gateway]}
        secrets = {}
        if target.key:
            settings |= {"auth_method": "apiKey", "apiKeyKey": "x-api-key", "apiKeyType": "header"}
            settings["keyHash"] = hashlib.sha256(target.key.encode()).hexdigest()[:16]
            secrets = {"apiKeyValue": target.key}
        found.append(_source(API_UID, INFINITY, target.gateway, settings) | {"secureJsonData": secrets})
    return found


def _source(uid: str, kind: str, url: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"uid": uid, "name": uid, "type": kind, "url": url, "access": "proxy", "jsonData": dict(settings)}


def differences(ours: Any, theirs: Any, place: str = "") -> Iterator[str]:
    """Yield the places where Grafana has something else. Keys that it adds are none of ours."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key, value in ours.items():
            yield from differences(value, theirs.get(key), f"{place}.{key}" if place else key)
    elif isinstance(ours, Sequence) and not isinstance(ours, str) and isinstance(theirs, Sequence):
        if len(ours) != len(theirs):
            yield place
            return
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{place}[{at}]")
    elif ours != theirs:
        yield place


def _address(url: str) -> SplitResult:
    try:
        address = urlsplit(url)
        _ = address.port  # raises ValueError where it is not a number
    except ValueError as error:
        raise PublishError(f"dashboards.grafana_url {url!r}: {error}") from None
    if address.scheme not in ("http", "https") or not address.hostname:
        raise PublishError(f"dashboards.grafana_url {url!r}: write it as http://HOST:PORT")
    if address.username or address.password:
        raise PublishError("dashboards.grafana_url: leave user and password out; the token is what Grafana checks")
    return address


def _check_version(url: str, health: Mapping[str, Any]) -> None:
    """Raise PublishError for a Grafana that is too old. One that hides its version is believed."""
    version = str(health.get("version") or "")
    if (major := re.match(r"\d+", version)) and int(major[0]) < OLDEST:
        raise PublishError(f"{url} is Grafana {version}: the actions in tables need {OLDEST} or newer; upgrade Grafana")


def _found(grafana: GrafanaFace, path: str) -> dict[str, Any] | None:
    """Return what is there; None if nothing is."""
    try:
        found: dict[str, Any] = grafana.api.GET(path)
    except GrafanaClientError as error:
        if error.status_code != 404:
            raise
        return None
    return found


def _publish_source(grafana: GrafanaFace, source: dict[str, Any], write: bool) -> Published:
    uid = source["uid"]
    known = _found(grafana, f"/datasources/uid/{uid}")
    shown = {key: value for key, value in source.items() if key != "secureJsonData"}
    places = tuple(differences(shown, known)) if known is not None else ()
    state: State = "created" if known is None else "updated" if places else "unchanged"
    if write and known is not None and places and known.get("readOnly"):
        raise PublishError(
            f"data source {uid} differs and was provisioned from a file of Grafana's: change it there "
            f"({', '.join(places)}), or leave --prometheus and --gateway out"
        )
    if write and state == "created":
        grafana.datasource.create_datasource(source)
    elif write and state == "updated":
        grafana.api.PUT(f"/datasources/uid/{uid}", source)
    return Published("data source", uid, source["name"], state, differences=places)


def _publish_folder(grafana: GrafanaFace, title: str, write: bool) -> Published:
    uid = folder_uid(title)
    if _found(grafana, f"/folders/{uid}") is not None:
        return Published("folder", uid, title, "unchanged")
    if write:
        grafana.folder.create_folder(title, uid)
    return Published("folder", uid, title, "created")


def _publish_board(
    grafana: GrafanaFace, target: Target, address: SplitResult, dashboard: dict[str, Any], write: bool
) -> Published:
    uid, title, folder = str(dashboard["uid"]), str(dashboard["title"]), folder_uid(target.folder)
    known = _found(grafana, f"/dashboards/uid/{uid}")
    places: tuple[str, ...] = ()
    where: dict[str, Any] = {"url": "", "version": None}
    if known is not None:
        where = known["meta"]
        places = tuple(differences(dashboard, known["dashboard"]))
        places += ("folder",) * (where.get("folderUid") != folder)
    state: State = "created" if known is None else "updated" if places else "unchanged"
    if write and places and known is not None and known["meta"].get("provisioned"):
        raise PublishError(f"dashboard {uid} differs and was provisioned from a file of Grafana's: replace that file")
    if write and state != "unchanged":
        where = grafana.dashboard.update_dashboard(
            {"dashboard": dashboard, "folderUid": folder, "overwrite": True, "message": target.message}
        )
    url = f"{address.scheme}://{address.netloc}{where['url']}" if where["url"] else ""  # it has Grafana's own prefix
    return Published("dashboard", uid, title, state, url, where["version"], places)


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Turn what can go wrong into one error that says what to do."""
    try:
        yield
    except PublishError:
        raise
    except GrafanaClientError as error:
        if error.status_code == 401:
            raise PublishError(
                f"{url} does not know the token (401): make a service-account token in Grafana and put it into "
                f"{TOKEN_ENV}"
            ) from error
        if error.status_code == 403:
            raise PublishError(
                f"{url} knows the token but forbids this (403, {error}): give the service account the role Editor, or "
                f"permission to create folders and dashboards; to "
                f"make data sources it must be Admin"
            ) from error
        raise PublishError(f"{url} refused the request: {error}") from error
    except GrafanaServerError as error:
        raise PublishError(f"{url} failed: {error}; its log says more") from error
    except (ValueError, KeyError, TypeError) as error:  # an answer that is no JSON, or not Grafana's
        raise PublishError(f"{url} answered, but not as Grafana does: is dashboards.grafana_url right?") from error
    except requests.RequestException as error:
        raise PublishError(
            f"cannot reach Grafana at {url}: is it running, and is dashboards.grafana_url right? ({_reason(error)})"
        ) from error


def _reason(error: Exception) -> str:
    """Return the innermost reason: `Connection refused` says more than the layers around it."""
    text = str(error)
    return match[1] if (match := re.search(r"\[Errno -?\d+\] ([^'\")]+)", text)) else type(error).__name__
