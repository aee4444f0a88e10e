"""What running replicas hold, as prompts: a replay that begins with it lays these out beside its own."""

from __future__ import annotations

from collections.abc import Sequence

from warmkv.policies.contents import Contents
from warmkv.policies.prefix_tree.held import HeldBlock
from warmkv.prefixes.record import Mark, RequestRecord


def prompts_of(held: Sequence[Contents], size: int) -> list[RequestRecord]:
    """Return a prompt for each chain of full blocks of `size` tokens that ends or has a breakpoint, and each tail.

    What follows a block that is not held is left out.
    """
    blocks = {block.key: block for contents in held for tier in contents.tiers.values() for block in tier}
    followed = {block.parent for block in blocks.values() if block.tokens == size}
    found = []
    for block in blocks.values():
        if block.tokens and (block.tokens < size or block.mark_ttl or block.key not in followed):
            chain = _chain(block, blocks)
            if chain is not None:
                found.append(_prompt(chain, block, size))
    return found


def _chain(block: HeldBlock, blocks: dict[bytes, HeldBlock]) -> list[bytes] | None:
    """Return the keys from the first block to this one; None if one is not held."""
    chain = [block.key]
    while block.parent:
        if block.parent not in blocks:
            return None
        block = blocks[block.parent]
        chain.append(block.key)
    return chain[::-1]


def _prompt(chain: list[bytes], last: HeldBlock, size: int) -> RequestRecord:
    full = chain if last.tokens == size else chain[:-1]
    tokens = (len(chain) - 1) * size + last.tokens
    marked = last.tokens < size or last.mark_ttl > 0
    return RequestRecord(
        id="", arrival=0.0, tenant=last.tenant, model="", api="", policy="", block_size=size, input_tokens=tokens,
        output_tokens=0, hashes=tuple(full), marks=(Mark(tokens, "", last.key),) if marked else (),
    )  # fmt: skip
