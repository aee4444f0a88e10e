"""What a server with a mixed token budget may do in a step and hold at a time."""

from __future__ import annotations

from dataclasses import dataclass

from warmkv.faults import UserError
from warmkv.simulator.engine.kv_blocks import BLOCK


class BatchingError(UserError):
    """Limits, or a request under them, with which no server could run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server may do in a step and hold at a time. Raises BatchingError for limits under which nothing runs."""

    max_num_seqs: int
    max_batched_tokens: int
    kv_tokens: int | None = None  # None: never short of memory
    kv_block: int = BLOCK  # tokens

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.kv_block < 1:
            raise BatchingError("max_num_seqs and kv_block must be at least 1")
        if self.max_batched_tokens < self.max_num_seqs:
            raise BatchingError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "every sequence takes a token of a step"
            )
        if self.kv_tokens is not None and self.kv_tokens < self.kv_block:
            raise BatchingError(f"kv_tokens ({self.kv_tokens}) must hold a block of {self.kv_block}")

    @property
    def blocks(self) -> int | None:
        return None if self.kv_tokens is None else self.kv_tokens // self.kv_block
