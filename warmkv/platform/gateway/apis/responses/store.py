"""Responses that a later request may go on from, or read: bounded for each tenant, and gone after a while."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

TTL_SECONDS = 3600.0  # from the last use of a response
TENANT_BYTES = 16 << 20  # of JSON
MOST_TENANTS = 32  # that have any; over it, those of the one that stored longest ago go

Item = dict[str, Any]  # of a conversation: a message, a call, or its output


@dataclass(slots=True)
class StoredResponse:
    """Hold a response, the items that its request added, and the name of the response before it.

    Both are kept as JSON: as objects they take about five times the memory.
    """

    name: str
    response: bytes
    asked: bytes
    previous: str | None
    used: float = 0.0

    @property
    def size(self) -> int:
        """Return the bytes of it that count."""
        return len(self.response) + len(self.asked)

    @property
    def items(self) -> list[Item]:
        """Parse the items that its request added, and those that it wrote."""
        return [*json.loads(self.asked), *json.loads(self.response)["output"]]


class OtherGateways(Protocol):
    """Where responses are that this gateway does not have."""

    async def responses(self, tenant: bytes, name: str) -> Sequence[list[StoredResponse]]:
        """Return what every gateway has of a response and those before it (`ResponseStore.chain`)."""
        ...

    async def delete_response(self, tenant: bytes, name: str) -> bool:
        """Have the other gateways forget a response. Return False where none had it."""
        ...


class ResponseStore:
    """The responses of one gateway, of every tenant those that were used last. Threads may share it.

    `clock` gives seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._tenants: OrderedDict[bytes, OrderedDict[str, StoredResponse]] = OrderedDict()

    def keep(self, tenant: bytes, stored: StoredResponse) -> None:
        """Keep a response. One that is larger than all may be is not kept."""
        stored.used = self._clock()
        if stored.size > TENANT_BYTES:
            return
        with self._lock:
            for known in list(self._tenants):
                self._expire(known)
            kept = self._tenants.setdefault(tenant, OrderedDict())
            self._tenants.move_to_end(tenant)
            kept[stored.name] = stored
            total = sum(one.size for one in kept.values())
            while total > TENANT_BYTES:
                total -= kept.popitem(last=False)[1].size
            while len(self._tenants) > MOST_TENANTS:
                self._tenants.popitem(last=False)

    def get(self, tenant: bytes, name: str) -> StoredResponse | None:
        """Return a response, or None if there is none any more."""
        with self._lock:
            return self._used(tenant, name)

    def chain(self, tenant: bytes, name: str) -> list[StoredResponse]:
        """Return a response and those that it goes on from, the oldest first; none of them if any are gone."""
        found: list[StoredResponse] = []
        at: str | None = name
        with self._lock:
            while at is not None:
                if (stored := self._used(tenant, at)) is None:
                    return []
                found.append(stored)
                at = stored.previous
        return found[::-1]

    def history(self, tenant: bytes, name: str) -> list[Item] | None:
        """Parse all items up to a response, the oldest first; None if any are gone."""
        return [item for stored in self.chain(tenant, name) for item in stored.items] or None

    def delete(self, tenant: bytes, name: str) -> bool:
        """Forget a response. Return False if there is none."""
        with self._lock:
            return self._tenants.get(tenant, OrderedDict()).pop(name, None) is not None

    def _used(self, tenant: bytes, name: str) -> StoredResponse | None:
        """Return a response and note its use: what others go on from is used after them, and stays longer."""
        self._expire(tenant)
        kept = self._tenants.get(tenant, OrderedDict())
        if (stored := kept.get(name)) is not None:
            stored.used = self._clock()
            kept.move_to_end(name)
        return stored

    def _expire(self, tenant: bytes) -> None:
        """Forget what a tenant has not used for too long, and a tenant without responses."""
        kept, until = self._tenants.get(tenant, OrderedDict()), self._clock() - TTL_SECONDS
        while kept and next(iter(kept.values())).used < until:
            kept.popitem(last=False)
        if not kept:
            self._tenants.pop(tenant, None)
