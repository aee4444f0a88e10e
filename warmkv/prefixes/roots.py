"""Inputs of chain roots, without the secrets: blocks are found only under the roots they were stored with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Roots:
    """Describe what the chain roots of some tenants are derived from, beside the block size."""

    salt: str  # fingerprint of the secret; empty without one
    model: str  # name in the APIs
    revision: str
    dtype: str
    tenants: tuple[str, ...] | None  # names, none where they are not known; None: tenants are API keys

    def document(self) -> dict[str, Any]:
        return asdict(self)

    def mismatch(self, document: Mapping[str, Any]) -> str:
        """Return why requests with these roots find no block stored under those of `document`; empty if some may."""
        if not self.salt:
            return "WARMKV_SALT is not set here; set the secret that it was built with"
        if document["salt"] != self.salt:
            return "it was built with another WARMKV_SALT"
        for name, setting in (
            ("model", "the name of the model (model.served_name; else the last part of model.path)"),
            ("revision", "model.revision"),
            ("dtype", "model.dtype"),
        ):
            if document.get(name) != getattr(self, name):
                return f"{setting} was {document.get(name)!r} when it was built, here it is {getattr(self, name)!r}"
        return self._other_tenants(document["tenants"])

    def _other_tenants(self, built_for: Any) -> str:
        if built_for is None:
            if self.tenants is None:
                return ""
            return "it was built for API keys, and tenants are configured here; build it for their names"
        names = ", ".join(built_for)
        if self.tenants is None:
            return f"it was built for {names}, and no tenants are configured here (gateway.tenants, tenants_file)"
        if self.tenants and not set(built_for) & set(self.tenants):
            return f"it was built for {names}, and the tenants here are {', '.join(self.tenants)}"
        return ""
