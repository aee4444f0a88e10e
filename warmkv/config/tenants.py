"""Tenants and operators: their keys, rights and limits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, Field, model_validator

from warmkv.config.base import Section

Right = Literal["policy", "replica", "ignore_eos"]
"""A field of a request's `warmkv` options that not every tenant may use."""

AUTOPILOT = "autopilot"  # who changes the live configuration where no operator does

EMPTY = hashlib.sha256(b"").hexdigest()


def _of_a_key(sha256: str) -> str:
    if sha256 == EMPTY:
        raise ValueError("it is the hash of an empty key, which everybody has: was the key that was hashed unset?")
    return sha256


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$"), AfterValidator(_of_a_key)]


def _of_characters(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is no character") from None
    return name


class KeyConfig(Section):
    sha256: Sha256 = Field(description="SHA-256 of the API key; `warmkv hash-key` prints it")
    expires: AwareDatetime | None = Field(None, description="when the key ends, with a time zone; null: never")


class KeyHolder(Section):
    """Who is known by an API key, or by several while one takes the place of another."""

    name: Annotated[str, AfterValidator(_of_characters)] = Field(description="name in limits, metrics and logs")
    key_sha256: Sha256 | None = Field(None, description="SHA-256 of the API key; `warmkv hash-key` prints it")
    keys: tuple[KeyConfig, ...] = Field((), description="further keys, each with a time at which it ends")

    @property
    def all_keys(self) -> tuple[KeyConfig, ...]:
        """Return every key of the holder."""
        return (*(() if self.key_sha256 is None else (KeyConfig(sha256=self.key_sha256),)), *self.keys)

    @model_validator(mode="after")
    def _check(self) -> KeyHolder:
        if not self.all_keys:
            raise ValueError(f"{self.name} has no key: set key_sha256, or keys")
        return self


class OperatorConfig(KeyHolder):
    """May change the live configuration and see the replicas' state, but asks for no answers: that is a tenant's."""


class LimitsConfig(Section):
    """What a tenant may ask for, in all gateways together; each of them grants its part."""

    requests_per_minute: int = Field(0, ge=0, description="0: no limit")
    tokens_per_minute: int = Field(
        0, ge=0, description="input that is not read from the cache, and output; 0: no limit"
    )
    concurrent_requests: int = Field(0, ge=0, description="0: no limit")
    queue_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of cluster.max_queued_requests that may wait for their first token; 1: no limit",
    )


class TenantLimits(Section):
    """What differs for one tenant."""

    requests_per_minute: int | None = Field(None, ge=0, description="as gateway.limits")
    tokens_per_minute: int | None = Field(None, ge=0, description="as gateway.limits")
    concurrent_requests: int | None = Field(None, ge=0, description="as gateway.limits")
    queue_share: float | None = Field(None, gt=0, le=1, description="as gateway.limits")


class TenantConfig(KeyHolder):
    operator: bool = Field(
        False,
        description="may change the live configuration and see the replicas' state, which shows all tenants' activity",
    )
    rights: tuple[Right, ...] | None = Field(None, description="as gateway.rights if absent")
    limits: TenantLimits = Field(TenantLimits(), description="those of gateway.limits that are absent here")


def check_key_holders(tenants: Sequence[TenantConfig], operators: Sequence[OperatorConfig]) -> None:
    """Raise ValueError if a key is that of two holders, one tenant is listed with different rights or limits, or the
    changes of an operator would look like the autopilot's.
    """
    holders: dict[str, tuple[str, str]] = {}
    for kind, listed in (("tenant", tenants), ("operator", operators)):
        for holder in listed:
            for key in holder.all_keys:
                first = holders.setdefault(key.sha256, (kind, holder.name))
                if first != (kind, holder.name):
                    raise ValueError(
                        f"the key {key.sha256[:8]}... is that of {' '.join(first)} and of {kind} {holder.name}"
                    )
    if AUTOPILOT in {one.name for one in (*operators, *(tenant for tenant in tenants if tenant.operator))}:
        raise ValueError(f"no operator may be named {AUTOPILOT}: versions of the live configuration tell who made them")
    terms: dict[str, TenantConfig] = {}
    for tenant in tenants:
        first_entry = terms.setdefault(tenant.name, tenant)
        if (first_entry.rights, first_entry.limits) != (tenant.rights, tenant.limits):
            raise ValueError(f"tenant {tenant.name} is listed twice, with different rights or limits")
