"""Sending attempts to replicas over the connections that those have opened, without a call of Ray.

A replica takes `engine.max_slots + engine.max_queue` requests at a time, whichever gateways they come from. Where none
has room an attempt waits in line here, up to `cluster.max_queued_requests` of them. Replicas may be of several groups
(`cluster.groups`): an attempt goes to those that can compute it, and so many may wait for the same groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from warmkv.config import Config, able, move_blocks, refusal
from warmkv.platform.gateway.apis.errors import overloaded, stopping
from warmkv.platform.gateway.replies import Connection, Mailbox, Replies, Watch
from warmkv.platform.gateway.resume import Attempt
from warmkv.platform.router import Router
from warmkv.replicas.protocol import UnservableRequestError

BUSY_SECONDS = 0.1  # for which a replica that had no room is not asked, unless a request of ours ends there


class Sender(Watch):
    """Sends each attempt to the first replica that has room, in the router's order. For one event loop.

    Serve says which replicas run (`follow`); only those get requests, while what they have goes on to its end.
    """

    def __init__(self, config: Config, router: Router, replies: Replies, clock: Callable[[], float]) -> None:
        self._most_queued = config.cluster.max_queued_requests
        self._most_ongoing = {name: group.ongoing_requests for name, group in config.groups().items()}
        self._groups = config.capabilities
        limited = any(group.is_limited for group in self._groups.values())
        self._everywhere = frozenset(() if limited else self._groups)  # all groups, where each can serve everything
        self._router, self._replies, self._clock = router, replies, clock
        self._running: Mapping[str, str] = {}  # groups of the replicas that run
        self._group_of: dict[str, str] = {}  # and of those that are connected still
        self._connections: dict[str, Connection] = {}
        self._line: dict[Mailbox, Attempt] = {}
        self._sent: dict[int, tuple[str, Attempt]] = {}  # where each is that has not ended there, given up or not
        self._busy: dict[str, float] = {}  # until when
        self._retrying: asyncio.TimerHandle | None = None
        replies.watch = self

    @property
    def missing(self) -> bool:
        """Return True while a replica runs that is not connected."""
        return not self._running.keys() <= self._connections.keys()

    def taking(self) -> int:
        """Count the replicas that would be sent a request now."""
        return self._router.taking(self._reachable())

    def follow(self, running: Mapping[str, str]) -> None:
        """Take Serve's word of which replicas run, and of which group each is."""
        stopped, self._running = self._running.keys() - running.keys(), running
        self._group_of |= running
        self._router.set_slots(running)
        for name in stopped - self._connections.keys():
            self._gone(name)
        self._serve_line()

    def group_of(self, replica: str) -> str:
        """Return the group of a replica that runs or is connected."""
        return self._group_of.get(replica, "")

    def send(self, attempt: Attempt) -> Mailbox:
        """Send an attempt, or have it wait in line; its events, a refusal or a fault come to the mailbox."""
        mailbox = self._replies.mailbox(self._closed, attempt.take)
        if self._replies.stopped:
            mailbox.fail(stopping())
            return mailbox
        attempt.groups = self._everywhere or able(self._groups, attempt.needs)
        if not attempt.groups:
            mailbox.fail(UnservableRequestError(refusal(self._groups.values(), attempt.needs)))
            return mailbox
        self._line[mailbox] = attempt
        self._serve_line()
        if mailbox in self._line and self._waiting(attempt.groups) > self._most_queued:
            del self._line[mailbox]
            mailbox.fail(overloaded("gateway_queue"))
        return mailbox

    def _waiting(self, groups: frozenset[str]) -> int:
        """Count those in line for the same groups: who waits for another group takes no place of theirs."""
        if len(self._line) <= self._most_queued:
            return len(self._line)
        return sum(attempt.groups == groups for attempt in self._line.values())

    # --- what replicas say

    def connected(self, connection: Connection) -> None:
        assert connection.name is not None
        if (before := self._connections.get(connection.name)) is not None:  # which the replica has given up
            self.lost(before)
            before.abort()
        self._connections[connection.name] = connection
        self._serve_line()

    def lost(self, connection: Connection) -> None:
        name = connection.name
        assert name is not None
        if self._connections.get(name) is not connection:
            return
        del self._connections[name]
        self._busy.pop(name, None)
        self._sent = {stream: sent for stream, sent in self._sent.items() if sent[0] != name}
        self._router.disconnected(name)
        if name not in self._running:
            self._gone(name)

    def admitted(self, connection: Connection, ongoing: int) -> None:
        assert connection.name is not None
        self._router.admitted(connection.name, ongoing)

    def busy(self, mailbox: Mailbox) -> None:
        name, attempt = self._sent[mailbox.stream]
        self._forget(mailbox.stream)
        self._busy[name] = self._clock() + BUSY_SECONDS
        attempt.replica = mailbox.source = None
        self._line = {mailbox: attempt, **self._line}
        self._serve_line()

    def ended(self, stream: int) -> None:
        if stream in self._sent:
            self._forget(stream)
            self._serve_line()

    # --- who gets what

    def _gone(self, name: str) -> None:
        self._group_of.pop(name, None)
        self._router.gone(name, self._group_of)

    def _reachable(self) -> list[str]:
        return [name for name in self._connections if name in self._running]

    def _free(self) -> set[str]:
        """Return the replicas that have room, as far as is known here."""
        now = self._clock()
        return {
            name
            for name in self._reachable()
            if self._router.load(name) < self._most_ongoing[self._running[name]] and self._busy.get(name, now) <= now
        }

    def _place(self, mailbox: Mailbox, attempt: Attempt, free: set[str]) -> bool:
        """Send an attempt to the best replica that has room; False if none has of those that may get it."""
        groups = {name: group for name in self._reachable() if (group := self._running[name]) in attempt.groups}
        if not groups:
            return False
        stream, names = mailbox.stream, list(groups)
        if not groups.keys() <= free and free.isdisjoint(self._router.eligible(attempt, names)):
            return False  # a decision would be for nothing, and would count as one
        moves = move_blocks([self._groups[group] for group in set(groups.values())])
        order = self._router.choose(stream, attempt, names, moves=moves, whole=len(names) == len(self._connections))
        name = next(name for name in order if name in free)
        tried = {earlier.replica for earlier in attempt.given_up}
        attempt.others = len(set(names) - tried - {name})
        self._dispatch(mailbox, attempt, name)
        return True

    def _dispatch(self, mailbox: Mailbox, attempt: Attempt, name: str) -> None:
        self._router.sent(mailbox.stream, name)
        attempt.replica, mailbox.source = name, self._connections[name]
        self._sent[mailbox.stream] = name, attempt
        mailbox.source.send(mailbox.stream, attempt.request)

    def _serve_line(self) -> None:
        for mailbox, attempt in tuple(self._line.items()):
            if not (free := self._free()):
                break
            if self._place(mailbox, attempt, free):
                del self._line[mailbox]
        self._retry_when_free()

    def _retry_when_free(self) -> None:
        """Ask replicas that had no room again, while anybody waits: other gateways' requests may have ended."""
        if self._line and self._busy and self._retrying is None:
            self._retrying = asyncio.get_running_loop().call_later(BUSY_SECONDS, self._retry)

    def _retry(self) -> None:
        self._retrying = None
        now = self._clock()
        self._busy = {name: until for name, until in self._busy.items() if until > now}
        self._serve_line()

    def _closed(self, mailbox: Mailbox) -> None:
        if self._line.pop(mailbox, None) is not None or mailbox.stream not in self._sent:
            return
        if mailbox.ended:
            self.ended(mailbox.stream)
        else:  # it counts as load until the replica has ended it
            name, _ = self._sent[mailbox.stream]
            self._connections[name].send(mailbox.stream, None)

    def _forget(self, stream: int) -> None:
        name, _ = self._sent.pop(stream)
        self._busy.pop(name, None)
        self._router.release(stream, name)
