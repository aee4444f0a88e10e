"""An answer on its way to a client, whatever API it is in."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from warmkv.platform.gateway.apis.chat_parsing.format import ExpectedResponse
from warmkv.platform.gateway.apis.chat_parsing.parts import Part, Text, Thinking, ToolCall, merged
from warmkv.platform.gateway.apis.errors import ApiError, from_exception
from warmkv.platform.gateway.apis.tokens import Place, place_name
from warmkv.platform.gateway.resume import Sink
from warmkv.platform.gateway.streams import EventWriter
from warmkv.policies.pricing import Price
from warmkv.prefixes.misses import Finding
from warmkv.prefixes.usage import Usage
from warmkv.replicas.protocol import Delta, Event, Finished, GenerateRequest, Started, TokenLogprobs

if TYPE_CHECKING:
    from warmkv.platform.gateway.apis.chat_parsing.parser import PartParser

Status = Literal["ok", "error", "cancelled"]


@dataclass(slots=True, eq=False)
class Answer:
    """Started by a replica; `text` streams the rest. Times are seconds on the gateway's clock.

    `on_end` is called exactly once, when the answer has ended, failed, or its client has left.
    """

    id: str
    model: str
    api: str
    tenant: str
    arrival: float  # Unix time
    request: GenerateRequest
    started: Started
    prompt_usage: Usage
    price: Callable[[Usage], Price]
    clock: Callable[[], float]
    begun: float  # clock at the arrival
    on_end: Callable[[Answer, Status], None]
    events: AsyncGenerator[Event]
    sink: Sink  # of the events: text may be taken as it comes
    finding: Finding  # up to where the prompt was read, and why not further
    places: Sequence[Place]  # of its content blocks
    context_management: dict[str, Any] | None = None  # of the Messages API: what was cleared from the request
    omit_thinking: bool = False  # from what its client is shown
    expected: ExpectedResponse | None = None  # what it is made of besides text
    satisfied: bool = False  # whether no more is wanted of it
    first_token: float = 0.0  # seconds from the arrival
    last_token: float = 0.0
    output_tokens: int = 0
    thinking_tokens: int = 0  # of these, but for one or two where thinking begins or ends within a token
    parsed_tokens: int = 0  # of these, that the parser has had
    over: bool = False
    error: str = ""  # type of the error that ended it
    _logprobs: list[TokenLogprobs] = field(default_factory=list)  # not taken yet
    end: Finished = field(default_factory=lambda: Finished("cancelled", 0))

    @property
    def usage(self) -> Usage:
        """Return what is billed so far."""
        return replace(self.prompt_usage, output=self.output_tokens)

    @property
    def name(self) -> str:
        """Return the request's id without its prefix, of which the ids of messages and completions are made."""
        return self.id.removeprefix("req_")

    async def more(self) -> Delta | None:
        """Return the next text, or None at the end: then `end` says why it ended. Raises ApiError."""
        try:
            event = await anext(self.events, None)
            if isinstance(event, Delta):
                self._count(event)
                return event
            if not isinstance(event, Finished):
                raise ApiError("api_error", "The replica ended the answer early.")
            self._count(event)
            self.end = event
            self._ended("ok")
            await self.events.aclose()
            return None
        except Exception as error:
            told = from_exception(error)
            self.error = told.type
            self._ended("error")
            raise told from error
        except BaseException:
            self._ended("cancelled")
            raise

    async def text(self) -> str:
        """Return the whole text. Raises ApiError."""
        parts: list[str] = []

        def take(delta: Delta) -> None:
            self._count(delta)
            parts.append(delta.text)

        def restart() -> None:
            self._forget()
            parts.clear()

        self.sink.take, self.sink.restart = take, restart
        while (delta := await self.more()) is not None:
            parts.append(delta.text)
        return "".join(parts)

    async def parts(self) -> list[Part]:
        """Return the parts of the whole answer. Raises ApiError."""
        if self.expected is None:
            text = await self.text()
            return [Text(text)] if text else []
        expected, found = self.expected, list[Part]()
        parser = expected.parser()

        def take(delta: Delta) -> None:
            self._count(delta)
            found.extend(self._parsed(parser, delta.text))
            if parser.done:
                self.sink.take = None

        def restart() -> None:
            nonlocal parser
            self._forget()
            found.clear()
            parser = expected.parser()

        self.sink.take, self.sink.restart = take, restart
        while (delta := await self.more()) is not None:
            found += self._parsed(parser, delta.text)
            if parser.done:
                await self._stop()
                break
        return merged(found + self._rest(parser))

    async def write(self, out: EventWriter, event: Callable[[str], bytes]) -> None:
        """Write the text to the end, or until it is `satisfied`: each piece as the `event` it makes, if it makes one.

        While the client keeps up, a piece is written as it comes from the replica. One that does not has its text wait
        in the mailbox, which bounds it. Raises ApiError.
        """

        def take(delta: Delta) -> None:
            self._count(delta)
            if data := event(delta.text):
                out.write(data)
            if out.is_behind or self.satisfied:
                self.sink.take = None

        while True:
            self.sink.take = None if out.is_behind else take
            delta = await self.more()
            self.sink.take = None
            if delta is None:
                return
            if data := event(delta.text):
                await out.send(data)
            if self.satisfied:
                await self._stop()
                return

    async def write_parts(self, out: EventWriter, events: Callable[[list[Part]], bytes]) -> None:
        """Write the answer to the end as the `events` that its parts make. Raises ApiError."""
        assert self.expected is not None
        expected = self.expected
        parser = expected.parser()

        def event(text: str) -> bytes:
            parts = self._parsed(parser, text)
            self.satisfied = parser.done
            if not parts:
                return b""
            self.sink.restart = None
            return events(parts)

        def restart() -> None:
            nonlocal parser
            self._forget()
            parser = expected.parser()

        self.sink.restart = restart
        await self.write(out, event)
        if parts := self._rest(parser):
            await out.send(events(parts))

    def _parsed(self, parser: PartParser, text: str) -> list[Part]:
        """Return the parts that more text makes, and count what of its tokens is thinking.

        Where text and thinking came together, for a client that reads slowly, tokens are told apart by characters.
        """
        came, self.parsed_tokens = self.output_tokens - self.parsed_tokens, self.output_tokens
        is_thinking = parser.is_thinking
        parts = parser.feed(text)
        if is_thinking or parser.is_thinking or any(isinstance(part, Thinking) for part in parts):
            other = sum(len(part.text) for part in parts if isinstance(part, Text))
            other += sum(len(part.arguments) for part in parts if isinstance(part, ToolCall))
            self.thinking_tokens += round(came * max(0.0, 1 - other / max(1, len(text))))
        return parts

    def _rest(self, parser: PartParser) -> list[Part]:
        """Return the parts of the end; tokens without a text, as that of the end, are thinking where it goes on."""
        if parser.is_thinking:
            self.thinking_tokens += self.output_tokens - self.parsed_tokens
        return parser.finish(complete=self.is_complete)

    @property
    def is_complete(self) -> bool:
        """Return True where the model ended the answer, rather than a limit or a stop sequence."""
        return self.end.reason == "end"

    async def _stop(self) -> None:
        """End the answer here; what the replica would still write is not wanted."""
        self.end = Finished("end", self.output_tokens)
        self._ended("ok")
        await self.events.aclose()

    async def aclose(self) -> None:
        """Give the answer up, if it has not ended: its client may leave before it reads any text."""
        self._ended("cancelled")
        await self.events.aclose()

    def _ended(self, status: Status) -> None:
        if not self.over:
            self.over = True
            self.on_end(self, status)

    def details(self, usage: Usage | None = None) -> dict[str, Any]:
        """Return what warmkv adds to `usage`: the price and its parts, the policy, the memory, where and how fast.

        The price is that of `usage`, of this answer alone if it is left out.
        """
        price, started = self.price(usage or self.usage), self.started
        one_tier = {"device": started.cached_tokens} if started.cached_tokens else {}  # a replica need not name it
        return {
            "policy": self.request.policy.label,
            "policy_version": self.request.terms.version if self.request.terms else 0,
            "replica": started.replica,
            "cached_tokens": started.cached_tokens,
            "kept_tokens": started.kept_tokens,
            "tiers": dict(started.tiers) or one_tier,
            "resident_bytes": started.resident_bytes,
            "price": {
                "input": price.input,
                "read": price.read,
                "write": dict(price.write),
                "output": price.output,
                "total": price.total,
            },
            "cache": self._cache(),
            "queue_seconds": started.queue_seconds,
            "prefill_seconds": started.prefill_seconds,
            "ttft_seconds": self.first_token,
        }

    def _cache(self) -> dict[str, Any]:
        """Return up to which content block the prompt was read, and why not up to its last breakpoint."""
        finding = self.finding
        places = {"found": finding.found_block, "missed": finding.block}
        named = {name: None if block is None else place_name(self.places[block]) for name, block in places.items()}
        return {**named, "reason": finding.reason, "missed_tokens": dict(finding.missed)}

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Return the log-probabilities of tokens that came since the last call."""
        taken, self._logprobs = self._logprobs, []
        return taken

    def _forget(self) -> None:
        """Count anew: the answer is computed again from its start."""
        self.output_tokens = self.thinking_tokens = self.parsed_tokens = 0
        self.satisfied = False
        self._logprobs.clear()

    def _count(self, event: Delta | Finished) -> None:
        self.last_token, self.output_tokens = self.clock() - self.begun, event.output_tokens
        if event.logprobs:
            self._logprobs += event.logprobs


TEXT = "\0"
"""Stands for the text in an event that is formatted once for all texts of an answer."""

as_json = json.encoder.encode_basestring_ascii
"""Format text as JSON. Escapes all but ASCII, since clients may take U+2028 and others for the end of a line."""


def event_of_text(event: bytes) -> Callable[[str], bytes]:
    """Return what makes the event of a text out of that of `TEXT`."""
    head, _, tail = event.partition(as_json(TEXT).encode())

    def made(text: str) -> bytes:
        return head + as_json(text).encode() + tail

    return made
