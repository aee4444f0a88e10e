"""Chains of blocks on their way from one simulated replica to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from warmkv.policies.prefix_cache import sums_key
from warmkv.policies.prefix_tree.nodes import EXPIRED, Copy, Node
from warmkv.policies.prefix_tree.tree import Life, Path, PrefixTree
from warmkv.policies.transfer import pieces
from warmkv.simulator.cache.layout import NONE, Layout, Prompt
from warmkv.simulator.cache.nodes import Nodes, parts_of, upto


@dataclass(frozen=True, slots=True)
class MovedBlock:
    """A block, tail or column sums on the way to another replica. Times in its life are seconds that are left."""

    key: bytes
    number: int  # of its run
    place: int  # in the run
    size: int  # bytes
    life: Life
    tenant: str
    sums: int = 0  # bytes of column sums uncompressed; 0 for KV


Chain = Sequence[MovedBlock]


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Blocks on their way from one replica to another."""

    nbytes: int
    blocks: int = 0  # leading blocks of the prompt that are there once it has arrived
    more: bool = False  # whether the donor has more than fits into one
    chains: Sequence[Chain] = ()  # from their first blocks on


class Chains:
    """What a replica can give to others, block by block: what its tiers in `memory` hold. Times are virtual seconds."""

    def __init__(self, layout: Layout, nodes: Nodes, tree: PrefixTree, memory: Sequence[int]) -> None:
        self._layout, self._nodes, self._tree, self._memory = layout, nodes, tree, memory

    def lend(self, prompt: Prompt, first: int, last: int, most: int, sums: bool, now: float) -> BlockTransfer:
        """Return blocks of a prompt from number `first` on and before `last`, as far as they are in memory here.

        At most `most` bytes, but at least a block. With the last of them come tails that may be read; with `sums`, no
        more blocks than there are column sums for, and these as well.
        """
        nodes = self._nodes.held(prompt.runs)
        path = self._blocks(nodes, now)[:last]
        beside = [
            (read.blocks, node, block)
            for read in prompt.reads
            if read.is_tail and read.blocks <= len(path) and (node := self._nodes.by_number[read.number]) is not None
            for block in self._blocks([node], now)
        ]
        ends = dict(_ends(nodes))
        summed: list[tuple[int, Chain]] = []
        if sums:
            behind = [(end, node, path[:end]) for end, node in ends.items() if end <= len(path)]
            behind += [(end, node, [*path[:end], block]) for end, node, block in beside]
            summed = [
                (end, [*chain, block]) for end, node, chain in behind for block in self._sums(node, chain[-1], now)
            ]
            path = path[: max([end for end, _ in summed], default=0)]
            beside = [(end, node, block) for end, node, block in beside if end <= len(path)]
        sizes = [block.size for block in path[first:]]
        piece = next(pieces(sizes, most), range(0))
        if piece.stop < len(sizes):
            end = first + piece.stop
            return BlockTransfer(sum(sizes[: piece.stop]), end, True, [path[:end]])
        chains = [path, *([*path[:end], block] for end, _, block in beside), *(chain for _, chain in summed)]
        nbytes = sum(block.size for _, _, block in beside) + sum(chain[-1].size for _, chain in summed)
        return BlockTransfer(sum(sizes) + nbytes, len(path), False, [chain for chain in chains if chain])

    def holds(self, chain: Chain, now: float) -> bool:
        """Return True if all of a chain is in memory."""
        path = self._nodes.held(numbers(chain))
        held = self._blocks(path, now)
        if chain and chain[-1].sums:
            return len(held) >= len(chain) - 1 and bool(self._sums(path[-1], chain[-2], now))
        return len(held) >= len(chain)

    def hottest(self, most: int, now: float) -> list[Chain]:
        """Return chains in memory, what would be evicted last first, together at most so many bytes.

        Of the chain that does not fit there is the beginning.
        """
        chains: list[Chain] = []
        taken: set[bytes] = set()
        every = [node for node in self._nodes.by_number if node is not None]
        every = [part for node in every for part in parts_of(node)]
        every += [node.sums for node in every if node.sums is not None]
        for tier in self._memory:
            copies = [copy for node in every if (copy := node.copies[tier]).held]
            for end in self._tree.spaces[tier].by_worth(copies):
                chain = self._chain_to(end, now)
                for held, block in enumerate(chain):
                    if block.key in taken:
                        continue
                    most -= block.size
                    if most < 0:
                        return [*chains, chain[:held]] if held else chains
                    taken.add(block.key)
                if chain:
                    chains.append(chain)
        return chains

    def has(self, block: MovedBlock) -> bool:
        """Return True if some tier holds a block, as routers know it: column sums are not told."""
        node = self._nodes.by_number[block.number]
        return not block.sums and node is not None and sum(part.span for part in parts_of(node)) > block.place

    def _blocks(self, path: Path, now: float) -> list[MovedBlock]:
        """Return the leading blocks of nodes that are in memory."""
        found: list[MovedBlock] = []
        number, place = NONE, 0
        for node in path:
            if node.number != number:
                number, place = node.number, 0
                keys = self._layout.keys(number)
            for at in range(node.length):
                block = self._block(node, at, keys[place], place, now)
                if block is None:
                    return found
                found.append(block)
                place += 1
        return found

    def _sums(self, node: Node, behind: MovedBlock, now: float) -> list[MovedBlock]:
        """Return the column sums at the end of a node, whose last block is `behind`, if they are in memory."""
        sums = node.sums
        block = None if sums is None else self._block(sums, 0, sums_key(behind.key), behind.place, now)
        return [] if block is None or sums is None else [replace(block, number=behind.number, sums=sums.plain)]

    def _block(self, node: Node, at: int, key: bytes, place: int, now: float) -> MovedBlock | None:
        """Return a block of a node as the fastest tier in memory has it."""
        copy = next((copy for tier in self._memory if (copy := node.copies[tier]).held > at), None)
        if copy is None or node.expires <= now:
            return None
        mark = (node.mark_ttl, node.mark_expires - now) if at == node.length - 1 else (0.0, EXPIRED)
        life = (node.ttl, node.expires - now, *mark, node.reads)
        return MovedBlock(key, node.number, place, copy.size, life, copy.tenant)

    def _chain_to(self, end: Copy, now: float) -> list[MovedBlock]:
        """Return the blocks in memory of the path up to the last block of a copy."""
        path, blocks = end.node.path(), end.held
        if end.node.number == NONE:  # column sums
            path, blocks = path[:-1], path[-2].length
        blocks += sum(node.length for node in path[:-1])
        chain = self._blocks(path, now)[:blocks]
        if end.node.number == NONE and len(chain) == blocks:
            chain += self._sums(path[-1], chain[-1], now)
        return chain

    def parts(self, chain: Chain, now: float) -> Iterator[tuple[Path, int, Life]]:
        """Yield the path to the end of each part of a chain that has one life, and its blocks of the last node."""
        for at, block in enumerate(chain):
            following = chain[at + 1] if at + 1 < len(chain) else None
            if following is not None and following.life == block.life and not following.sums:
                continue
            until = chain[: at + 1 - bool(block.sums)]
            path = self._nodes.path(numbers(until))
            blocks = until[-1].place + 1 + sum(self._layout.runs[run].blocks for run in numbers(until)[:-1])
            path, last = upto(path, blocks)
            if block.sums:
                path = self._tree.cut(path, blocks)
                path.append(self._nodes.sums_of(path[-1], block.sums))
                last = 1
            ttl, expires, mark_ttl, mark_expires, reads = block.life
            yield path, last, (ttl, expires + now, mark_ttl, mark_expires + now, reads)


def _ends(path: Path) -> Iterator[tuple[int, Node]]:
    """Yield each node of a path with the blocks up to its end."""
    blocks = 0
    for node in path:
        blocks += node.length
        yield blocks, node


def numbers(chain: Chain) -> list[int]:
    """Return the runs of a chain."""
    return list(dict.fromkeys(block.number for block in chain))
