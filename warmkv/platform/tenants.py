"""Who is asking: API key to tenant, and the tenant's salt that keeps its prefixes apart from all others."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from warmkv.config import Config, TenantConfig
from warmkv.platform.gateway.errors import ApiError
from warmkv.prefixes import hashing


@dataclass(frozen=True, slots=True)
class Tenant:
    """`salt` never leaves the server; `label` is what logs may show."""

    name: str
    salt: bytes
    operator: bool  # may see what all tenants do together

    @property
    def label(self) -> str:
        return hashlib.sha256(self.salt).hexdigest()[:16]


def chain_root(salt: bytes, config: Config) -> bytes:
    """Where the block hashes of a tenant begin, under a configuration."""
    model, size = config.model, config.prefix_cache.block_size
    return hashing.chain_root(salt, model.path, model.revision or "", model.dtype, str(size))


def find(name: str, config: Config, secret: bytes) -> Tenant:
    """The tenant of that name; where none are configured, the one whose API key `name` is. Raises LookupError."""
    if not config.gateway.tenants:
        return authenticate({"x-api-key": name}, (), secret)
    for tenant in config.gateway.tenants:
        if tenant.name == name:
            return Tenant(name, hashing.tenant_salt(secret, f"tenant:{name}"), tenant.operator)
    known = ", ".join(tenant.name for tenant in config.gateway.tenants)
    raise LookupError(f"no tenant is called {name!r}; gateway.tenants has {known}")


def hash_key(key: str) -> str:
    """What the configuration stores of an API key."""
    return hashlib.sha256(key.encode()).hexdigest()


def authenticate(headers: Mapping[str, str], tenants: tuple[TenantConfig, ...], secret: bytes) -> Tenant:
    """The tenant of a request, by `x-api-key` or a bearer token. Raises ApiError (401).

    Without configured tenants every key is a tenant of its own and an operator, and requests without a key share one.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")
    hashed = hash_key(key)
    if not tenants:
        return Tenant("open", hashing.tenant_salt(secret, f"key:{hashed}"), operator=True)
    for tenant in tenants:
        if hmac.compare_digest(tenant.key_sha256, hashed):
            return Tenant(tenant.name, hashing.tenant_salt(secret, f"tenant:{tenant.name}"), tenant.operator)
    raise ApiError("authentication_error", "invalid x-api-key" if key else "x-api-key header is required")
