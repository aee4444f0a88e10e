"""What all sections of the configuration share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, PositiveInt, TypeAdapter, ValidationError, WrapValidator

from warmkv.faults import UserError


class ConfigError(UserError):
    """A configuration that cannot be used; the message says where and what to do."""


class Section(BaseModel):
    """Base of all sections: immutable, and strict about names."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


_BYTES, _COUNT = TypeAdapter(ByteSize), TypeAdapter(PositiveInt)


def _auto_or_bytes(value: Any, _: Any) -> ByteSize | Literal["auto"]:
    """Read `auto` or a size, with one error for both."""
    if value == "auto":
        return "auto"
    try:
        return _BYTES.validate_python(value)
    except ValidationError:
        raise ValueError(f"write auto, or bytes as in 40GiB, 512MiB or 1000000; got {value!r}") from None


AutoBytes = Annotated[ByteSize | Literal["auto"], WrapValidator(_auto_or_bytes)]
"""A limit in bytes, or `auto`: a memory plan gives it its share of what the device has."""


def _auto_or_count(value: Any, _: Any) -> int | Literal["auto"]:
    """Read `auto` or a number, with one error for both."""
    if value == "auto":
        return "auto"
    try:
        return _COUNT.validate_python(value)
    except ValidationError:
        raise ValueError(f"write auto, or a whole number from 1 on; got {value!r}") from None


AutoTokens = Annotated[int | Literal["auto"], WrapValidator(_auto_or_count)]
"""A number of tokens, or `auto`: the device decides."""


Share = Annotated[float, Field(gt=0, le=1)]


def planned(value: ByteSize | Literal["auto"], name: str) -> int:
    """Return a size that a memory plan has resolved. Raises RuntimeError while it is auto."""
    if value == "auto":
        raise RuntimeError(f"{name} is auto: a memory plan must resolve it first")
    return int(value)
