"""Every error that a client gets is counted and logged here, once, wherever it happened."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

from warmkv import recorders, telemetry
from warmkv.logs import LineLimit
from warmkv.platform.gateway.apis.errors import STATUS, ApiError, from_exception

log = logging.getLogger(__name__)

LINES_PER_MINUTE = 60  # about errors of one type and status; those left out are counted


class ErrorLog:
    """Counts errors by type, status and API, refusals by reason, and logs both at a bounded rate.

    A client's mistake is a line at level info that says where it was found and repeats nothing the client sent; a
    refusal for want of room is a warning; what is the service's fault is logged with its traceback.
    """

    def __init__(self, recorder: recorders.Recorder, clock: Callable[[], float]) -> None:
        self._recorder = recorder
        self._limits = {kind: LineLimit(LINES_PER_MINUTE, clock) for kind in STATUS}

    def report(self, error: BaseException, api: str, *, of_operators: bool = False) -> ApiError:
        """Count and log what was raised while a request to `api` was answered; returns what its client is told.

        What operators are refused is no refusal of an answer.
        """
        told = from_exception(error)
        self._recorder.add(telemetry.ERRORS, 1, type=told.type, status=str(told.status), api=api)
        if told.status in (STATUS["rate_limit_error"], STATUS["overloaded_error"]) and not of_operators:
            self.rejected(told.reason or told.type)
        self._log(told, error, api)
        return told

    def rejected(self, reason: str) -> None:
        """Count a refusal for want of room or by a limit; `reason` is one of a few words of ours."""
        self._recorder.add(telemetry.REJECTED, 1, reason=reason)

    def _log(self, told: ApiError, error: BaseException, api: str) -> None:
        if (suppressed := self._limits[told.type].take()) is None:
            self._recorder.add(telemetry.DROPPED_LINES, 1, log="errors")
            return
        fields = f"type={told.type} status={told.status} api={api} suppressed={suppressed}"
        if told.status >= 500 and told.type != "overloaded_error":
            log.error("request failed: %s", fields, exc_info=error)
        elif told.type in ("rate_limit_error", "overloaded_error"):
            log.warning("request rejected: reason=%s %s", told.reason or told.type, fields)
        else:
            log.info("request refused: at=%s %s", _place(error), fields)


def _place(error: BaseException) -> str:
    """Return where an error was raised, as module:line; its message may repeat what the client sent."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "?"
