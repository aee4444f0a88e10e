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
        self._decode, self._stop = decode, [StopSearch(text) for text in stop if text]
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
        if len(after) <= len(before) and len(self._ids) - self._read >= LONGEST_CHARACTER:
            del self._ids[self._read :]  # special tokens, which show no text: decoded no more
        if len(after) <= len(before) or incomplete:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return self._release(after[len(before) :], final=False)

    def finish(self) -> str:
        """Return the remaining text at the end of the answer."""
        if self.stopped_by is not None:
            return ""
        before = self._decode(self._ids[self._prefix : self._read])
        after = self._decode(self._ids[self._prefix :])
        self._prefix = self._read = len(self._ids)
        return self._release(after[len(before) :], final=True)

    def _release(self, new: str, final: bool) -> str:
        """Add text. Of stop strings that are complete now, the one that begins first counts."""
        begin = len(self._pending)
        self._pending += new
        ends = [(begin + end - len(search.text), search.text) for search in self._stop if (end := search.feed(new))]
        if ends:
            at, self.stopped_by = min(ends)
            text, self._pending = self._pending[:at], ""
            return text
        held = 0 if final else max((search.matched for search in self._stop), default=0)
        text, self._pending = self._pending[: len(self._pending) - held], self._pending[len(self._pending) - held :]
        return text


class StopSearch:
    """Looks for a stop string in text that comes in pieces: Knuth, Morris and Pratt (1977), so in linear time.

    `matched` is the length of the longest end of the text so far that begins the stop string.
    """

    def __init__(self, text: str) -> None:
        self.text, self.matched = text, 0
        self._shorter = [0]  # the next shorter such end, for every length matched
        matched = 0
        for character in text[1:]:
            while matched and character != text[matched]:
                matched = self._shorter[matched - 1]
            matched += character == text[matched]
            self._shorter.append(matched)

    def feed(self, new: str) -> int:
        """Add text; returns how many of its characters end the first occurrence, 0 if there is none."""
        if not self.matched and self.text[0] not in new:
            return 0
        text, matched = self.text, self.matched
        for number, character in enumerate(new, 1):
            while matched and character != text[matched]:
                matched = self._shorter[matched - 1]
            matched += character == text[matched]
            if matched == len(text):
                return number
        self.matched = matched
        return 0
