"""The routers of Ray Serve that ours is raced against: Serve chooses by them, with their defaults.

Requests begin in a replica in the order in which they came, as in vLLM without priorities. All else is ours.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve._private.request_router.common import PendingRequest
from ray.serve.config import RequestRouterConfig

from warmkv.platform.gateway.deployment import Gateway
from warmkv.platform.gateway.replies import Mailbox
from warmkv.platform.gateway.resume import Attempt
from warmkv.policies import batching
from warmkv.replicas.deployment import Replica


class FirstCome(Replica):
    """Serve as a replica that gives vLLM no priorities."""

    def __init__(self, *args: Any) -> None:
        batching.delay = lambda lacking, step_tokens: 0
        super().__init__(*args)


class AffinityRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Serve's prefix router, which looks for text in what is sent; a token is a character, which spares it work."""

    def _extract_text_from_request(self, pending_request: Any) -> str:
        return "".join(map(chr, pending_request.args[0].request.token_ids))


class ServeRouted(Gateway):
    """A gateway that has Serve choose, which holds a place in the replica until the request ends."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._choosing: dict[Mailbox, asyncio.Task[None]] = {}
        self._service._send = self._send_by_serve

    def _send_by_serve(self, attempt: Attempt) -> Mailbox:
        def closed(mailbox: Mailbox) -> None:
            self._sender._closed(mailbox)
            self._choosing.pop(mailbox).cancel()

        mailbox = self._replies.mailbox(closed, attempt.take)
        self._choosing[mailbox] = asyncio.ensure_future(self._choose(mailbox, attempt))
        return mailbox

    async def _choose(self, mailbox: Mailbox, attempt: Attempt) -> None:
        try:
            handle = self._handles[""]
            async with handle.choose_replica(attempt) as selection:
                self._sender._dispatch(mailbox, attempt, selection.replica_id)
                # What Serve tells its router where it sends the request itself: the prefix router learns by it.
                router = handle._router._asyncio_router._active_request_router
                sent = PendingRequest([attempt], {}, selection._request_metadata)
                await asyncio.to_thread(router.on_request_routed, sent, selection._replica.replica_id, None)
                await asyncio.Event().wait()  # until the mailbox is closed
        except Exception as error:
            mailbox.fail(error)


def parts(name: str) -> dict[str, Any]:
    """Return what a contestant has in place of the application's own parts."""
    if name == "prefix_cost":
        return {}
    if name == "affinity":
        router = RequestRouterConfig(request_router_class=AffinityRouter)
    else:  # power of two choices
        router = RequestRouterConfig()
    return {"replica": FirstCome, "gateway": ServeRouted, "router": router}
