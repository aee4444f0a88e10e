"""Token ids to text, as they come: incremental decoding and stop strings. Pure bookkeeping, off the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "�"  # what a tokenizer shows for a character whose bytes are not all there yet

LONGEST_CHARACTER = 8  # ids after which bytes that form no character are given out as they are


class Detokenizer:
    """Turns a growing list of token ids into text that never takes back what it gave out.

    Text that could still change (an incomplete character) or that may be the start of a stop string is held back.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        self._decode, self._stop = decode, [text for text in stop if text]
        self._ids = list(context)  # the prompt's last ids: a tokenizer may drop the space of a text's first word
        self._prefix = 0  # ids before this one only serve as context for the tokenizer
        self._read = len(self._ids)  # ids before this one are in `_pending` or given out
        self._pending = ""
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """Add a token; the text that is now certain. After a stop string was met: "" and `stopped_by` is set."""
        if self.stopped_by is not None:
            return ""
        self._ids.append(token)
        before = self._decode(self._ids[self._prefix : self._read])
        after = self._decode(self._ids[self._prefix :])
        incomplete = after.endswith(REPLACEMENT) and len(self._ids) - self._read < LONGEST_CHARACTER
        if len(after) <= len(before) or incomplete:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        self._pending += after[len(before) :]
        return self._release(final=False)

    def finish(self) -> str:
        """The rest, at the end of the answer."""
        if self.stopped_by is not None:
            return ""
        before = self._decode(self._ids[self._prefix : self._read])
        after = self._decode(self._ids[self._prefix :])
        self._pending += after[len(before) :]
        self._prefix = self._read = len(self._ids)
        return self._release(final=True)

    def _release(self, final: bool) -> str:
        found = [(at, text) for text in self._stop if (at := self._pending.find(text)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            text, self._pending = self._pending[:at], ""
            return text
        held = 0 if final else max((self._overlap(text) for text in self._stop), default=0)
        text, self._pending = self._pending[: len(self._pending) - held], self._pending[len(self._pending) - held :]
        return text

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the pending text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._pending))
        return next((n for n in range(longest, 0, -1) if self._pending.endswith(stop[:n])), 0)
