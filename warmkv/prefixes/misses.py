"""Why a prompt was not read from the cache: what is remembered of a tenant's latest prompts, compared with it.

Of a prompt its content blocks are remembered by hashes, where it was written, until when and in which replica. A
conversation that goes on takes the place of its earlier turn. Several gateways tell each other what they remember
(`news`, `learn`).
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Literal

from warmkv.prefixes.record import Candidate, Mark

HISTORY_BYTES = 16 << 20  # of a process: some 20,000 conversations of 50 blocks
TENANT_CONVERSATIONS = 64  # that are compared with a prompt, those used latest
CONVERSATION_BYTES = 1000  # beside its blocks
BLOCK_BYTES = 16
WRITTEN_BYTES = 200
NEWS = 2000  # conversations that wait to be told: one that comes then takes the place of the one told least lately
ALIKE = 16  # blocks behind a difference that are compared, to tell a change from another conversation

Reason = Literal[
    "disabled",  # the cache is switched off
    "unmarked",  # no breakpoint
    "below_minimum",  # no breakpoint with prefix_cache.min_tokens before it
    "parallel",  # written by a request whose answer had not begun when this one came
    "lookback",  # written more positions before a breakpoint than a read checks
    "thinking",  # the template drops thinking that it showed before
    "template",  # the same content shown otherwise: another tool choice, effort, or variable of the template
    "expired",
    "evicted",
    "other_replica",
    "changed",  # a block is another one than before
    "never_written",  # new text
]


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt whose answer begins. The first three have an item for each content block; nothing is told without them.

    `head` is the number of blocks of the tools and the system prompt. `marked` is the position of the last mark in the
    request, whether it counts or not. `size` is that of the cache's blocks; an `automatic` prompt is read and written
    at their ends, without marks, of its first `reusable` tokens.
    """

    contents: Sequence[int]  # hashes of what each block says
    names: Sequence[int]  # of what it and all before it say (`names_of`)
    ends: Sequence[int]
    thinking: Sequence[int]  # blocks behind which thinking is shown
    head: int
    tokens: int
    reusable: int
    marks: Sequence[Mark]
    reads: Sequence[Candidate]
    marked: int
    size: int
    automatic: bool = False
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Found:
    """What a replica had of a prompt: `read` tokens are billed as such, `hit` were there, `written` are stored now."""

    replica: str
    read: int
    hit: int
    written: int
    looked: float  # when the replica looked


@dataclass(frozen=True, slots=True)
class Finding:
    """Up to where a prompt was read, and the tokens behind that up to its last breakpoint that were not, by reason.

    `found_block` is the content block up to whose end it was read, None for none; `block` the one at which the first of
    the reasons lies, None if all was read.
    """

    read: int
    found_block: int | None = None
    missed: Mapping[Reason, int] = field(default_factory=dict)
    block: int | None = None

    @property
    def reason(self) -> Reason | None:
        return next(iter(self.missed), None)


@dataclass(frozen=True, slots=True)
class _Written:
    key: bytes  # empty for a prompt without marks
    until: float
    replica: str


@dataclass(slots=True)
class _Conversation:
    contents: array[int]
    names: array[int]
    thinking: tuple[int, ...]
    written: dict[int, _Written]  # by content block; that of the whole prompt where it is automatic

    @property
    def nbytes(self) -> int:
        return CONVERSATION_BYTES + BLOCK_BYTES * len(self.contents) + WRITTEN_BYTES * len(self.written)


@dataclass(frozen=True, slots=True)
class Told:
    """Carry a conversation to the histories of other processes, whose clocks may show another time.

    `written` has for a content block what was written behind it: its key, the seconds left of its life, and where.
    """

    tenant: bytes
    contents: bytes  # an array of 64-bit integers
    thinking: tuple[int, ...]
    written: Mapping[int, tuple[bytes, float, str]]


def content_hash(*said: str) -> int:
    """Return 64 bits of what a content block says, the same in every process."""
    digest = blake2b(digest_size=8)
    for text in said:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little", signed=True)


def names_of(contents: Sequence[int]) -> tuple[int, ...]:
    """Return a name for the first block, for the first two, and so on, of hashes of what they say."""
    return tuple(itertools.accumulate(contents, lambda name, content: hash((name, content))))


class PromptHistory:
    """The latest conversations of every tenant, within a limit of bytes for all and of conversations for each.

    With `tells`, what is remembered waits to be told to the histories of other processes.
    """

    def __init__(
        self, capacity: int = HISTORY_BYTES, conversations: int = TENANT_CONVERSATIONS, *, tells: bool = False
    ) -> None:
        self._capacity, self._conversations, self._tells = capacity, conversations, tells
        self._tenants: OrderedDict[bytes, OrderedDict[int, _Conversation]] = OrderedDict()  # latest used last
        self._untold: OrderedDict[tuple[bytes, int], _Conversation] = OrderedDict()
        self.nbytes = 0

    def forget(self, tenant: bytes) -> None:
        """Drop all of a tenant."""
        self.nbytes -= sum(held.nbytes for held in self._tenants.pop(tenant, {}).values())
        for key in [key for key in self._untold if key[0] == tenant]:
            del self._untold[key]

    def begun(self, tenant: bytes, asked: Asked, found: Found, ttls: Mapping[str, float], default: float) -> Finding:
        """Say why what is not read of a prompt was not, and remember it. `default` is the TTL without a mark."""
        held = self._tenants.get(tenant, OrderedDict())
        before = next((name for name in reversed(asked.names) if name in held), None)
        finding = _explain(asked, found, held[before] if before is not None else None, held)
        if not asked.enabled or not asked.names:
            return finding
        written = _written(asked, found, ttls, default)
        new = _Conversation(array("q", asked.contents), array("q", asked.names), tuple(asked.thinking), written)
        self._remember(tenant, before, new)
        if self._tells:
            if before is not None:
                self._untold.pop((tenant, before), None)
            self._untold[tenant, asked.names[-1]] = new
            if len(self._untold) > NEWS:
                self._untold.popitem(last=False)
        return finding

    def news(self, now: float) -> list[Told]:
        """Return what has been remembered since the last call."""
        told = []
        for (tenant, _), held in self._untold.items():
            written = {block: (each.key, each.until - now, each.replica) for block, each in held.written.items()}
            told.append(Told(tenant, held.contents.tobytes(), held.thinking, written))
        self._untold.clear()
        return told

    def learn(self, news: Sequence[Told], now: float) -> None:
        """Remember what another process tells."""
        for told in news:
            contents = array("q", told.contents)
            names = array("q", names_of(contents))
            held = self._tenants.get(told.tenant, OrderedDict())
            before = next((name for name in reversed(names) if name in held), None)
            written = {
                block: _Written(key, now + left, replica) for block, (key, left, replica) in told.written.items()
            }
            self._remember(told.tenant, before, _Conversation(contents, names, told.thinking, written))

    def _remember(self, tenant: bytes, before: int | None, new: _Conversation) -> None:
        """Hold a conversation in the place of its earlier turn, whose writes it goes on with."""
        held = self._tenants.setdefault(tenant, OrderedDict())
        self._tenants.move_to_end(tenant)
        if before is not None:
            new.written = {**held[before].written, **new.written}
            self._drop(held, before)
        held[new.names[-1]] = new
        self.nbytes += new.nbytes
        while len(held) > self._conversations:
            self._drop(held, next(iter(held)))
        while self.nbytes > self._capacity:
            oldest = next(iter(self._tenants))
            self._drop(self._tenants[oldest], next(iter(self._tenants[oldest])))
            if not self._tenants[oldest]:
                del self._tenants[oldest]

    def _drop(self, held: OrderedDict[int, _Conversation], name: int) -> None:
        self.nbytes -= held.pop(name).nbytes


def _written(asked: Asked, found: Found, ttls: Mapping[str, float], default: float) -> dict[int, _Written]:
    """Return what is stored of a prompt now, by content block."""
    if asked.automatic:
        whole = _Written(b"", found.looked + default, found.replica)
        return {len(asked.contents) - 1: whole}
    blocks = {end: number for number, end in enumerate(asked.ends)}
    return {
        blocks[mark.position]: _Written(mark.key, found.looked + ttls[mark.ttl], found.replica)
        for mark in asked.marks
        if mark.position <= max(found.hit, found.written)
    }


def _explain(
    asked: Asked, found: Found, continued: _Conversation | None, held: OrderedDict[int, _Conversation]
) -> Finding:
    if not asked.names:
        return Finding(found.read)
    read = _block_at(asked, found.read - 1) if found.read else None
    last = asked.reusable // asked.size * asked.size if asked.automatic else asked.marked
    if not asked.enabled or not (last or asked.automatic):
        return Finding(0, None, {"unmarked" if asked.enabled else "disabled": asked.tokens}, 0)
    if not asked.automatic and not asked.marks:
        return Finding(0, None, {"below_minimum": last}, _block_at(asked, last - 1))
    last = last if asked.automatic else asked.marks[-1].position
    at, missed = found.read, dict[Reason, int]()
    block = _block_at(asked, at)
    if found.hit > at:
        missed["parallel"], at = found.hit - at, found.hit
    if at >= last:
        return Finding(found.read, read, missed, block if missed else None)
    best, shared = _longest(asked, continued, held)
    if best is not None:
        lost, reason = _lost(asked, found, best, shared, at)
        if reason is not None:
            missed[reason] = missed.get(reason, 0) + lost - at
            at = lost
    if at < last:
        changed = shared < len(asked.contents) and _differs(asked, best, shared, held)
        if not missed and changed:
            block = shared
        elif not missed:
            block = _block_at(asked, at)
        missed["changed" if changed else "never_written"] = last - at
    return Finding(found.read, read, missed, block)


def _block_at(asked: Asked, position: int) -> int | None:
    """Return the content block that the token at a position belongs to, or the next one."""
    return next((number for number, end in enumerate(asked.ends) if end > position), None)


def _longest(
    asked: Asked, continued: _Conversation | None, held: OrderedDict[int, _Conversation]
) -> tuple[_Conversation | None, int]:
    """Return the conversation that says the same for the most blocks, and how many; `continued` does to its end."""
    names, best, longest = asked.names, continued, len(continued.names) if continued is not None else 0
    if longest < len(names):
        for other in reversed(held.values()):
            if longest < len(other.names) and other.names[longest] == names[longest]:
                most = min(len(names), len(other.names))
                differs = partial(_differ, names, other.names)
                best, longest = other, bisect_left(range(most), True, lo=longest, key=differs)
                if longest == len(names):
                    break
    return best, longest


def _differ(ours: Sequence[int], theirs: Sequence[int], at: int) -> bool:
    return ours[at] != theirs[at]


def _lost(asked: Asked, found: Found, before: _Conversation, shared: int, at: int) -> tuple[int, Reason | None]:
    """Return the highest position behind `at` that was written with the same content, and why it was not read."""
    if asked.automatic:
        position = min(asked.ends[shared - 1], asked.reusable) // asked.size * asked.size
        written = next(reversed(before.written.values()), None)
        if position <= at or written is None:
            return at, None
        return position, _gone(written, found)
    for block in sorted(before.written, reverse=True):
        written = before.written[block]
        if block >= shared or asked.ends[block] <= at or not written.key:
            continue
        position = asked.ends[block]
        key = next((read.key for read in asked.reads if read.position == position), None)
        if key is None:
            return position, "lookback"
        if key == written.key:
            return position, _gone(written, found)
        ours, theirs = ([place for place in shown if place < block] for shown in (asked.thinking, before.thinking))
        return position, "thinking" if ours != theirs else "template"
    return at, None


def _gone(written: _Written, found: Found) -> Reason:
    if found.looked >= written.until:
        return "expired"
    return "evicted" if written.replica == found.replica else "other_replica"


def _differs(asked: Asked, best: _Conversation | None, shared: int, held: OrderedDict[int, _Conversation]) -> bool:
    """Return True if a block was another one before, rather than that the prompt says something new from there on.

    It was where tools or the system prompt go on otherwise, or where blocks behind it are the same as before.
    """
    if best is not None and shared < asked.head and shared < len(best.contents):
        return True
    behind = slice(shared + 1, shared + 1 + ALIKE)
    return any(
        ours == theirs
        for before in ([best] if best is not None else held.values())
        for ours, theirs in zip(asked.contents[behind], before.contents[behind], strict=False)
    )
