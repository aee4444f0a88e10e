"""Choosing a replica and booking it in one step, so that concurrent requests do not herd.

The live router and the gateways of the simulator run this same code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from random import Random
from typing import Any, Final, NamedTuple

from warmkv.config import RoutingConfig
from warmkv.policies.breaker import Breaker, Outcome
from warmkv.policies.in_flight_prefixes import InFlightPrefixes
from warmkv.policies.routing import PREFILL_WEIGHT, View, rank
from warmkv.policies.transfer import Fetch, choose_donor
from warmkv.prefixes.index import MEND_EVERY, PUBLISH_SECONDS, Depths, PrefixIndex

HALF_LIFE = 100
"""Decisions after which an earlier one counts half as much in what replicas were given lately."""

BUSY_DECISIONS: Final = 32
"""Decisions over which the share of replicas with a prompt to compute is averaged, exponentially weighted."""

KEPT_SECONDS = 4 * PUBLISH_SECONDS
"""How long a router counts on what it had computed before its index must tell of it: a replica reports, and a router
asks, every PUBLISH_SECONDS at most."""

OTHERS_SECONDS: Final = 10.0  # for which a replica's word of other routers' requests counts

_GROWTH: Final = 2 ** (1 / HALF_LIFE)
_LARGE: Final = 1e9


class InFlightRequests:
    """Requests in flight per replica, each booked once and released once, whatever order the calls come in.

    `load` counts them, `prefill` the blocks that those have to compute which have not begun to answer, and
    `in_flight_prefixes` are the prefixes that they leave behind. Those of prompts that were computed stay for
    `kept_seconds` by the `clock`: until the index tells of them. What other routers sent is known as far as replicas
    tell it.
    """

    def __init__(self, clock: Callable[[], float], kept_seconds: float) -> None:
        self._clock, self._kept_seconds = clock, kept_seconds
        self._computed: set[Hashable] = set()  # booked requests that have begun to answer
        self._kept: deque[tuple[float, Hashable]] = deque()  # ended ones, and until when their prefixes stay
        self._booked: dict[Hashable, str] = {}  # request -> replica
        self._blocks: dict[Hashable, int] = {}  # of booked requests that have not begun
        self._given_up: set[Hashable] = set()  # booked requests
        self._others: dict[str, tuple[int, float]] = {}  # what other routers sent, by replica, and when it told
        self.load: dict[str, int] = {}
        self.prefill: dict[str, int] = {}
        self.in_flight_prefixes = InFlightPrefixes()

    def book(self, request: Hashable, replica: str, blocks: int | None = None) -> None:
        """Book a request on a replica, which has to compute `blocks` for it; as many as were booked if None."""
        booked = self._booked.get(request)
        if booked is not None:
            if booked == replica and blocks is None and request not in self._given_up:
                return
            blocks = self._blocks.get(request, 0) if blocks is None else blocks
            if booked != replica:
                self.in_flight_prefixes.move(request, replica)
            self._end(request)
        self._booked[request] = replica
        self.load[replica] = self.load.get(replica, 0) + 1
        if blocks:
            self._blocks[request] = blocks
            self.prefill[replica] = self.prefill.get(replica, 0) + blocks

    def began(self, request: Hashable) -> None:
        """Take the blocks of a request whose first token is drawn off its replica's `prefill`."""
        if request in self._booked:
            self._computed.add(request)
        self._take_off(request)

    def _take_off(self, request: Hashable) -> None:
        if blocks := self._blocks.pop(request, 0):
            replica = self._booked[request]
            self.prefill[replica] -= blocks
            if not self.prefill[replica]:
                del self.prefill[replica]

    def release(self, request: Hashable, replica: str | None = None) -> None:
        """Forget a booking; with `replica`, only if it is there: a late call for an earlier attempt changes nothing."""
        booked = self._booked.get(request)
        if booked is None or (replica is not None and booked != replica):
            return
        if self._kept_seconds and request in self._computed:
            self._kept.append((self._clock() + self._kept_seconds, request))
        else:
            self.in_flight_prefixes.remove(request)
        self._end(request)

    def _end(self, request: Hashable) -> None:
        self._take_off(request)
        replica = self._booked.pop(request, None)
        self._computed.discard(request)
        self._given_up.discard(request)
        if replica is not None:
            self.load[replica] -= 1
            if not self.load[replica]:
                del self.load[replica]

    def expire(self) -> None:
        """Forget prefixes that the index tells of by now."""
        while self._kept and self._kept[0][0] <= self._clock():
            self.in_flight_prefixes.remove(self._kept.popleft()[1])

    def give_up(self, request: Hashable) -> None:
        """Mark a request as abandoned. A working replica ends it, which releases its booking."""
        if request in self._booked:
            self._given_up.add(request)

    @property
    def suspects(self) -> set[str]:
        """Return the replicas that have not ended what was given up: they may be hung or cut off."""
        return {self._booked[request] for request in self._given_up} if self._given_up else set()

    def told(self, replica: str, ongoing: int) -> None:
        """Take a replica's word of how many requests it has; those that are not booked here are of other routers."""
        self._others[replica] = max(0, ongoing - self.load.get(replica, 0)), self._clock()

    def known_load(self, replicas: Sequence[str]) -> dict[str, int]:
        """Return the requests in flight of replicas, with those of other routers as far as they told lately."""
        if not self._others:
            return self.load
        since = self._clock() - OTHERS_SECONDS
        known: dict[str, int] = {}
        for name in replicas:
            others, told = self._others.get(name, (0, since))
            known[name] = self.load.get(name, 0) + (others if told >= since else 0)
        return known

    def drop(self, replica: str) -> None:
        """Forget what is known of a replica that is gone."""
        self._others.pop(replica, None)
        for request in [request for request, booked in self._booked.items() if booked == replica]:
            self._computed.discard(request)
            self.release(request)
        self.in_flight_prefixes.drop(replica)


class Recent:
    """What replicas were given lately, in a unit that changes: an amount counts half after `HALF_LIFE` others."""

    def __init__(self) -> None:
        self._unit = 1.0
        self.amounts: dict[str, float] = {}

    def give(self, replica: str, amount: float) -> None:
        self._unit *= _GROWTH  # in place of making all earlier amounts smaller
        self.amounts[replica] = self.amounts.get(replica, 0.0) + self._unit * amount
        if self._unit > _LARGE:
            shares = {name: given / self._unit for name, given in self.amounts.items()}
            self._unit, self.amounts = 1.0, {name: share for name, share in shares.items() if share > 1 / _LARGE}


class RoutingDecision(NamedTuple):
    """Replicas from best to worst. The first is booked; `matched` blocks of the prompt are taken to be warm there.

    Whichever gets the request may fetch what it lacks as `fetch` says. `expected` counts the blocks that need not be
    computed there: warm, about to be by an earlier request, or fetched.
    """

    order: list[str]
    reason: str
    matched: int
    fetch: Fetch | None = None
    expected: int = 0


class Dispatcher:
    """The decisions of one router: its copy of the index, its bookings, and the settings at start.

    A choice awaits and calls nothing, so in an event loop choosing and booking are one step. `slots` is how
    many sequences a replica decodes together, and `slots_of` may be filled with those that decode another number;
    `clock`, in seconds, times the breaker. `late` says that the index is told of blocks only some time after they are
    there.
    """

    def __init__(
        self, config: RoutingConfig, slots: int, random: Random, clock: Callable[[], float], *, late: bool = False
    ) -> None:
        self._config, self._slots, self._random = config, slots, random
        self.slots_of: dict[str, int] = {}
        self._turn = 0
        self._busy = 0.0  # share of the replicas that have a prompt to compute, averaged over decisions
        self.index = PrefixIndex()
        self.in_flight = InFlightRequests(clock, KEPT_SECONDS if late else 0.0)
        self.recent = Recent()
        self.breaker = Breaker(clock)

    def eligible(self, replicas: Sequence[str], avoid: Collection[str] = ()) -> Sequence[str]:
        """Return those of the replicas, at least one, that a request may go to.

        Replicas to `avoid` are left out if there are others, and of those, suspects and those that keep failing.
        """
        shunned = self.in_flight.suspects
        if self.breaker:
            shunned |= self.breaker.shut()
        if avoid:
            replicas = [name for name in replicas if name not in avoid] or replicas
        if shunned:
            replicas = [name for name in replicas if name not in shunned] or replicas
        return replicas

    def choose(
        self,
        request: Hashable,
        hashes: Sequence[Any],
        replicas: Sequence[str],
        *,
        warm: dict[str, Depths] | None = None,
        wanted: str | None = None,
        avoid: Collection[str] = (),
        leaves: int = 0,
        config: RoutingConfig | None = None,
        session: bytes = b"",
        moves: bool = True,
        whole: bool = True,
    ) -> RoutingDecision:
        """Rank the replicas, at least one, for a request and book the best.

        `warm` is what is held where, if another index than its own tells: then `hashes` may be any names of the
        prompt's blocks, unless the policy is `sticky_session`.

        `wanted` is the replica that the request names, or that another choice of its prompt went to. Only those that
        are `eligible` are ranked.
        `session` is the one that the request names; empty for none.
        `leaves` is how many leading blocks of the prompt stay where it is computed. `config` holds for this choice, in
        place of the settings at start. `moves` says that each replica can fetch blocks from any other.
        `whole` says that these are all there are: of others, as of another group, nothing counts that they hold and do.
        """
        offered = replicas
        replicas = self.eligible(offered, avoid)
        self.in_flight.expire()
        self.in_flight.release(request)  # Serve asks again while replicas are full
        config, load = config or self._config, self.in_flight.known_load(replicas)
        if warm is None:
            warm = self.index.longest_match(hashes)
        fetch = choose_donor(replicas, warm, load, config) if moves else None
        ahead, given = self.in_flight.prefill, self.recent.amounts
        if whole := whole and replicas is offered:
            busy, most = len(ahead), 0
            for depths in warm.values():
                most = max(most, depths[2])
        else:
            busy, most = _of_those(replicas, ahead, warm)
        in_flight_prefixes = self.in_flight.in_flight_prefixes.depths(hashes, most)
        if in_flight_prefixes and not whole:
            in_flight_prefixes = {name: in_flight_prefixes[name] for name in replicas if name in in_flight_prefixes}
        held = warm
        if in_flight_prefixes:
            held = {**warm, **{name: (depth, depth, depth) for name, depth in in_flight_prefixes.items()}}
        self._busy += (min(1.0, busy / len(replicas)) - self._busy) / BUSY_DECISIONS
        idle = 1 - self._busy
        view = View(
            replicas, hashes, held, load, self._slots, self._turn, fetch, ahead, given, idle, session, self.slots_of
        )
        order = rank(view, config, self._random)
        self._turn += 1
        reason = ""
        if wanted is not None and wanted in order:
            reason = "asked"
            order.remove(wanted)
            order.insert(0, wanted)
        best = order[0]
        matched = warm[best][-1] if best in warm else 0
        known = in_flight_prefixes.get(best, matched)
        reason = reason or _reason(config.policy, matched, known, max(in_flight_prefixes.values(), default=most))
        if fetch is not None:
            known = max(known, fetch.blocks)
        self._book(request, best, len(hashes) - known)
        if leaves > matched:
            self.in_flight.in_flight_prefixes.add(request, best, hashes, matched, leaves)
        return RoutingDecision(order, reason, matched, fetch, known)

    def _book(self, request: Hashable, replica: str, blocks: int) -> None:
        """Book a request on a replica, which has to compute `blocks` for it."""
        self.in_flight.book(request, replica, blocks)
        if self.breaker:
            self.breaker.sent(request, replica)
        self.recent.give(replica, 1 + PREFILL_WEIGHT * blocks)

    def ended(self, request: Hashable, replica: str | None, outcome: Outcome) -> None:
        """Hear how an attempt ended, and where; None if it came to no replica."""
        self.breaker.ended(request, replica, outcome)

    def mend(self, choice: RoutingDecision, hashes: Sequence[bytes]) -> None:
        """Check a part of the match that a choice relied on; for after the decision."""
        if choice.matched:
            self.index.mend(choice.order[0], hashes[: choice.matched], self._random.randrange(MEND_EVERY))


def _of_those(replicas: Sequence[str], ahead: dict[str, int], warm: dict[str, Depths]) -> tuple[int, int]:
    """Return how many of the replicas have a prompt to compute, and the most blocks that one of them holds."""
    busy = most = 0
    for name in replicas:
        if name in ahead:
            busy += 1
        depths = warm.get(name)
        if depths is not None:
            most = max(most, depths[2])
    return busy, most


def _reason(policy: str, matched: int, known: int, most: int) -> str:
    """Say why a replica is best that has `matched` blocks of a prompt and is about to have `known`; some has `most`."""
    if policy != "prefix_cost":
        return policy
    if known > matched:
        return "in_flight_prefixes"
    if most > matched:
        return "load"
    return "warm" if matched else "cold"
