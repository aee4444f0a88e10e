"""Who is asking: API key to caller, and the tenant's salt that keeps its prefixes apart from all others."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import get_args

from warmkv.config import (
    Config,
    GatewayConfig,
    LimitsConfig,
    OperatorConfig,
    Right,
    TenantConfig,
    check_key_holders,
)
from warmkv.platform.gateway.apis.errors import ApiError
from warmkv.prefixes import hashing
from warmkv.prefixes.roots import Roots

SALT_ENV = "WARMKV_SALT"  # variable with the secret that salts the hashes of prefixes
ALL_RIGHTS: frozenset[Right] = frozenset(get_args(Right))


@dataclass(frozen=True, slots=True)
class Tenant:
    """`salt` never leaves the server; `label` is what logs may show."""

    name: str
    salt: bytes
    rights: frozenset[Right]
    limits: LimitsConfig

    @property
    def label(self) -> str:
        return hashlib.sha256(self.salt).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of an API key: a tenant, an operator, or both."""

    name: str
    tenant: Tenant | None
    operator: bool


@dataclass(frozen=True, slots=True)
class Keyring:
    """Callers by the SHA-256 of their key, with the time at which it ends.

    Looking up a hash takes a time that tells nothing of the keys: nobody can choose what their guess hashes to.
    """

    callers: Mapping[str, tuple[Caller, datetime | None]]
    open: GatewayConfig | None  # where no tenants are configured: any other key is a tenant of its own


def secret_of_environment() -> bytes:
    """Return the secret that salts hashes; empty where it is not set."""
    return os.environ.get(SALT_ENV, "").encode()


def warn_of_salt(config: Config) -> str:
    """Return a warning where blocks on disk would not be found after a restart; empty if all is well."""
    kept = any(group.prefix_cache.enabled and group.prefix_cache.disk.path for group in config.groups().values())
    if not kept or secret_of_environment():
        return ""
    return (
        f"{SALT_ENV} is not set, so hashes are salted anew at every start: no block of the disk tier "
        "(prefix_cache.disk.path) is found after a restart"
    )


def chain_root(salt: bytes, config: Config) -> bytes:
    """Return the root of a tenant's block hashes under a configuration.

    It covers the model's name, not its path, so that a folder may lie elsewhere on another machine. Other weights of
    the same name are told apart by the fingerprint in `block_store.Identity`, which packs, files and transfers carry.
    """
    model, size = config.model, config.prefix_cache.block_size
    return hashing.chain_root(salt, model.name, model.revision or "", model.dtype, str(size))


def roots_of(config: Config, secret: bytes, tenants: Sequence[str] | None) -> Roots:
    """Return what `chain_root` is derived from for tenants of these names; None: for API keys."""
    salt = hashing.tenant_salt(secret, "roots").hex() if secret else ""
    model, names = config.model, None if tenants is None else tuple(tenants)
    return Roots(salt, model.name, model.revision or "", model.dtype, names)


def make_keyring(
    gateway: GatewayConfig,
    secret: bytes,
    more_tenants: Sequence[TenantConfig] = (),
    more_operators: Sequence[OperatorConfig] = (),
) -> Keyring:
    """Return the keyring of the configured tenants and operators, and of more from elsewhere.

    Raises ValueError where they do not fit together.
    """
    tenants, operators = (*gateway.tenants, *more_tenants), (*gateway.operators, *more_operators)
    check_key_holders(tenants, operators)
    callers: dict[str, tuple[Caller, datetime | None]] = {}
    for operator in operators:
        caller = Caller(operator.name, None, operator=True)
        callers |= {key.sha256: (caller, key.expires) for key in operator.all_keys}
    for tenant in tenants:
        caller = Caller(tenant.name, make_tenant(tenant, gateway, secret), tenant.operator)
        callers |= {key.sha256: (caller, key.expires) for key in tenant.all_keys}
    return Keyring(callers, gateway if gateway.is_open else None)


def make_tenant(tenant: TenantConfig, gateway: GatewayConfig, secret: bytes) -> Tenant:
    """Return a configured tenant, what it leaves out taken from the settings of all tenants."""
    rights = (gateway.rights or ()) if tenant.rights is None else tenant.rights
    limits = gateway.limits.model_copy(update=tenant.limits.model_dump(exclude_none=True))
    return Tenant(tenant.name, hashing.tenant_salt(secret, f"tenant:{tenant.name}"), frozenset(rights), limits)


def open_tenant(key: str, gateway: GatewayConfig, secret: bytes) -> Tenant:
    """Return the tenant that a key is where no tenants are configured; no key is a tenant, too."""
    rights = ALL_RIGHTS if gateway.rights is None else frozenset(gateway.rights)
    return Tenant("open", hashing.tenant_salt(secret, f"key:{hash_key(key)}"), rights, gateway.limits)


def hash_key(key: str) -> str:
    """Return the SHA-256 of an API key, which is what the configuration stores."""
    return hashlib.sha256(key.encode()).hexdigest()


def authenticate(headers: Mapping[str, str], keyring: Keyring, secret: bytes, now: datetime) -> Caller:
    """Return the caller of a request, by `x-api-key` or a bearer token. Raises ApiError (401).

    Open callers are never operators.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    key = headers.get("x-api-key") or bearer
    if key and (found := keyring.callers.get(hash_key(key))):
        caller, expires = found
        if expires is not None and expires <= now:
            ended = f"this API key expired at {expires.astimezone(UTC).isoformat()}"
            raise ApiError("authentication_error", ended, code="invalid_api_key")
        return caller
    if keyring.open is not None:
        return Caller("open", open_tenant(key, keyring.open, secret), operator=False)
    if not key:
        needed = "You didn't provide an API key: send it as a bearer token (Authorization: Bearer YOUR_KEY)."
        raise ApiError("authentication_error", "x-api-key header is required", openai=needed)
    wrong = "invalid x-api-key" if headers.get("x-api-key") else "invalid bearer token"
    raise ApiError("authentication_error", wrong, code="invalid_api_key", openai="Incorrect API key provided.")
