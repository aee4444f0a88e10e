"""Identify a request in headers, log lines and the access log: its id, the client's id, trace context and session."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KNOWN_FLAGS = 0b11  # sampled, random; the others must not be passed on
SESSION_HEADERS = ("x-claude-code-session-id", "session_id", "x-session-id")  # the first one that is there counts
CLIENT_ID_LENGTH = 128  # characters of an x-request-id that are taken
_CLIENT_ID = re.compile(rf"[\w.:@/+=-]{{1,{CLIENT_ID_LENGTH}}}", re.ASCII)
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of a distributed trace (W3C Trace Context); ids in lower-case hexadecimal."""

    trace_id: str
    span_id: str
    flags: str = "00"

    @property
    def traceparent(self) -> str:
        """Return the header of this span, for the next one that is called."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    def child(self) -> TraceContext:
        """Return a new span of the same trace."""
        return TraceContext(self.trace_id, secrets.token_hex(8), self.flags)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Identity of one request; travels with it to the replica."""

    id: str  # req_...
    client_id: str = ""  # x-request-id, where the client or a proxy before us sent one
    trace: TraceContext | None = None


def new_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


def parse_traceparent(values: Sequence[str]) -> TraceContext | None:
    """Parse the `traceparent` headers of a request; None where there is none or it is invalid, as W3C asks.

    A version later than 00 may have more fields behind the known ones. Two headers are as good as none.
    """
    match = _TRACEPARENT.fullmatch(values[0].strip(" \t")) if len(values) == 1 else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more is not None) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, f"{int(flags, 16) & KNOWN_FLAGS:02x}")


def checked_client_id(values: Sequence[str]) -> str:
    """Return the client's `x-request-id` if it is short and plain, else nothing: it goes into logs."""
    return values[0] if len(values) == 1 and _CLIENT_ID.fullmatch(values[0]) else ""


def session_of_headers(headers: Mapping[str, str]) -> str:
    """Return the session that a client names in a header, as coding agents do; empty for none."""
    return next((name for header in SESSION_HEADERS if (name := headers.get(header))), "")


def session_of_body(cache_key: object, metadata: object) -> str:
    """Return the session that a body names; empty for none.

    The OpenAI APIs name it by `prompt_cache_key`. Anthropic's has only a `user_id` in its `metadata`, in which Claude
    Code puts the session.
    """
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    return next((name for name in (cache_key, user) if isinstance(name, str) and name), "")
