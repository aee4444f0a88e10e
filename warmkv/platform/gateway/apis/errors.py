"""What can go wrong with a request, and how each API says it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from warmkv.replicas.protocol import QueueFullError, UnservableRequestError

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "conflict_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "timeout_error",
    "overloaded_error",
]
STATUS: dict[ErrorType, int] = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}


LONGEST_MESSAGE = 1000  # characters
FIELD = re.compile(r"[a-z_]\w*(?:\.\w+)*(?=: )")  # that a message begins with, as `messages.0.content: ...`
HIDDEN_TAGS = frozenset(("image", "word"))  # of unions: what is taken to be refused by name, and what is no object


class ApiError(Exception):
    """An answer that is an error; `type` is the Messages API's name for its kind.

    `reason` names the limit or the queue that a refusal is due to (429 and 529): it labels the count of rejections,
    so there are few of them and none comes from a client. `retry_after` is the time in seconds after which the client
    should try again, `final` says that it is of no use. `status` overrides that of the type. `details` are what SDKs of
    the Messages API look for in an error; clients of OpenAI's APIs look for `code`, for the field at fault (`param`, by
    default the one that the message begins with) and for that API's own words (`openai`, where they are others).
    """

    def __init__(
        self,
        type_: ErrorType,
        message: str,
        *,
        reason: str | None = None,
        retry_after: float | None = None,
        final: bool = False,
        status: int | None = None,
        details: Mapping[str, Any] | None = None,
        code: str | None = None,
        param: str | None = None,
        openai: str | None = None,
    ) -> None:
        message = clipped(message)  # it may quote the request, which may be megabytes
        super().__init__(message)
        self.type, self.message, self.status, self.reason = type_, message, status or STATUS[type_], reason
        self.retry_after, self.final, self.details = retry_after, final, details
        self.code, self.openai = code, message if openai is None else clipped(openai)
        named = FIELD.match(message)
        self.param = named[0] if named is not None and param is None else param


class ReplicaFailedError(Exception):
    """A replica that did not end what it was sent: it said so, or just stopped."""


class RequestFailedError(Exception):
    """A request that replicas cannot compute: any other one would fail with it, too."""


def clipped(message: str, longest: int = LONGEST_MESSAGE) -> str:
    """Return the message, its middle left out where it is longer than `longest` characters."""
    if len(message) <= longest:
        return message
    half = (longest - 5) // 2
    return f"{message[:half]} ... {message[-half:]}"


def invalid(message: str) -> ApiError:
    return ApiError("invalid_request_error", message)


def overloaded(queue: str, retry_after: float | None = None) -> ApiError:
    """Return the refusal of a request that finds a queue full."""
    message = "Too many requests are waiting. Try again in a moment."
    return ApiError("overloaded_error", message, reason=queue, retry_after=retry_after)


def stopping() -> ApiError:
    """Return the end of an answer that goes on when its gateway must stop."""
    return ApiError("overloaded_error", "The server is being stopped. Try again in a moment.", reason="stopping")


@contextmanager
def refusals(kinds: Mapping[type[Exception], ErrorType]) -> Iterator[None]:
    """Raise what is raised within as an ApiError of its kind, where `kinds` names one."""
    try:
        yield
    except tuple(kinds) as error:
        kind = next(type_ for class_, type_ in kinds.items() if isinstance(error, class_))
        raise ApiError(kind, reason(error)) from None


def from_validation(error: ValidationError, body: Any) -> ApiError:
    """Return the most specific fault of a body, with its place: of a union's branches, the one that went deepest."""
    fault = max(error.errors(include_url=False, include_input=False), key=lambda item: len(item["loc"]))
    place = _place(fault["loc"], body, is_missing=fault["type"] == "missing")
    match fault["type"]:
        case "model_type" | "model_attributes_type":  # pydantic's texts name classes of ours, or of its own
            message = "Input should be an object"
        case "union_tag_not_found":
            place = ".".join(filter(None, (place, _discriminator(fault))))
            message = "Field required"
        case "union_tag_invalid":
            tags = [tag for tag in re.findall("'([^']*)'", fault["ctx"]["expected_tags"]) if tag not in HIDDEN_TAGS]
            name, tag = _discriminator(fault), clipped(str(fault["ctx"]["tag"]), 100)
            message = f"{name} {tag!r} is not supported here; this server takes {', '.join(map(repr, tags))}"
        case _:
            message = str(fault["msg"]).removeprefix("Value error, ")
    return invalid(f"{place}: {message}" if place else message)


def _place(loc: Sequence[str | int], body: Any, *, is_missing: bool) -> str:
    """Return the place of a fault as it is in the body: of a `loc`, what names branches of a union is left out."""
    return ".".join(_in_body(tuple(loc), body, is_missing)[2])


def _in_body(loc: tuple[str | int, ...], body: Any, is_missing: bool) -> tuple[int, bool, tuple[str, ...]]:
    """Return how few parts of a `loc` can be left out, whether the last one is, and those that are in the body.

    A branch may have the name of a field within it, as in a block of type `text`, so that both readings are tried.
    """
    if not loc:
        return 0, False, ()
    part, *rest = loc
    left_out, without_last, place = _in_body(tuple(rest), body, is_missing)
    skipping = (left_out + 1, without_last or not rest, place)
    if isinstance(body, list) and isinstance(part, int) and part < len(body):
        within = body[part]
    elif isinstance(body, dict) and (part in body or (is_missing and not rest)):
        within = body.get(part)
    else:
        return skipping
    left_out, without_last, place = _in_body(tuple(rest), within, is_missing)
    return min((left_out, without_last, (str(part), *place)), skipping, key=lambda reading: reading[:2])


def _discriminator(fault: Any) -> str:
    """Return the field by which a union is told apart: its type, unless it is named."""
    name: str = fault["ctx"]["discriminator"]
    return name.strip("'") if name.startswith("'") else "type"


def from_exception(error: BaseException) -> ApiError:
    """Return the API's view of an exception that was raised while a request was answered."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return from_validation(error, None)
    if isinstance(error, UnservableRequestError):
        return invalid(reason(error))
    if isinstance(error, QueueFullError):
        return overloaded("replica_queue", retry_after(error))
    if isinstance(error, ClientDisconnect):
        return invalid("The client left before its request was read.")
    if isinstance(error, TimeoutError):
        return ApiError("timeout_error", "The request took longer than gateway.request_timeout_seconds.")
    if isinstance(error, RequestFailedError):
        return ApiError("api_error", f"The request could not be computed: {error}", final=True)
    if isinstance(error, ReplicaFailedError):
        return ApiError("api_error", f"The replica failed: {error}")
    return ApiError("api_error", f"Internal error: {type(error).__name__}")


def reason(error: BaseException) -> str:
    """Return the message of an error that may have been wrapped on its way through Ray."""
    return str(_unwrapped(error))


def retry_after(error: BaseException) -> float | None:
    """Return the seconds after which a full replica expects to have room; None if unknown."""
    seconds: float | None = getattr(_unwrapped(error), "retry_after", None)
    return seconds


def _unwrapped(error: BaseException) -> BaseException:
    """Return what was raised in a replica, where Ray has wrapped it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": error.type, "message": error.message}
    if error.details is not None:
        fields["details"] = error.details
    return {"type": "error", "error": fields, "request_id": request_id}


def openai_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Put the id, for which OpenAI's form has no place, inside `error`: its SDK passes that on in `body`."""
    fields = {"message": error.openai, "type": error.type, "param": error.param, "code": error.code}
    return {"error": {**fields, "request_id": request_id}}
