"""KV blocks of a running batch, which its sequences take as they grow."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

BLOCK = 16  # tokens, as in vLLM


class Holder(Protocol):
    """A request as far as its blocks go."""

    prompt: int  # tokens
    num_output_tokens: int
    computed: int  # tokens that have KV


Request = TypeVar("Request", bound=Holder)


class KVBlocks(Generic[Request]):
    """Count free blocks of `size` tokens, now and many decode steps ahead."""

    def __init__(self, blocks: int, size: int) -> None:
        self._all, self._size, self.free = blocks, size, blocks
        self._at = 0  # decode steps taken so far, modulo `size`
        self._growing = 0  # sequences that decode
        self._phases = [0] * size  # of them, those that need a new block in the step of that number, modulo `size`

    def fit(self, request: Request) -> bool:
        """Return True if there are blocks for all tokens of a request that holds none."""
        return self._of(request.prompt + request.num_output_tokens) <= self.free

    def ever_fit(self, tokens: int) -> bool:
        """Return True if there would be blocks for so many tokens if nothing ran."""
        return self._of(tokens) <= self._all

    def begin(self, request: Request) -> None:
        """Hold the blocks of the tokens that a request need not compute."""
        self._take(self._of(request.computed))

    def extend(self, request: Request, end: int) -> bool:
        """Extend a request to `end` tokens; False, and nothing taken, if there are no blocks for them."""
        blocks = self._of(end) - self._of(request.computed)
        if blocks > self.free:
            return False
        self._take(blocks)
        return True

    def release(self, request: Request) -> None:
        """Give back the blocks of a request."""
        self.free += self._of(request.computed)

    def exhaust(self) -> None:
        """Take note that those admitted before the one that is preempted next took all that was free."""

    def join(self, tokens: int) -> None:
        """Let a sequence of so many tokens take one more in every step."""
        self._growing += 1
        self._phases[(self._at - tokens) % self._size] += 1

    def leave(self, tokens: int) -> None:
        """Let a sequence of so many tokens grow no more."""
        self._growing -= 1
        self._phases[(self._at - tokens) % self._size] -= 1

    def grow(self, steps: int) -> None:
        """Take the blocks of the next decode steps."""
        self._take(self._needed(steps))
        self._at = (self._at + steps) % self._size

    def steps_that_fit(self, most: int) -> int:
        """Return the largest number of decode steps, up to `most`, for which there are blocks."""
        if self._needed(most) <= self.free:
            return most
        low, high = 0, most - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._needed(middle) <= self.free:
                low = middle
            else:
                high = middle - 1
        return low

    def _take(self, blocks: int) -> None:
        self.free -= blocks

    def _of(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def _needed(self, steps: int) -> int:
        rounds, rest = divmod(steps, self._size)
        return rounds * self._growing + sum(self._phases[(self._at + step) % self._size] for step in range(rest))
