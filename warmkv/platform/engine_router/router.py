"""Which of several running servers a request goes to, by what the router itself sent where. Without HTTP.

The decision is that of the gateways (`policies/dispatcher.py`): warm blocks, load, prompts in flight, failures. What a
server holds is not reported but remembered: the blocks of the prompts that it answered, the least recently used leave
first, as in vLLM, beyond its capacity and after a time.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from warmkv.config import Config
from warmkv.policies.breaker import Outcome
from warmkv.policies.dispatcher import Dispatcher
from warmkv.prefixes import hashing, prompt_text

BLOCK = 64  # tokens
NO_SESSION = b""


class EngineMemory:
    """Blocks that a server is taken to hold: at most `blocks`, each for `ttl` seconds after its last use."""

    def __init__(self, blocks: int, ttl: float, clock: Callable[[], float]) -> None:
        self._blocks, self._ttl, self._clock = blocks, ttl, clock
        self._expires: OrderedDict[bytes, float] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._expires)

    def depth(self, hashes: Sequence[bytes]) -> int:
        """Count the leading blocks of a prompt that are held. Ends of chains leave first, so a bisection finds it."""
        now, low, high = self._clock(), 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if self._expires.get(hashes[middle - 1], now) > now:
                low = middle
            else:
                high = middle - 1
        return low

    def use(self, hashes: Sequence[bytes]) -> None:
        """Take a prompt's blocks as used now."""
        expires = self._clock() + self._ttl
        for key in reversed(hashes):
            self._expires[key] = expires
            self._expires.move_to_end(key)
        while len(self._expires) > self._blocks:
            self._expires.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the server was away, and may have begun anew."""
        self._expires.clear()


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
    ) -> None:
        routing = config.routing.model_copy(update={"transfer": False})  # the servers do not know each other
        self._dispatcher = Dispatcher(routing, config.engine.max_slots, random, clock)
        self._engines = {name: EngineMemory(max(1, kv_tokens // BLOCK), ttl, clock) for name in engines}
        self._prompts: dict[int, Sequence[bytes]] = {}  # of requests that have not ended
        self._answered = dict.fromkeys(engines, 0)
        self._reasons: dict[str, int] = {}

    def choose(self, number: int, body: bytes) -> list[str]:
        """Rank the servers for a request's body, best first, and book it on the first."""
        hashes, session = _prompt(body)
        depths = {name: memory.depth(hashes) for name, memory in self._engines.items()}
        choice = self._dispatcher.choose(
            number,
            hashes,
            list(self._engines),
            warm={name: (depth, depth, depth) for name, depth in depths.items() if depth},
            leaves=len(hashes),
            session=session,
        )
        self._prompts[number] = hashes
        self._reasons[choice.reason] = self._reasons.get(choice.reason, 0) + 1
        rest = [name for name in self._engines if name not in choice.order]  # that fail: tried when all others did
        return [*choice.order, *rest]

    def sent(self, number: int, engine: str) -> None:
        """Book a request where it is sent, which may be another server than the best."""
        self._dispatcher.in_flight.book(number, engine)

    def began(self, number: int, engine: str) -> None:
        """Take a prompt as computed: its answer begins."""
        self._dispatcher.in_flight.began(number)
        self._engines[engine].use(self._prompts[number])
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

    def taking(self) -> int:
        """Count the servers that do not keep failing."""
        return len(self._dispatcher.breaker.taking(list(self._engines)))

    def figures(self) -> dict[str, Any]:
        """Return what each server has, and why requests went where they did."""
        load, taking = self._dispatcher.in_flight.load, set(self._dispatcher.breaker.taking(list(self._engines)))
        engines = {
            name: {
                "in_flight": load.get(name, 0),
                "answered": self._answered[name],
                "remembered_tokens": len(memory) * BLOCK,
                "taking": name in taking,
            }
            for name, memory in self._engines.items()
        }
        return {"engines": engines, "routed": dict(self._reasons)}


def _prompt(body: bytes) -> tuple[Sequence[bytes], bytes]:
    """Return the blocks of a request's prompt, and the session that it names; neither if it is no JSON object."""
    try:
        asked = json.loads(body) if body else None
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        return (), NO_SESSION
    root = hashing.chain_root(b"", str(asked.get("model", "")))
    parts = [part._replace(ttl=None) for part in prompt_text.parts_of(asked)]
    session = asked.get("prompt_cache_key")
    named = session.encode("utf-8", "surrogatepass") if isinstance(session, str) else NO_SESSION
    return prompt_text.plan(parts, root, BLOCK, prompt_text.BYTES_PER_TOKEN).plan.hashes, named
