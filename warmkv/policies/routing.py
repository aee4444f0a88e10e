"""Where to send a request. Pure: the live router and the simulator both call `rank`, with the same settings.

A policy is a function from what is known (`View`) to an order of the replicas, best first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

from warmkv.config import RoutingConfig
from warmkv.policies.transfer import TRANSFER_BLOCK, TRANSFER_START, Fetch, worth_fetching
from warmkv.prefixes.index import Depths

NOTHING: Final[dict[str, Any]] = {}  # never changed
BEHIND = 1e9  # blocks: more than anything else costs
PREFILL_WEIGHT = 0.5  # blocks that each counts as which is still to compute for a request in flight
QUEUE_WEIGHT = 8.0  # blocks that a request which waits for a decode slot counts as, beside its load
RECENT_WEIGHT = 0.1  # blocks of prefill that having been given all work of late counts as
ROOM_WEIGHT = 0.5  # blocks of prefill that each counts as which a replica has to store, beside computing or fetching it
FETCH_SHARE = 0.25  # of the cost of a fetch that counts however busy the replicas are
HOST_CREDIT = 0.75  # worth of a warm block in host memory; 1 on the device
DISK_CREDIT = 0.25  # worth of a warm block on disk
SESSION_BLOCKS = 4  # first blocks of a prompt that name its session, unless the request does
SESSION_CREDIT = 1.0  # blocks that the replica of a request's named session counts as warm: where all else is equal


class View:
    """What a decision is made from. An absent replica holds nothing and has nothing to do.

    Plain dictionaries, which compiled code looks into without a call, in a class that it makes without one. A policy
    changes none of it.
    """

    def __init__(
        self,
        replicas: Sequence[str],
        hashes: Sequence[Any],
        warm: dict[str, Depths],
        load: dict[str, int],
        slots: int,
        turn: int,
        fetch: Fetch | None = None,
        prefill: dict[str, int] = NOTHING,
        recent: dict[str, float] = NOTHING,
        idle_share: float = 1.0,
        session: bytes = b"",
        slots_of: dict[str, int] = NOTHING,
    ) -> None:
        self.replicas = replicas
        self.hashes = hashes  # of the prompt's full blocks
        self.warm = warm  # leading blocks that a replica holds, by tier, or is about to hold (`InFlightPrefixes`)
        self.load = load  # requests in flight, from their booking to the end of their stream
        self.slots = slots  # sequences that a replica decodes together; what is in flight beyond them waits
        self.turn = turn  # decisions made before this one
        self.fetch = fetch  # what others may get from the replica that holds most (`transfer.choose_donor`)
        self.prefill = prefill  # blocks to compute for the requests in flight that have no token yet
        self.recent = recent  # work that each was given lately, in any unit
        self.idle_share = idle_share  # share of the replicas that have no prompt to compute, on average
        self.session = session  # that the request names; empty for none
        self.slots_of = slots_of  # of replicas that decode another number together


def rank(view: View, config: RoutingConfig, random: Random) -> list[str]:
    """Rank all replicas from best to worst, by the configured policy. Only `power_of_two` draws from `random`."""
    return POLICIES[config.policy](view, config, random)


def blocks_saved(depths: Depths) -> float:
    """Return blocks of prefill that a warm prefix saves: what lies in a slower tier counts for less.

    The idea of a credit by tier is that of NVIDIA Dynamo's router, and so are the credits.
    """
    device, host, anywhere = depths
    if device == anywhere:
        return device
    return device + HOST_CREDIT * (host - device) + DISK_CREDIT * (anywhere - host)


def _prefix_cost(view: View, config: RoutingConfig, random: Random) -> list[str]:
    """Rank by cost in blocks of prefill: those left to compute or to fetch, and what each replica has to do already.

    A block that is computed delays all requests that come before its replica is idle again: of replicas that are busy a
    share `u` of the time, 1 / (1 - u) in the mean. Waiting delays one, and so does fetching, which computes nothing. So
    what a replica has to do counts `1 - u`, and so does what it would fetch, but at least FETCH_SHARE: it takes room
    and the donor's time as well. A replica that has `overload / (1 - u)` requests more than the least loaded one goes
    behind all that have not, however warm it is. Where all are busy, what is computed again makes all wait longer.

    What each was given lately keeps new prompts, and with them their sessions, away from a replica with a hot prefix
    that happens to be idle.
    """
    replicas, warm, load, prefill, recent = view.replicas, view.warm, view.load, view.prefill, view.recent
    fetch, slots, idle, session = view.fetch, view.slots, view.idle_share, view.session
    load_weight, prefill_weight = config.load_weight * idle, PREFILL_WEIGHT * idle
    share = RECENT_WEIGHT / (sum(recent.values()) or 1.0)
    # Fetching takes `gain - each * held` off the cost of who holds at most `poor` blocks of what another one does.
    poor, gain, each = -1.0, 0.0, 0.0
    if fetch is not None:
        waits = max(FETCH_SHARE, idle)
        each = 1 - TRANSFER_BLOCK * waits
        poor = fetch.blocks - worth_fetching()
        gain = each * fetch.blocks - TRANSFER_START * waits
    costs: list[float] = []  # of the replicas, in their order
    most, least = 0, load.get(replicas[0], 0) if replicas else 0
    for replica in replicas:
        busy = load.get(replica, 0)
        if busy > most:
            most = busy
        elif busy < least:
            least = busy
        cost = load_weight * busy + prefill_weight * prefill.get(replica, 0) + share * recent.get(replica, 0.0)
        depths = warm.get(replica)
        if depths is None:
            cost -= gain
        else:
            device, _, held = depths
            cost -= (device if device == held else blocks_saved(depths)) + ROOM_WEIGHT * held
            if held <= poor:
                cost -= gain - each * held
        costs.append(cost)
    if session and replicas:
        costs[replicas.index(_by_session(replicas, session)[0])] -= SESSION_CREDIT
    slots_of = view.slots_of
    if idle * (most - least) >= config.overload or most > slots or slots_of:
        for at, replica in enumerate(replicas):
            busy = load.get(replica, 0)
            overloaded = idle * (busy - least) >= config.overload
            costs[at] += idle * QUEUE_WEIGHT * max(0, busy - slots_of.get(replica, slots)) + BEHIND * overloaded
    return [replicas[at] for at in sorted(range(len(costs)), key=costs.__getitem__)]


def _least_loaded(view: View, config: RoutingConfig, random: Random) -> list[str]:
    """Rank by requests in flight; those that have as many take turns."""
    return sorted(_round_robin(view, config, random), key=lambda replica: view.load.get(replica, 0))


def _round_robin(view: View, config: RoutingConfig, random: Random) -> list[str]:
    """Rank in turn."""
    first = view.turn % len(view.replicas) if view.replicas else 0
    return [*view.replicas[first:], *view.replicas[:first]]


def _power_of_two(view: View, config: RoutingConfig, random: Random) -> list[str]:
    """Rank the less loaded of two at random first (Mitzenmacher, 2001), then the other one, then the rest."""
    shuffled = random.sample(view.replicas, len(view.replicas))
    return [*sorted(shuffled[:2], key=lambda replica: view.load.get(replica, 0)), *shuffled[2:]]


def _sticky_session(view: View, config: RoutingConfig, random: Random) -> list[str]:
    """Rank by session, whatever the load: that which the request names, or the prompt's first blocks.

    The first SESSION_BLOCKS blocks stand for the session: they stay the same from turn to turn. A prompt without a
    full block goes to the least loaded replica.
    """
    if view.session:
        return _by_session(view.replicas, view.session)
    if not view.hashes:
        return _least_loaded(view, config, random)
    return _by_session(view.replicas, view.hashes[min(SESSION_BLOCKS, len(view.hashes)) - 1])


def _by_session(replicas: Sequence[str], session: bytes) -> list[str]:
    """Return the replicas by rendezvous hashing of a session (Thaler and Ravishankar, 1998)."""
    return sorted(replicas, key=lambda replica: hashlib.blake2b(session + replica.encode(), digest_size=8).digest())


POLICIES: dict[str, Callable[[View, RoutingConfig, Random], list[str]]] = {
    "prefix_cost": _prefix_cost,
    "power_of_two": _power_of_two,
    "round_robin": _round_robin,
    "least_loaded": _least_loaded,
    "sticky_session": _sticky_session,
}
