"""Time of a routing decision, in an index of very many blocks and beside the prefix tree of Ray Serve's own router.

Both know the same number of prompts, spread over the same replicas, and answer the same question: which replicas hold
the longest beginning of this one? The decision of warmkv includes ranking the replicas and booking the best; of the
peer only the tree's match is timed, in its own process, without the remote calls that its router makes to reach it.
"""

from __future__ import annotations

import importlib.util
import pickle
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from benchmarks.engine.results import Results
from warmkv.config import DirectoryConfig, RoutingConfig
from warmkv.measuring.clock import now
from warmkv.platform.prefix_directory import PrefixDirectory
from warmkv.policies.dispatcher import Dispatcher
from warmkv.prefixes.index import PrefixIndex
from warmkv.prefixes.mask_table import pack
from warmkv.replicas.protocol import BlockEvents

CHAIN, SHARED = 256, 32  # blocks of a prompt; the first of them are shared by GROUP prompts
GROUP = 8
SLOTS = 16
IN_FLIGHT = 2  # requests for each replica, all of them in prefill
QUESTIONS = 2_000  # decisions in a repeat
TREE_PROMPTS = 2_000  # that the tree knows: 64 MB of text
CHARACTERS = 32_000

Request = TypeVar("Request")


def replicas(count: int) -> list[str]:
    return [f"replica-{number}" for number in range(count)]


def prompts(blocks: int, chance: random.Random) -> Iterator[tuple[list[bytes], int]]:
    """Yield hashes of prompts of 256 blocks with the number of their group; together about `blocks` distinct blocks."""
    own = CHAIN - SHARED
    shared: list[bytes] = []
    for number in range(blocks * GROUP // (own * GROUP + SHARED)):
        if number % GROUP == 0:
            shared = [chance.randbytes(16) for _ in range(SHARED)]
        yield [*shared, *(chance.randbytes(16) for _ in range(own))], number // GROUP


def fill(index: PrefixIndex, blocks: int, names: list[str], chance: random.Random) -> list[list[bytes]]:
    """Place every prompt on one replica, its shared beginning on all that have a prompt of its group.

    Returns prompts to ask for, from all of the index: each a known one, cut at random and continued with new blocks.
    """
    known = []
    for number, (hashes, _) in enumerate(prompts(blocks, chance)):
        index.add(names[number % len(names)], pack(hashes))
        known.append(hashes)
    questions = []
    for hashes in chance.sample(known, min(QUESTIONS, len(known))):
        cut = chance.randrange(CHAIN + 1)
        questions.append([*hashes[:cut], *(chance.randbytes(16) for _ in range(CHAIN - cut))])
    return questions


def arriving(requests: list[Request]) -> Iterator[Request]:
    """Yield requests as they come to a router: made a moment ago, and not lying about in memory since long before."""
    return (pickle.loads(pickle.dumps(request)) for request in requests)


def worst(index: PrefixIndex, names: list[str], chance: random.Random) -> list[bytes]:
    """Return a prompt of which every replica holds another share: nothing can be bisected together."""
    hashes = [chance.randbytes(16) for _ in range(CHAIN)]
    for number, name in enumerate(names, start=1):
        index.add(name, pack(hashes[: CHAIN * number // len(names)]))
    return hashes


def race_decisions(
    blocks: int, count: int, repeats: int, seed: int, results: Results, say: Callable[[str], None]
) -> Iterator[None]:
    """Yield microseconds of a decision at 256-block prompts, and of checking the match that it relied on afterwards.

    A repeat at a time, so that it may take turns with `race_tree`.
    """
    chance, names = random.Random(seed), replicas(count)
    dispatcher = Dispatcher(RoutingConfig(), SLOTS, random.Random(seed), clock=time.monotonic)
    say(f"an index of {blocks} blocks on {count} replicas")
    questions = fill(dispatcher.index, blocks, names, chance)
    results.add("index_bytes_per_block", dispatcher.index.nbytes / len(dispatcher.index))
    hardest = worst(dispatcher.index, names, chance)
    for repeat in range(1, repeats + 1):
        say(f"decisions {repeat}/{repeats}")
        for name, asked in (("", questions), ("worst_", [hardest] * len(questions))):
            choosing, mending = [], []
            for number, hashes in enumerate(arriving(asked)):
                began = now()
                choice = dispatcher.choose(number, hashes, names, leaves=len(hashes))
                chosen = now()
                dispatcher.mend(choice, hashes)
                mending.append(now() - chosen)
                choosing.append(chosen - began)
                dispatcher.in_flight.release(number - IN_FLIGHT * count)
            for number in range(len(asked)):
                dispatcher.in_flight.release(number)
            for what, times in (("decision", sorted(choosing)), ("mend", sorted(mending))):
                results.add(f"{name}{what}_microseconds_p50", 1e6 * times[len(times) // 2])
                results.add(f"{name}{what}_microseconds_p99", 1e6 * times[len(times) * 99 // 100])
        yield


async def race_directory(blocks: int, count: int, results: Results, say: Callable[[str], None]) -> None:
    """Bytes of a directory that knows `blocks` blocks, and the seconds in which snapshots bring an empty one there."""
    chance, names = random.Random(0), replicas(count)
    held: dict[str, list[bytes]] = {name: [] for name in names}
    for number, (hashes, _) in enumerate(prompts(blocks, chance)):
        held[names[number % count]] += hashes
    say(f"a directory of {blocks} blocks")
    directory = PrefixDirectory(DirectoryConfig(max_blocks=2 * blocks))
    began = now()
    for name, keys in held.items():
        await directory.publish(name, [BlockEvents(0, pack(keys), snapshot=True)])
    results.add("directory_rebuild_seconds", now() - began)
    results.add("directory_bytes_per_block", directory.nbytes / (await directory.status())["blocks"])


def race_tree(count: int, repeats: int, seed: int, results: Results, say: Callable[[str], None]) -> Iterator[None]:
    """Yield microseconds of a match of 32,000 characters in the prefix tree of Ray Serve's PrefixCacheAffinityRouter.

    A repeat at a time.
    """
    module = prefix_tree()
    if module is None:
        results.note("Ray's prefix tree is not installed here: nothing to compare with")
        return
    chance, names = random.Random(seed), replicas(count)
    tree = module.PrefixTree()
    tree.add_tenants(names, 0.0)
    cut = CHARACTERS * SHARED // CHAIN
    known, shared = [], ""
    say(f"a tree of {TREE_PROMPTS} prompts of {CHARACTERS} characters")
    for number in range(TREE_PROMPTS):
        if number % GROUP == 0:
            shared = _text(cut, chance)
        known.append(shared + _text(CHARACTERS - cut, chance))
        tree.insert(known[-1], names[number % count], float(number))
    asked = []
    for text in chance.sample(known, min(QUESTIONS // 10, len(known))):
        kept = chance.randrange(CHARACTERS + 1)
        asked.append(text[:kept] + _text(CHARACTERS - kept, chance))
    for repeat in range(1, repeats + 1):
        say(f"matches in the tree {repeat}/{repeats}")
        times = []
        for text in arriving(asked):
            began = now()
            tree.prefix_match(text, names)
            times.append(now() - began)
        times.sort()
        results.add("tree_match_microseconds_p50", 1e6 * times[len(times) // 2])
        yield


def prefix_tree() -> ModuleType | None:
    """Return the peer's module, by its file: the package around it wants an inference engine to be installed."""
    ray = importlib.util.find_spec("ray")
    if ray is None or ray.origin is None:
        return None
    path = Path(ray.origin).parent / "llm/_internal/serve/routing_policies/prefix_aware/prefix_tree.py"
    spec = importlib.util.spec_from_file_location("prefix_tree", path)
    if not path.exists() or spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _text(length: int, chance: random.Random) -> str:
    return chance.randbytes(length).translate(_LETTERS).decode("ascii")


_LETTERS = bytes(97 + number % 26 for number in range(256))
