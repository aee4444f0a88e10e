"""The audit log: who changed what of the service when and why, and what became of it, refusals included."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warmkv.logs import LineLimit
from warmkv.platform.access_log import AccessLog
from warmkv.platform.gateway.apis.errors import clipped, from_exception
from warmkv.platform.gateway.paths import of_operators, path_of

log = logging.getLogger(__name__)

FOLDER, FILE = "audit", "audit.jsonl"  # beside the access log; a folder, for those who replay theirs
FILE_BYTES = 10 << 20  # at which it is rotated, as the access log is
LINES_PER_MINUTE = 60  # about callers who may not; those left out are counted by `warmkv_errors`
CHANGING = ("PUT", "POST", "DELETE", "PATCH")
CUT_OFF = 499  # the status of what got no answer, as by nginx


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """What an operator did, or somebody tried. Texts of the request are cut to 1,000 characters."""

    time: str
    request: str  # its id
    who: str  # "" where the key is nobody's
    action: str  # method and path
    what: str  # as JSON, "" where the body was not read
    why: str
    status: int
    outcome: str  # the version or candidate that came of it, or why it was refused
    origin: str = ""  # of the page that sent it, "" where none did

    def to_json(self) -> str:
        """Return the action as one line without a line break."""
        return json.dumps(asdict(self))


class Audit:
    """ASGI middleware: writes down every request that would change something for operators.

    What it asks for is told by `about`, what became of it by `came_of`. `keep` takes the lines beside the service's
    log.
    """

    def __init__(
        self,
        app: ASGIApp,
        keep: Callable[[OperatorAction], None] | None,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._app, self._keep, self._wall_clock = app, keep, wall_clock
        self._strangers = LineLimit(LINES_PER_MINUTE, clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        audited = scope["type"] == "http" and scope["method"] in CHANGING and of_operators(path_of(scope))
        if not audited:
            await self._app(scope, receive, send)
            return
        request, written = Request(scope), False

        def write(status: int) -> None:
            nonlocal written
            if not written:
                written = True
                self._write(request, status)

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                write(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except asyncio.CancelledError:
            came_of(request, "cut off before its answer: the change may have been made")
            write(CUT_OFF)
            raise
        except Exception as error:  # which is answered further out
            told = from_exception(error)
            came_of(request, told.message)
            write(told.status)
            raise

    def _write(self, request: Request, status: int) -> None:
        state = request.state
        caller = getattr(state, "caller", None)
        known = caller is not None and caller.operator
        if not known and self._strangers.take() is None:
            return
        what, why = getattr(state, "audited", ("", ""))
        action = OperatorAction(
            datetime.fromtimestamp(self._wall_clock(), UTC).isoformat(),
            state.context.id,
            caller.name if caller is not None else "",
            f"{request.method} {clipped(path_of(request.scope))}",
            what,
            why,
            status,
            getattr(state, "outcome", ""),
            clipped(request.headers.get("origin", "")),
        )
        shown = json.dumps({"who": action.who, "what": action.what, "why": action.why, "outcome": action.outcome})
        log.info("audit: %s status=%d %s", json.dumps(action.action), status, shown)
        if self._keep is not None:
            self._keep(action)


def about(request: Request, what: Any, why: str = "") -> None:
    """Tell the audit log what a request asks for, as soon as its body is read."""
    request.state.audited = (clipped(json.dumps(what)), clipped(why))


def came_of(request: Request, outcome: str) -> None:
    """Tell the audit log what came of a request: that it was refused, too."""
    request.state.outcome = outcome


def opened(access_log: Path | None, dropped: Callable[[int], None]) -> AccessLog | None:
    """Return the file of the actions: in a folder beside the access log, where that is a file.

    Raises OSError where it cannot be opened.
    """
    if access_log is None or (access_log.exists() and not access_log.is_file()):
        return None
    return AccessLog(access_log.parent / FOLDER / FILE, FILE_BYTES, dropped)
