"""The replicas that run, of all groups, as Serve says; each is asked to connect to this gateway."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from ray.serve._private.long_poll import LongPollClient, LongPollNamespace
from ray.serve.context import _get_global_client

from warmkv.platform.gateway.sending import Sender
from warmkv.replicas.protocol import GatewayAddress

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds until replicas that have not connected are asked again


class Members:
    """Follows Serve's controller, as Serve's own routers do. `replicas` are handles to their deployments, by group."""

    def __init__(self, replicas: Mapping[str, Any], address: GatewayAddress, sender: Sender, client_id: str) -> None:
        client = _get_global_client()
        assert client is not None
        self._replicas, self._address, self._sender = replicas, address, sender
        self._running: dict[str, tuple[str, ...]] = {}  # by group
        self._changed = asyncio.Event()
        self._polling = LongPollClient(
            client._controller,
            {
                (LongPollNamespace.DEPLOYMENT_TARGETS, handle.deployment_id): partial(self._follow, group)
                for group, handle in replicas.items()
            },
            asyncio.get_running_loop(),
            client_id,
        )

    def _follow(self, group: str, targets: Any) -> None:
        self._running[group] = tuple(replica.replica_id.unique_id for replica in targets.running_replicas)
        self._sender.follow({name: group for group, names in self._running.items() for name in names})
        self._changed.set()

    async def ask(self) -> None:
        """Ask replicas to connect while any has not, or has lost its connection."""
        pause = FIRST_PAUSE
        while True:
            if self._sender.missing:
                asked = [
                    handle.broadcast("attend", self._address).results_async(timeout_s=LONGEST_PAUSE)
                    for handle in self._replicas.values()
                ]
                for error in await asyncio.gather(*asked, return_exceptions=True):
                    if isinstance(error, Exception):  # some may have connected
                        log.info("not all replicas can be asked to connect: %s: %s", type(error).__name__, error)
            pause = min(2 * pause, LONGEST_PAUSE)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()
                    self._changed.clear()
                    pause = FIRST_PAUSE

    def close(self) -> None:
        """Follow no more."""
        self._polling.stop()
