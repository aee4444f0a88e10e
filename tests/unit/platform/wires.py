"""Gateway and replicas over connections that a test moves on and cuts, byte by byte. No sockets, no Ray."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from tests.unit.platform.exchanges import Recorded
from warmkv.config import Config
from warmkv.platform.gateway.replies import Connection, Replies
from warmkv.platform.gateway.sending import Sender
from warmkv.platform.router import Router
from warmkv.replicas.links import Link
from warmkv.replicas.protocol import Admitted, Delta, Finished, GenerateRequest, Started


def ignore(*_: Any) -> None: ...


def hello_to(replies: Replies) -> bytes:
    return b'{"key": "%s", "replica": "only"}\n' % replies.address.key.encode()


class Wire(asyncio.Transport):
    """One direction of a connection: what is written lies here until the test delivers it."""

    def __init__(self) -> None:
        super().__init__()
        self.data, self.ended = b"", False

    def write(self, data: Any) -> None:
        self.data += bytes(data)

    def get_write_buffer_size(self) -> int:
        return len(self.data)

    def abort(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.ended = True


class Cluster:
    """Replicas whose answers are the letters of their prompts, over connections that the test moves on and cuts."""

    def __init__(self, replicas: int, config: Config | None = None) -> None:
        config = config or Config()
        self.now = 0.0
        self.replies = Replies("127.0.0.1")
        self.recorded = Recorded()
        self.router = Router(config, self.recorded, Random(0), lambda: self.now)
        self.sender = Sender(config, self.router, self.replies, lambda: self.now)
        self.sender.follow({str(number): "" for number in range(replicas)})
        self.replicas = [Replica(self, str(number)) for number in range(replicas)]

    @property
    def idle(self) -> bool:
        """Whether nothing is held for any request."""
        held = self.replies.open or self.sender._sent or self.sender._line or self.router._dispatcher.in_flight.load
        return not held and not any(replica.answers for replica in self.replicas)


class Replica:
    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.answers: dict[int, tuple[GenerateRequest, int]] = {}  # tokens so far, by stream
        self.connect()

    def connect(self) -> None:
        self.there, self.back = Wire(), Wire()
        self.link, self.connection = Link(self.take, ignore), Connection(self.cluster.replies)
        self.link.connection_made(self.back)
        self.connection.connection_made(self.there)
        self.link.begin(self.cluster.replies.address.key, self.name)

    def take(self, link: Link, stream: int, request: GenerateRequest | None) -> None:
        if request is not None:
            self.answers[stream] = request, 0
            link.send(stream, Admitted())
        elif self.answers.pop(stream, None) is not None:
            link.send(stream, Finished("cancelled", 0))

    def step(self, pace: int) -> None:
        """Text of every answer, as long as `pace` tokens; all tokens of one that resumes come again."""
        for stream, (request, drawn) in list(self.answers.items()):
            tokens = request.token_ids
            if not drawn:
                self.link.send(stream, Started(self.name, 0, 0, 0, 0, 0, 0.0, 0.0))
            if drawn == len(tokens):
                self.link.send(stream, Finished("end", drawn))
                del self.answers[stream]
            else:
                new = tokens[drawn : drawn + pace]
                drawn += len(new)
                self.link.send(stream, Delta("".join(map(chr, new)), drawn, new))
                self.answers[stream] = request, drawn

    def deliver(self, size: int) -> None:
        """Move so many bytes on, in either direction."""
        for wire, end in ((self.there, self.link), (self.back, self.connection)):
            data, wire.data = wire.data[:size], wire.data[size:]
            if data:
                end.data_received(data)

    def cut(self, _: int) -> None:
        """The connection is lost, with all that was under way; both sides hear of it, and the replica comes again."""
        self.connection.connection_lost(None)
        self.link.connection_lost(None)
        self.answers = {}
        self.connect()
