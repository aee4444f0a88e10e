"""Connections of replicas: one of each, and a mailbox for the events of every attempt at a request."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import cast

import orjson

from warmkv.platform.gateway.apis.errors import ApiError, ReplicaFailedError, stopping
from warmkv.replicas.frames import LONGEST_LINE, Lines, decode, encode_order
from warmkv.replicas.links import notice_when_gone
from warmkv.replicas.protocol import (
    Admitted,
    Delta,
    Event,
    Failed,
    Finished,
    GatewayAddress,
    GenerateRequest,
    QueueFullError,
    Refused,
    UnservableRequestError,
)

log = logging.getLogger(__name__)

MOST_UNREAD = 1 << 20  # characters of an answer that wait for its client
LOGPROB_CHARACTERS = 32  # that take as much memory as a token and its log-probability
LONGEST_HELLO = 1024  # bytes
HELLO_SECONDS = 10.0


class Mailbox:
    """The events of one attempt, in order; `close` is called once, when nobody takes any more or wants any more.

    Text before which nothing waits is offered to `take` first, and lies here only if that returns False.
    """

    def __init__(
        self, stream: int, close: Callable[[Mailbox], None], take: Callable[[Delta], bool] = lambda delta: False
    ) -> None:
        self.stream, self._take = stream, take
        self._close: Callable[[Mailbox], None] | None = close
        self._events: deque[Event] = deque()
        self._unread = 0  # characters
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False  # whether the last event has come
        self.source: Connection | None = None  # of the replica that it was sent to

    def put(self, event: Event) -> None:
        """Add an event. An answer whose client reads too slowly is given up here, and holds nobody else."""
        if self._close is None:
            return
        if isinstance(event, Delta):
            if not self._events and self._taken(event):
                return
            self._unread += _characters(event) if event.logprobs else len(event.text)  # called for every message
            if self._unread > MOST_UNREAD:
                self._events.clear()
                self.fail(ApiError("timeout_error", "The client did not read its answer."))
                return
        elif isinstance(event, Refused):
            full = QueueFullError(event.message, event.waiting, event.retry_after)
            self.fail(full if event.reason == "full" else UnservableRequestError(event.message), ended=True)
            return
        elif isinstance(event, Finished | Failed):
            self.ended = True
        self._events.append(event)
        self._wake()

    def _taken(self, delta: Delta) -> bool:
        try:
            return self._take(delta)
        except Exception as error:  # of this answer; those that came with it must be heard
            self.fail(error)
            return True

    def fail(self, error: Exception, *, ended: bool = False) -> None:
        """Raise an error behind what has come; nothing comes any more. `ended` says that this is the replica's word."""
        if self._error is None and not self.ended:
            self._error, self.ended = error, ended
            self._wake()
            self._end()

    async def __anext__(self) -> Event:
        """Return the next event: of text, all that has come. Raises what the attempt failed with."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        event = self._events.popleft()
        if not isinstance(event, Delta):
            return event
        self._unread -= _characters(event)
        if not (self._events and isinstance(self._events[0], Delta)):
            return event
        deltas = [event]
        while self._events and isinstance(more := self._events[0], Delta):
            self._events.popleft()
            self._unread -= _characters(more)
            deltas.append(more)
        text = "".join(delta.text for delta in deltas)
        tokens = tuple(token for delta in deltas for token in delta.tokens)
        logprobs = tuple(one for delta in deltas for one in delta.logprobs)
        return Delta(text, deltas[-1].output_tokens, tokens, logprobs)

    async def aclose(self) -> None:
        """Take no more."""
        self._events.clear()
        self._end()

    def _end(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            close(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _characters(delta: Delta) -> int:
    """Return the size of text that waits, with its log-probabilities."""
    logprobs = sum(1 + len(one.top) for one in delta.logprobs) if delta.logprobs else 0
    return len(delta.text) + LOGPROB_CHARACTERS * logprobs


class Watch:
    """Is told of replicas that connect, and of what they say that is not for the mailboxes."""

    def connected(self, connection: Connection) -> None: ...

    def lost(self, connection: Connection) -> None: ...

    def admitted(self, connection: Connection, ongoing: int) -> None:
        """Hear how many requests a replica has, one that was just taken included."""

    def busy(self, mailbox: Mailbox) -> None:
        """Hear that a replica has no room for a request."""
        mailbox.fail(QueueFullError("the replica is busy"))

    def ended(self, stream: int) -> None:
        """Hear of the end of a request whose mailbox is closed."""


class Replies:
    """The mailboxes of a gateway, by number, and the address at which replicas find it."""

    def __init__(self, host: str) -> None:
        self._socket = _listening(host)
        self.address = GatewayAddress(host, self._socket.getsockname()[1], secrets.token_hex(32))
        self.watch = Watch()
        self._numbers = itertools.count()
        self._server: asyncio.Server | None = None
        self.open: dict[int, Mailbox] = {}
        self.stopped = False  # whether nothing more is to be answered
        self.messages = 0  # so far

    async def listen(self, tls: ssl.SSLContext | None = None) -> None:
        """Take connections from now on."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), sock=self._socket, ssl=tls)

    def mailbox(self, close: Callable[[Mailbox], None], take: Callable[[Delta], bool] = lambda delta: False) -> Mailbox:
        """Return a new mailbox."""

        def closed(mailbox: Mailbox) -> None:
            self.open.pop(mailbox.stream, None)
            close(mailbox)

        stream = next(self._numbers)
        self.open[stream] = mailbox = Mailbox(stream, closed, take)
        return mailbox

    def stop(self) -> None:
        """End all answers that go on with an error that their clients are told; none begins any more."""
        self.stopped = True
        for mailbox in tuple(self.open.values()):
            mailbox.fail(stopping())

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._socket.close()


class Connection(asyncio.Protocol):
    """One replica's connection. Its first line must show the gateway's key; what is no message of ours ends it.

    Orders that are sent in one turn of the event loop are one message.
    """

    def __init__(self, replies: Replies) -> None:
        self._replies, self._lines = replies, Lines(LONGEST_HELLO)
        self.name: str | None = None  # of the replica, once it has said so
        self._transport: asyncio.Transport | None = None
        self._pending: list[bytes] = []
        self.messages = 0  # sent so far

    def send(self, stream: int, request: GenerateRequest | None) -> None:
        """Send a request, or cancel it (None). It is dropped where the replica is gone."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(encode_order(stream, request))

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        orders, self._pending = self._pending, []
        if self._transport is not None:
            self._transport.write(b"".join(orders))
            self.messages += 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by class
        notice_when_gone(self._transport)
        asyncio.get_running_loop().call_later(HELLO_SECONDS, self._expect_hello)

    def _expect_hello(self) -> None:
        if self.name is None and self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            for line in self._lines.feed(data):
                if self.name is not None:
                    self._deliver(decode(line))
                else:
                    self._check(orjson.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.error("a connection that is no replica's, or speaks otherwise, is closed: %s", type(error).__name__)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.name is None:
            return
        self._replies.watch.lost(self)
        lost = ReplicaFailedError("its connection was lost")
        for mailbox in tuple(self._replies.open.values()):
            if mailbox.source is self:
                mailbox.fail(lost)

    def _check(self, hello: dict[str, str]) -> None:
        if not hmac.compare_digest(hello["key"].encode(), self._replies.address.key.encode()):
            raise ValueError("the key is wrong")
        self.name, self._lines.longest = str(hello["replica"]), LONGEST_LINE
        self._replies.watch.connected(self)

    def _deliver(self, events: list[tuple[int, Event]]) -> None:
        replies, watch = self._replies, self._replies.watch
        replies.messages += 1
        for stream, event in events:
            mailbox = replies.open.get(stream)
            if mailbox is None:  # it was given up
                if isinstance(event, Finished | Failed | Refused):
                    watch.ended(stream)
            elif isinstance(event, Refused) and event.reason == "busy":
                watch.busy(mailbox)
            else:
                if isinstance(event, Admitted):
                    watch.admitted(self, event.ongoing)
                mailbox.put(event)


def _listening(host: str) -> socket.socket:
    """Return a socket at any free port of an address, or of all where it is not the machine's own (behind a NAT)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family)
    except OSError:
        return socket.create_server(("", 0), family=family)
