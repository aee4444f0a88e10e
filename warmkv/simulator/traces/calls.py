"""Requests as the logs of other tools have them: what a hosted API or another server reported of each.

A log with prompts has blocks of hashed text; of one with token counts alone they are derived (`conversations.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from warmkv.prefixes import hashing, prompt_text
from warmkv.prefixes.breakpoints import CachePlan
from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.usage import Usage
from warmkv.simulator.traces.columns import LARGEST, RowError, TraceError
from warmkv.simulator.traces.conversations import Conversations
from warmkv.simulator.traces.rows import Reading, document

BLOCK = 64  # tokens, if the caller does not say
NOTE = "prefixes are those of prompts in the log, hashed as text, or else derived from conversations and reported reads"

UNITS = (1, 10**3, 10**6, 10**9)  # of a number that is a moment: seconds, milli-, micro-, nanoseconds
LATEST = 10**11  # in its unit: seconds until the year 5138, as milliseconds from March 1973 on


ONE_SERVER = "server"
"""Stands for the replica of requests whose log is of one server, with its own latencies."""


class Call(NamedTuple):
    """A request that was answered. Where the log has its prompt, `plan` names its prefixes, and `tokens` counts it."""

    arrival: float  # seconds
    usage: Usage  # as reported
    model: str = ""
    tenant: str = ""
    session: str = ""  # its conversation, if the log tells
    breakpoints: bool = False  # whether it was billed by breakpoints, as in the Messages API
    id: str = ""  # of several rows with the same id the last one counts
    ttft: float = 0.0  # 0 if unknown, or not the time of a server that a replay stands for
    e2e: float = 0.0
    replica: str = ""  # `ONE_SERVER` where they are
    tokens: int = 0
    plan: CachePlan | None = None
    bytes_per_token: float = 0.0


class Texts:
    """Names the prefixes of prompts by their text, in the order of the files."""

    def __init__(self, reading: Reading) -> None:
        self._block_size = reading.block_size or BLOCK
        self._scale = prompt_text.Scale(reading.characters_per_token, reading.learned.scales)
        self._known = reading.learned.hashes

    def named(self, call: Call, body: Mapping[str, Any]) -> Call:
        """Return the call with the prefixes of its prompt, if the body has one, and all of it."""
        if not prompt_text.is_whole(body) or not (parts := prompt_text.parts_of(body)):
            return call
        self._scale.learn(call.model, parts, call.usage.prompt)
        scale = self._scale.of(call.model)
        root = hashing.chain_root(b"", call.model, str(self._block_size))
        tokens, plan = prompt_text.plan(parts, root, self._block_size, scale)
        hashes = tuple([self._known.setdefault(key, key) for key in plan.hashes])
        if not call.breakpoints:
            plan = CachePlan(hashes, (), ())
        return call._replace(tokens=tokens, plan=CachePlan(hashes, plan.marks, plan.reads), bytes_per_token=scale)


def distinct(calls: Iterable[Call]) -> list[Call]:
    """Return the calls of a tool's log, each id once."""
    by_id: dict[str, Call] = {}
    found = []
    for call in calls:
        if not call.id:
            found.append(call)
        elif (before := by_id.get(call.id)) is None or before.usage.output <= call.usage.output:
            by_id[call.id] = call
    return [*found, *by_id.values()]


def records(calls: Iterable[Call], reading: Reading) -> Iterator[RequestRecord]:
    """Yield the records of calls in the order of arrival. Raises TraceError if they do not tell the scope."""
    size = reading.block_size or BLOCK
    ordered = sorted(calls, key=lambda call: call.arrival)
    conversations = Conversations(size)
    for number, call in enumerate(ordered):
        plan, tokens = call.plan, call.tokens
        if plan is None:
            tokens = call.usage.prompt
            plan = conversations.plan(call.model, call.session, call.usage, marked=call.breakpoints)
        if reading.scope != "global":
            plan = _scoped(plan, call, reading)
        yield RequestRecord(
            id=call.id or str(number),
            arrival=call.arrival,
            tenant=call.tenant or "log",
            model=call.model,
            api="messages" if call.breakpoints else "chat",
            policy="full",
            block_size=size,
            input_tokens=tokens,
            output_tokens=call.usage.output,
            hashes=plan.hashes,
            marks=plan.marks,
            reads=plan.reads,
            usage=call.usage,
            cached_tokens=call.usage.read,
            replica=call.replica,
            ttft=call.ttft,
            e2e=call.e2e,
            session=call.session,
            bytes_per_token=call.bytes_per_token,
        )


def _scoped(plan: CachePlan, call: Call, reading: Reading) -> CachePlan:
    """Return a plan whose keys are equal only within the call's session or tenant. Raises TraceError."""
    owner = call.session if reading.scope == "session" else call.tenant
    if not owner:
        raise TraceError(f"the trace does not tell the {reading.scope} of every request")
    root, known = hashing.chain_root(b"", owner), reading.learned.hashes

    def own(key: bytes) -> bytes:
        found = hashing.chained(root, key)
        return known.setdefault(found, found)

    return CachePlan(
        tuple(map(own, plan.hashes)),
        tuple(mark._replace(key=own(mark.key)) for mark in plan.marks),
        tuple(read._replace(key=own(read.key)) for read in plan.reads),
    )


def check(usage: Usage) -> Usage:
    """Return a usage that fits into the columns. Raises RowError."""
    if not 0 < usage.prompt <= LARGEST or not 0 <= usage.output <= LARGEST:
        raise RowError(
            f"token counts must be from 1 to {LARGEST:,}: {usage.prompt} of the prompt, {usage.output} after"
        )
    return usage


def moment(value: Any, name: str) -> float:
    """Read a date and time, or a number since 1970, also as text, as Unix time. Raises RowError.

    A number's size tells its unit: what would be a year after 5138 in one unit is in a smaller one.
    """
    try:
        number = _number(value)
        if number is None:
            time = datetime.fromisoformat(value)
            return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
        unit = next((unit for unit in UNITS if abs(number) < LATEST * unit), UNITS[-1])
        if math.isfinite(number):
            return number / unit
    except (TypeError, ValueError, OverflowError):
        pass
    raise RowError(f"{name} must be a date and a time, not {value!r:.50}")


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        if value[4:5] == "-":  # a date
            return None
        try:
            return float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def body_of(value: Any) -> Mapping[str, Any]:
    """Return a prompt as the body of a request: an object with messages, messages alone, or a text."""
    value = document(value)
    if isinstance(value, dict):
        return value
    return {"messages": value} if isinstance(value, list) else {"prompt": value} if value else {}
