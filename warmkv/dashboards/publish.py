"""Uploading dashboards to Grafana: into one folder, addressed by uid, replacing what is there under the same uid."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

import requests
from grafana_api import GrafanaFace
from grafana_api.grafana_api import GrafanaClientError, GrafanaServerError

from warmkv.faults import UserError


class PublishError(UserError):
    """Grafana has not taken the dashboards; the message says why and what to do."""


TOKEN_ENV = "GRAFANA_TOKEN"  # variable with a service-account token


@dataclass(frozen=True, slots=True)
class Published:
    """A dashboard as Grafana keeps it now."""

    uid: str
    title: str
    url: str
    version: int


def publish(
    url: str,
    token: str,
    dashboards: Mapping[str, Mapping[str, Any]],
    *,
    folder: str = "warmkv",
    datasource: str = "prometheus",
    message: str = "warmkv dashboards publish",
    timeout: float = 10.0,
) -> list[Published]:
    """Make the folder if it is missing and upload the dashboards into it. Raises PublishError.

    Panels open with the data source of the uid `datasource`.

    A dashboard that was edited in Grafana is replaced: the code is the source. Grafana keeps its old versions.
    """
    address = _address(url)
    if not token.strip():
        raise PublishError(f"no token: put a Grafana service-account token into {TOKEN_ENV}")
    host = f"[{address.hostname}]" if ":" in (address.hostname or "") else address.hostname
    prefix = address.path.strip("/")
    grafana = GrafanaFace(
        auth=token.strip(),
        host=host,
        port=address.port,
        protocol=address.scheme,
        url_path_prefix=f"{prefix}/" if prefix else "",
        timeout=timeout,
    )
    with _explained(url):
        _ensure_folder(grafana, folder)
        uid = folder_uid(folder)
        boards = [for_datasource(dashboard, datasource) for dashboard in dashboards.values()]
        return [_upload(grafana, uid, address, board, message) for board in boards]


def folder_uid(title: str) -> str:
    """Return a uid that Grafana accepts: letters, digits, `-` and `_`, at most 40."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", title).strip("-")[:40] or "warmkv"


def for_datasource(dashboard: Mapping[str, Any], uid: str) -> dict[str, Any]:
    """Copy a dashboard so that it opens with a data source; the viewer can still choose another."""
    document = copy.deepcopy(dict(dashboard))
    for variable in document.get("templating", {}).get("list", []):
        if variable.get("type") == "datasource":
            variable["current"] = {"text": uid, "value": uid}
    return document


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


def _ensure_folder(grafana: GrafanaFace, title: str) -> None:
    uid = folder_uid(title)
    try:
        grafana.folder.get_folder(uid)
    except GrafanaClientError as error:
        if error.status_code != 404:
            raise
        grafana.folder.create_folder(title, uid)


def _upload(
    grafana: GrafanaFace, folder: str, address: SplitResult, dashboard: Mapping[str, Any], message: str
) -> Published:
    answer = grafana.dashboard.update_dashboard(
        {"dashboard": dashboard, "folderUid": folder, "overwrite": True, "message": message}
    )
    return Published(
        uid=answer["uid"],
        title=str(dashboard["title"]),
        url=f"{address.scheme}://{address.netloc}{answer['url']}",  # Grafana's path has its own prefix in front
        version=answer["version"],
    )


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Turn what can go wrong into one error that says what to do."""
    try:
        yield
    except GrafanaClientError as error:
        if error.status_code == 401:
            raise PublishError(
                f"{url} does not know the token (401): make a service-account token in Grafana and put it into "
                f"{TOKEN_ENV}"
            ) from error
        if error.status_code == 403:
            raise PublishError(
                f"{url} knows the token but forbids this (403): give the service account the role Editor, or "
                f"permission to create folders and dashboards"
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
