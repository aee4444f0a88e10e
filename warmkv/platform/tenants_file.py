"""Tenants and operators in a file that is read again whenever it changes: added, rotated, revoked without a restart."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from warmkv.config import (
    Config,
    ConfigError,
    GatewayConfig,
    OperatorConfig,
    Section,
    TenantConfig,
    describe,
    strict_yaml,
)
from warmkv.platform.tenants import Keyring, Tenant, make_keyring, make_tenant, open_tenant, roots_of
from warmkv.prefixes.roots import Roots

log = logging.getLogger("ray.serve")

LOOK_SECONDS = 5.0  # between two looks whether the file has changed

Outcome = Literal["taken", "refused"]


class TenantsDocument(Section):
    """What a tenants file holds. `tenants` must be there: a file that was cut short is no list of nobody."""

    tenants: tuple[TenantConfig, ...]
    operators: tuple[OperatorConfig, ...] = ()


def parse_tenants(data: bytes) -> TenantsDocument:
    """Parse a tenants file as a whole, YAML or JSON. Raises ConfigError with the place of every fault."""
    try:
        document = _read(data.decode())
    except UnicodeDecodeError:
        raise ConfigError("it is not UTF-8 text") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that is none; a list in too many others
        raise ConfigError(f"it is not YAML: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"expected a mapping with `tenants`, got {type(document).__name__}")
    try:
        return TenantsDocument.model_validate(document)
    except ValidationError as error:
        raise ConfigError("\n".join(describe(error, TenantsDocument))) from None


def _read(text: str) -> Any:
    """Parse a document. Not all JSON is YAML to PyYAML: it takes no tabs, and surrogate pairs are two characters."""
    try:
        return json.loads(text, object_pairs_hook=_mapping)
    except json.JSONDecodeError:
        return strict_yaml.load(text)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ConfigError where a key is there twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{key!r} is there twice in one object")
        found[key] = value
    return found


class Tenants:
    """Who may call: the configured holders of keys and, with `gateway.tenants_file`, those in the file as it is now.

    `keyring` is replaced as a whole. A file that cannot be taken leaves the one before in force. `told` hears of every
    file that was read anew. Raises ConfigError where the file cannot be taken at the start.
    """

    def __init__(self, gateway: GatewayConfig, secret: bytes, told: Callable[[Outcome], None]) -> None:
        self._gateway, self._secret, self._told = gateway, secret, told
        self._digest: str | None = None  # of the file that was read last, taken or not
        self._document = TenantsDocument(tenants=())
        self._fault = ""
        self._taken_at: datetime | None = None
        self.keyring: Keyring = make_keyring(gateway, secret)
        self.reload()
        if self._fault:
            raise ConfigError(self._fault)

    def reload(self) -> None:
        """Take the file if it is not the one that was read last."""
        path = self._gateway.tenants_file
        if path is None:
            return
        try:
            data = path.read_bytes()
        except OSError as error:
            self._refuse("", path, f"it cannot be read: {error.strerror}")
            return
        digest = hashlib.sha256(data).hexdigest()
        if digest == self._digest:
            return
        try:
            document = parse_tenants(data)
            keyring = make_keyring(self._gateway, self._secret, document.tenants, document.operators)
        except Exception as error:  # ConfigError or not: whoever stopped following would never hear of a revoked key
            self._refuse(digest, path, str(error))
            return
        self._digest, self._document, self.keyring = digest, document, keyring
        self._fault, self._taken_at = "", datetime.now(UTC)
        self._told("taken")

    def _refuse(self, digest: str, path: Path, why: str) -> None:
        if digest == self._digest:  # told already
            return
        self._digest, self._fault = digest, f"{path} (gateway.tenants_file): {why}"
        log.error("%s", f"{self._fault}; the tenants that were read before stay in force")
        self._told("refused")

    async def follow(self) -> None:
        """Look for changes of the file every LOOK_SECONDS, until cancelled."""
        while self._gateway.tenants_file is not None:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self.reload)

    def status(self) -> dict[str, Any]:
        """Return who may call: names, rights, limits and when keys end; of a key the head of its hash."""
        tenants = (*self._gateway.tenants, *self._document.tenants)
        operators = (*self._gateway.operators, *self._document.operators)
        path, taken = self._gateway.tenants_file, self._taken_at
        return {
            "open": self._gateway.is_open,
            "tenants": [
                {**_shown(tenant), "operator": tenant.operator, "rights": sorted(known.rights)}
                | {"label": known.label, "limits": known.limits.model_dump()}
                for tenant in tenants
                for known in [make_tenant(tenant, self._gateway, self._secret)]
            ],
            "operators": [_shown(operator) for operator in operators],
            "file": None
            if path is None
            else {"path": str(path), "taken": taken and taken.isoformat(), "fault": self._fault or None},
        }


def _shown(holder: TenantConfig | OperatorConfig) -> dict[str, Any]:
    keys = [
        {"sha256": f"{key.sha256[:8]}...", "expires": key.expires and key.expires.isoformat()}
        for key in holder.all_keys
    ]
    return {"name": holder.name, "keys": keys}


def find_tenant(name: str, config: Config, secret: bytes) -> Tenant:
    """Return the tenant of that name; where none are configured, the one whose API key `name` is.

    Raises LookupError, or ConfigError where the tenants file cannot be read.
    """
    gateway = config.gateway
    if gateway.is_open:
        return open_tenant(name, gateway, secret)
    tenants = _configured(gateway)
    for tenant in tenants:
        if tenant.name == name:
            return make_tenant(tenant, gateway, secret)
    raise LookupError(f"no tenant is called {name!r}; gateway.tenants has {', '.join(one.name for one in tenants)}")


def roots_in_force(config: Config, secret: bytes) -> Roots:
    """Return the roots under which the configured tenants ask.

    Raises ConfigError where the tenants file cannot be read.
    """
    gateway = config.gateway
    names = None if gateway.is_open else [tenant.name for tenant in _configured(gateway)]
    return roots_of(config, secret, names)


def _configured(gateway: GatewayConfig) -> tuple[TenantConfig, ...]:
    """Return the tenants of the settings and of the tenants file."""
    path = gateway.tenants_file
    if path is None:
        return gateway.tenants
    try:
        return (*gateway.tenants, *parse_tenants(path.read_bytes()).tenants)
    except OSError as error:
        raise ConfigError(f"{path} (gateway.tenants_file): it cannot be read: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{path} (gateway.tenants_file): {error}") from None
