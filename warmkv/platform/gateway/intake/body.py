"""From a body on the wire to what is made of it: read within limits, parsed and tokenized beside the event loop.

Parsing, rendering and tokenizing run in threads. Tokenizers release the GIL while they encode; what holds it, such as
parsing JSON, is short because limits bound it (body_limits.py). Large bodies have a thread of their own, so that small
ones do not wait behind them. No tenant's bodies take all the bytes or all the turns that there are for all.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from fastapi import Request
from starlette.requests import ClientDisconnect

from warmkv.config import GatewayConfig
from warmkv.platform.gateway.apis.errors import ApiError
from warmkv.platform.gateway.intake.overload import Backlog
from warmkv.platform.tenants import Caller

THREADS = 2  # that parse and tokenize; large bodies have one more of their own
LARGE_BYTES = 1 << 20  # from this size on a body is large
LARGEST_BODIES = 8  # of gateway.max_body_bytes, which may be held at a time: the room of one is for small bodies alone
READ_SECONDS, PARSE_SECONDS = 120.0, 60.0  # for a body to come, and to be parsed and tokenized, waiting included

T = TypeVar("T")
Work = Callable[[bytes, Any], T]  # of a body and a tokenizer that no other thread uses


class LackingError(Exception):
    """Tell that work lacks something: it is done again once `fetch` has brought it. No thread waits meanwhile."""

    def __init__(self, fetch: Callable[[], Coroutine[Any, Any, None]]) -> None:
        super().__init__()
        self.fetch = fetch


class Intake:
    """Takes the bodies of a gateway's requests, of which `waiting` may wait for a thread. `clock` gives seconds."""

    def __init__(self, config: GatewayConfig, waiting: int, tokenizer: Any, clock: Callable[[], float]) -> None:
        self._config = config
        self._budget = Budget(LARGEST_BODIES * config.max_body_bytes, config.max_body_bytes)
        self._small = Lane("small", THREADS, waiting, tokenizer, clock)
        self._large = Lane("large", 1, waiting, tokenizer, clock)

    async def take(self, request: Request, work: Work[T]) -> T:
        """Read the body of a request and return what `work` makes of it in a thread.

        Raises ApiError: 408, 413, 504, 529, and what `work` raises; ClientDisconnect if the client leaves, and work
        that has not begun is dropped.
        """
        caller: Caller = request.state.caller
        owner = caller.name.encode() if caller.tenant is None else caller.tenant.salt
        with self._budget.share(owner) as share:
            try:
                async with asyncio.timeout(READ_SECONDS):
                    body = await self._read(request, share, self._config.max_body_bytes)
            except TimeoutError:
                message = f"The body did not come within {READ_SECONDS:g} s."
                raise ApiError("timeout_error", message, status=408) from None
            lane = self._large if len(body) >= LARGE_BYTES else self._small
            seconds = min(PARSE_SECONDS, self._config.request_timeout_seconds)
            try:
                return await until_disconnect(request, lane.run(owner, partial(work, body), seconds))
            except LackingError as lacking:
                await until_disconnect(request, lacking.fetch())
            return await until_disconnect(request, lane.run(owner, partial(work, body), seconds))

    async def _read(self, request: Request, share: Share, limit: int) -> bytes:
        too_large = f"The request body exceeds {limit} bytes (gateway.max_body_bytes)."
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and len(announced) < 20 and int(announced) > limit:
            raise ApiError("request_too_large", too_large)
        body = bytearray()
        async for chunk in request.stream():
            if len(body) + len(chunk) > limit:
                raise ApiError("request_too_large", too_large)
            if not share.grow(len(chunk)):
                raise ApiError(
                    "overloaded_error",
                    f"The bodies that are read now exceed {self._budget.total} bytes, "
                    f"{LARGEST_BODIES} times gateway.max_body_bytes, or those of this key half of that.",
                    reason="body_bytes",
                    retry_after=max(self._small.backlog.retry_after(), self._large.backlog.retry_after()),
                )
            body += chunk
        return bytes(body)

    def close(self) -> None:
        self._small.close()
        self._large.close()


class Budget:
    """Bound the bytes that are held at a time: one owner has half at most, large bodies leave the `reserve`."""

    def __init__(self, total: int, reserve: int) -> None:
        self.total, self.reserve = total, reserve
        self.used_by = Counter[bytes]()

    @property
    def used(self) -> int:
        return self.used_by.total()

    @contextmanager
    def share(self, owner: bytes) -> Iterator[Share]:
        """Yield a share that grows, and give it back at the end."""
        share = Share(self, owner)
        try:
            yield share
        finally:
            self.used_by[owner] -= share.held
            if not self.used_by[owner]:
                del self.used_by[owner]


class Share:
    """What one request holds of a budget."""

    def __init__(self, budget: Budget, owner: bytes) -> None:
        self._budget, self._owner, self.held = budget, owner, 0

    def grow(self, size: int) -> bool:
        """Take more. False if the budget does not allow it."""
        budget, held = self._budget, self.held + size
        most = budget.total - (budget.reserve if held >= LARGE_BYTES else 0)
        if budget.used + size > most or budget.used_by[self._owner] + size > budget.total // 2:
            return False
        budget.used_by[self._owner] += size
        self.held = held
        return True


class Lane:
    """Run jobs in threads, each with a tokenizer.

    An owner has as many jobs before the threads at a time as there are, and its others wait for these: those of other
    owners wait behind no more. A job that nobody waits for any more counts until its thread is done with it.
    """

    def __init__(self, name: str, threads: int, waiting: int, tokenizer: Any, clock: Callable[[], float]) -> None:
        self._threads, self._limit = threads, waiting
        copies = [copy.deepcopy(tokenizer) for _ in range(threads)]  # they hold state while they encode
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(
            threads,
            thread_name_prefix=f"intake-{name}",
            initializer=lambda: setattr(self._own, "tokenizer", copies.pop()),
        )
        self._turns = WeakValueDictionary[bytes, asyncio.Semaphore]()  # of owners that have jobs
        self.backlog = Backlog(clock)

    async def run(self, owner: bytes, work: Callable[[Any], T], seconds: float) -> T:
        """Return what `work` makes of a tokenizer. Raises ApiError: 529 if too many wait, 504 if it takes too long."""
        if self.backlog.waiting >= self._limit + self._threads:
            raise ApiError(
                "overloaded_error",
                f"More than {self._limit} requests wait to be parsed (cluster.max_queued_requests).",
                reason="parse_queue",
                retry_after=self.backlog.retry_after(),
            )
        held = [work]  # emptied when nobody waits any more: the pool keeps a cancelled job until its turn
        self.backlog.joined()
        turns = self._turns.setdefault(owner, asyncio.Semaphore(self._threads))
        future: Future[T] | None = None
        served = False
        try:
            async with asyncio.timeout(seconds):
                await turns.acquire()
                future = self._pool.submit(lambda: held.pop()(self._own.tokenizer))
                result: T = await asyncio.wrap_future(future)
            served = True
            return result
        except TimeoutError:
            kind: Any = "overloaded_error" if future is None or future.cancelled() else "timeout_error"
            raise ApiError(
                kind,
                f"Parsing and tokenizing took longer than {seconds:g} s, waiting included.",
                reason="parse_seconds",
                retry_after=self.backlog.retry_after(),
            ) from None
        finally:
            held.clear()
            self.backlog.left(served=served)
            if future is not None and future.done():
                turns.release()
            elif future is not None:  # which nobody waits for, and a thread works at
                future.add_done_callback(partial(_release, turns, asyncio.get_running_loop()))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _release(turns: asyncio.Semaphore, loop: asyncio.AbstractEventLoop, _: Future[Any]) -> None:
    """Give a turn back, from whichever thread its job ended in."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(turns.release)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which is cancelled when the client leaves. Raises ClientDisconnect then.

    The request's body must have been read.
    """

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
