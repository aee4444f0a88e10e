"""Which of several running servers a request goes to. Without HTTP.

The decision is that of the gateways (`policies/dispatcher.py`): warm blocks, load, prompts in flight, failures. What a
server holds is known by its KV events. Where it tells of none, or not of everything, blocks of the prompts that it
answered are remembered; the least recently used leave first, as in vLLM, beyond its capacity and after a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from warmkv.config import Config
from warmkv.platform.engine_router.memory import EngineMemory
from warmkv.platform.engine_router.prompts import Prompt
from warmkv.policies.breaker import Outcome
from warmkv.policies.dispatcher import Dispatcher
from warmkv.prefixes.index import TIERS, Depths
from warmkv.prefixes.mask_table import pack

if TYPE_CHECKING:
    from warmkv.replicas.engines.kv_events import Changes


RANK_MARK = "#"


def rank_name(engine: str, rank: int) -> str:
    """Name a data-parallel rank of a server: routed to as a server of its own."""
    return f"{engine}{RANK_MARK}{rank}"


def address_of(name: str) -> tuple[str, str]:
    """Return a server's address, and the rank that is named; empty for none."""
    address, _, rank = name.partition(RANK_MARK)
    return address, rank


class EngineRouter:
    """Ranks servers for requests, which are known by numbers. For one event loop; `clock` is in seconds."""

    def __init__(
        self,
        engines: Sequence[str],
        config: Config,
        *,
        kv_tokens: int,
        ttl: float,
        random: Random,
        clock: Callable[[], float],
        events: bool = False,
    ) -> None:
        routing = config.routing.model_copy(update={"transfer": False})  # the servers do not know each other
        self.block_size = config.prefix_cache.block_size
        self._by_session = routing.policy == "sticky_session"
        self._dispatcher = Dispatcher(routing, config.engine.max_slots, random, clock, late=events)
        blocks = max(1, kv_tokens // self.block_size)
        self._engines = {name: EngineMemory(blocks, ttl, clock) for name in engines}
        self._whole: set[str] = set()  # servers of which every block is known
        self._prompts: dict[int, Prompt] = {}  # of requests that have not ended
        self._answered = dict.fromkeys(engines, 0)
        self._reasons: dict[str, int] = {}

    def changed(self, engine: str, changes: Changes, whole: bool) -> None:
        """Follow what a server tells of its cache; `whole` says that nothing is in it of which it has not told."""
        index = self._dispatcher.index
        index.remove(engine, pack(changes.gone))
        for tier in TIERS:
            index.add(engine, pack([key for key, where in changes.stored.items() if where == tier]), tier)
        (self._whole.add if whole else self._whole.discard)(engine)

    def choose(self, number: int, prompt: Prompt) -> list[str]:
        """Rank the servers for a prompt, best first, and book it on the first."""
        if self._by_session and prompt.text:
            prompt = prompt._replace(tokens=())  # which cannot always be had: a session must not move for that
        choice = self._dispatcher.choose(
            number,
            prompt.hashes,
            list(self._engines),
            warm=self._warm(prompt),
            leaves=len(prompt.hashes),
            session=prompt.session,
        )
        self._prompts[number] = prompt
        self._reasons[choice.reason] = self._reasons.get(choice.reason, 0) + 1
        rest = [name for name in self._engines if name not in choice.order]  # that fail: tried when all others did
        return [*choice.order, *rest]

    def _warm(self, prompt: Prompt) -> dict[str, Depths]:
        known = dict(self._dispatcher.index.longest_match(prompt.tokens)) if prompt.tokens else {}
        for name, memory in self._engines.items():
            if prompt.tokens and name in self._whole:
                continue
            depth = memory.depth(prompt.text)
            if prompt.tokens and depth:  # its text has about as many blocks
                depth = min(len(prompt.tokens), depth * len(prompt.tokens) // len(prompt.text))
            if depth:
                device, host, any_tier = known.get(name, (0, 0, 0))
                known[name] = max(device, depth), max(host, depth), max(any_tier, depth)
        return known

    def sent(self, number: int, engine: str) -> None:
        """Book a request where it is sent, which may be another server than the best."""
        self._dispatcher.in_flight.book(number, engine)

    def began(self, number: int, engine: str) -> None:
        """Take a prompt as computed: its answer begins."""
        self._dispatcher.in_flight.began(number)
        self._engines[engine].use(self._prompts[number].text)
        self._answered[engine] += 1

    def failed(self, number: int, engine: str) -> None:
        """Note that a server could not be reached or gave a request up; the request may go on to another."""
        self._dispatcher.ended(number, engine, "failed")
        self._engines[engine].clear()

    def ended(self, number: int, engine: str, outcome: Outcome) -> None:
        """Forget a request."""
        self._dispatcher.ended(number, engine, outcome)
        self._dispatcher.in_flight.release(number)
        self._prompts.pop(number, None)

    def taking(self) -> list[str]:
        """Return the servers that do not keep failing."""
        return list(self._dispatcher.breaker.taking(list(self._engines)))

    def figures(self) -> dict[str, Any]:
        """Return what each server has, and why requests went where they did."""
        load, taking = self._dispatcher.in_flight.load, set(self._dispatcher.breaker.taking(list(self._engines)))
        engines = {
            name: {
                "in_flight": load.get(name, 0),
                "answered": self._answered[name],
                "remembered_tokens": len(memory) * self.block_size,
                "known_tokens": self._dispatcher.index.blocks_of(name) * self.block_size,
                "taking": name in taking,
            }
            for name, memory in self._engines.items()
        }
        return {"engines": engines, "routed": dict(self._reasons)}
