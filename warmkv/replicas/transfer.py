"""Fetching warm blocks from another replica, beside the engine, where that is faster than to compute them.

Nothing here can fail a request: whatever goes wrong, or takes too long, is counted, and the prompt is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from warmkv import recorders, telemetry
from warmkv.policies import budgets
from warmkv.policies.transfer import (
    CONCURRENT,
    HANDOVER_BYTES,
    Fetch,
    TransferTerms,
    TransferTimes,
    choose_successor,
    pieces,
)
from warmkv.replicas.block_store.exchange import BlockPayload, StoredBlock, hottest, lend, seal, take, unseal
from warmkv.replicas.engine.engine import Engine
from warmkv.replicas.protocol import BlocksWanted, GenerateRequest, Started, ToReplica

log = logging.getLogger(__name__)

Chain = tuple[bytes, ...]
Ask = Callable[["BlocksWanted"], Awaitable["BlockPayloads"]]
"""Sends a question to the replica that it names and returns the answer; it may raise anything."""

Result = Literal["fetched", "empty", "slower", "late", "failed"]
"""Of a fetch: something came; the donor had nothing; computing is faster, so it was not made; too slow; a fault."""


@dataclass(frozen=True, slots=True)
class BlockPayloads:
    """What a donor has of the blocks that were wanted, and whether there is more to ask for."""

    payloads: tuple[BlockPayload, ...] = ()
    more: bool = False


@dataclass(frozen=True, slots=True)
class BlocksOffered(ToReplica):
    """Blocks for another replica, from one that is stopped."""

    identity: Mapping[str, Any]  # of the KV
    payloads: tuple[BlockPayload, ...]


class Transfers:
    """What a replica fetches from others and lends to them. Belongs to one event loop.

    `clock` is in seconds.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        terms: TransferTerms,
        ask: Ask,
        recorder: recorders.Recorder,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._name, self._terms, self._ask = engine, name, terms, ask
        self._recorder, self._clock = recorder, clock
        self._flights: dict[bytes, asyncio.Task[bool]] = {}  # by the blocks that they are to bring
        self._fetching, self._lending = asyncio.Semaphore(CONCURRENT), asyncio.Semaphore(CONCURRENT)
        self.times = TransferTimes.of(terms)

    # --- who fetches

    def started(self, request: GenerateRequest, started: Started) -> None:
        """Learn from a prompt how long prefill takes here."""
        if computed := len(request.token_ids) - started.cached_tokens:
            self.times = self.times.computed(computed, started.prefill_seconds)

    def helps(self, request: GenerateRequest) -> bool:
        """Return True if a request's router knows of another replica that may have what it lacks here."""
        fetch = request.fetch if request.sampling.prompt_logprobs is None else None  # else all of it is computed
        return fetch is not None and fetch.donor != self._name and self._engine.store.enabled

    async def prepare(self, request: GenerateRequest) -> None:
        """Fetch what a request lacks, if its router knows where that is; return within the time limit."""
        fetch = request.fetch
        if fetch is None or not self.helps(request):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._terms.timeout_seconds):
                await self._bring(request, fetch, request.hashes[: fetch.blocks])

    async def _bring(self, request: GenerateRequest, fetch: Fetch, keys: Sequence[bytes]) -> None:
        """Wait for others who fetch the same, then fetch what is lacking still."""
        store = self._engine.store
        size = store.block_size
        block_bytes = store.places[0].tier.weigh(size * store.identity.shape.token_bytes, size)
        while (known := store.leading(keys))[1] < len(keys):
            memory, held = known
            flight = self._flights.get(keys[memory])
            if flight is None:
                gain = self.times.gain((len(keys) - held) * size, (len(keys) - memory) * block_bytes)
                if gain <= 0 and not fetch.always:
                    self.times = self.times.declined()
                    self._count("slower")
                else:
                    flight = asyncio.create_task(self._fly(request, fetch.donor, keys))
                    self._flights |= dict.fromkeys(keys[memory:], flight)
                    await asyncio.shield(flight)
                return
            if not await asyncio.shield(flight):
                return

    async def _fly(self, request: GenerateRequest, donor: str, keys: Sequence[bytes]) -> bool:
        """Fetch blocks piece by piece, those that are lacking in memory; whether any came."""
        store, nbytes, more = self._engine.store, 0, True
        began: float | None = None  # not before it is its turn
        result: Result
        try:
            async with asyncio.timeout(self._terms.timeout_seconds), self._fetching:
                began = self._clock()
                while more and (first := store.leading(keys)[0]) < len(keys):
                    answer = await self._ask(self._wanted(request, donor, tuple(keys), first))
                    blocks = await asyncio.to_thread(self._unpack, answer.payloads)
                    held = await asyncio.wrap_future(self._engine.between_steps(partial(take, store, blocks)))
                    nbytes += sum(payload.nbytes for payload in answer.payloads)
                    more = answer.more and held == len(blocks)  # the store's limits may not let all of it in
            result = "fetched" if nbytes else "empty"
        except TimeoutError:
            result = "late"
        except Exception as error:
            log.warning("blocks could not be fetched and are computed: %s: %s", type(error).__name__, error)
            result = "failed"
        finally:
            this = asyncio.current_task()
            self._flights = {key: flight for key, flight in self._flights.items() if flight is not this}
        if began is not None and result != "failed":
            seconds = self._clock() - began
            self.times = self.times.fetched(nbytes, seconds)
            self._recorder.observe(telemetry.FETCH_SECONDS, seconds)
        self._count(result)
        self._recorder.add(telemetry.FETCHED_BYTES, nbytes)
        return nbytes > 0

    def _wanted(self, request: GenerateRequest, donor: str, keys: tuple[bytes, ...], first: int) -> BlocksWanted:
        store, tokens = self._engine.store, len(request.token_ids)
        tails = tuple(read.key for read in request.reads if read.position % store.block_size)
        policy = budgets.in_force(request.policy, tokens, request.sampling.max_tokens)
        sums = budgets.needs_column_sums(policy, tokens)
        return BlocksWanted(donor, store.identity.document(), keys, first, tails, sums)

    def _unpack(self, payloads: Sequence[BlockPayload]) -> list[StoredBlock]:
        """Return blocks as the first tier keeps them, in a thread beside the engine's. Raises PayloadError."""
        place, identity = self._engine.store.places[0], self._engine.store.identity
        blocks = [unseal(payload, identity, ("model", place.tier.storage)) for payload in payloads]
        return [(header, place.converted(packed)) for header, packed in blocks]

    def _count(self, result: Result) -> None:
        self._recorder.add(telemetry.FETCHES, 1, result=result)

    # --- who lends

    async def lend(self, wanted: BlocksWanted) -> BlockPayloads:
        """Return the wanted blocks that are here; nothing if the other replica's KV is of another kind."""
        store = self._engine.store
        if not store.enabled or store.identity.differs(wanted.identity):
            return BlockPayloads()
        most = self._terms.piece_bytes
        choose = partial(lend, store, wanted.keys, wanted.first, wanted.tails, most, sums=wanted.sums)
        async with self._lending:
            blocks, more = await asyncio.wrap_future(self._engine.between_steps(choose))
            payloads = await asyncio.to_thread(_sealed, blocks)
        return BlockPayloads(payloads, more)

    # --- who leaves, and who stays

    async def hand_over(
        self,
        peers: Sequence[str],
        holders: Callable[[Sequence[bytes]], Awaitable[Mapping[bytes, Sequence[str]]]],
        offer: Callable[[BlocksOffered], Awaitable[int]],
    ) -> int:
        """Give the hottest chains to other replicas, within the limits; how many blocks and tails they took.

        `holders` tells which replicas hold the blocks that some hold. What one fails to take goes to the others.
        """
        terms, store, taken = self._terms, self._engine.store, 0

        async def give(peer: str, share: Sequence[tuple[Chain, int]]) -> list[Chain]:
            """Offer chains without their first entries, piece by piece; those that were not taken."""
            nonlocal taken
            keys = [(key, chain) for chain, known in share for key in chain[known:]]
            for piece in pieces((blocks[key][1].nbytes for key, _ in keys), terms.piece_bytes):
                try:
                    payloads = await asyncio.to_thread(_sealed, [blocks[keys[at][0]] for at in piece])
                    async with asyncio.timeout(terms.timeout_seconds):
                        taken += await offer(BlocksOffered(peer, store.identity.document(), payloads))
                except Exception as error:
                    log.warning("%s takes no blocks over: %s: %s", peer, type(error).__name__, error)
                    return list(dict.fromkeys(chain for _, chain in keys[piece.start :]))
            return []

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(terms.handover_seconds):
                choose = partial(hottest, store, HANDOVER_BYTES)
                chains, blocks = await asyncio.wrap_future(self._engine.between_steps(choose))
                held = dict(await holders(list(blocks)))
                while chains and peers:
                    shares: dict[str, list[tuple[Chain, int]]] = {}
                    for chain in chains:
                        peer, known = choose_successor(chain, peers, held)
                        shares.setdefault(peer, []).append((chain, known))
                        held |= {key: [*held.get(key, ()), peer] for key in chain[known:]}
                    rests = await asyncio.gather(*(give(peer, share) for peer, share in shares.items()))
                    left = dict(zip(shares, rests, strict=True))
                    peers = [peer for peer in peers if not left.get(peer)]
                    chains = [chain for rest in left.values() for chain in rest]
        return taken

    async def take_over(self, offered: BlocksOffered) -> int:
        """Keep blocks of a replica that leaves, within all limits; how many are held now.

        Raises PayloadError where they are not what they should be.
        """
        store = self._engine.store
        if not store.enabled or store.identity.differs(offered.identity):
            return 0
        blocks = await asyncio.to_thread(self._unpack, offered.payloads)
        taken = await asyncio.wrap_future(self._engine.between_steps(partial(take, store, blocks)))
        self._recorder.add(telemetry.HANDED_BYTES, sum(payload.nbytes for payload in offered.payloads))
        return taken


def _sealed(blocks: Sequence[StoredBlock]) -> tuple[BlockPayload, ...]:
    """Return parcels of blocks. Takes a while where they are on a GPU."""
    return tuple(map(seal, blocks))
