"""Token ids to text, as they come: incremental decoding and stop strings. Pure bookkeeping, off the engine's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "�"  # what a tokenizer shows for a character whose bytes are not all there yet

LONGEST_CHARACTER = 8  # ids after which bytes that form no character are given out as they are


class Detokenizer:
    """Turns a growing list of token ids into text that never takes back what it gave out.

    Text that could still change (an incomplete character) or that may be the start of a stop string is held back.
    `context` are the prompt's last ids: a tokenizer may drop the space of a text's first word. `tokenizer` is of the
    tokenizers library, whose DecodeStream is used, or has the same `decode`, as those of transformers in Python have.
    Special tokens show no text, but for `shown`. Stop strings are looked for behind the first `min_tokens` ids.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        context: Sequence[int] = (),
        shown: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer, self._stop = tokenizer, [StopSearch(text) for text in stop if text]
        self._shown = {token: tokenizer.decode([token], skip_special_tokens=False) for token in shown}
        self._unstoppable = min_tokens  # ids to come whose text ends nothing
        self._context: list[int] = []  # ids of the last text that was certain
        self._unread: list[int] = []  # and those since
        self._stream: DecodeStream | None
        self._begin(list(context))
        self._pending = ""
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """Add a token; the text that is now certain. After a stop string was met: "" and `stopped_by` is set."""
        if self.stopped_by is not None:
            return ""
        self._unstoppable -= 1
        if token in self._shown:
            text = self._unread_text() + self._shown[token]
            self._begin(self._unread or self._context)
            return self._release(text, final=False)
        self._unread.append(token)
        text = self._certain_text() if self._stream is None else self._stream.step(self._tokenizer, token)
        if text is None:
            if len(self._unread) < LONGEST_CHARACTER:
                return ""
            text = self._unread_text()  # special tokens, which show none, or bytes that form no character
            self._begin(self._unread if text else self._context)
        else:
            self._context, self._unread = self._unread, []
        return self._release(text, final=False)

    def finish(self) -> str:
        """Return the remaining text at the end of the answer."""
        return "" if self.stopped_by is not None else self._release(self._unread_text(), final=True)

    def _begin(self, context: list[int]) -> None:
        if self._text(context).endswith(REPLACEMENT):  # the stream would take it for a character to complete
            context = []
        self._context, self._unread = context, []
        is_fast = isinstance(self._tokenizer, Tokenizer)
        self._stream = DecodeStream(context, skip_special_tokens=True) if is_fast else None

    def _certain_text(self) -> str | None:
        """Return the text of the unread ids, None while it may still change, as `DecodeStream.step` does."""
        text = self._unread_text()
        return None if not text or text.endswith(REPLACEMENT) else text

    def _unread_text(self) -> str:
        if not self._unread:
            return ""
        return self._text([*self._context, *self._unread])[len(self._text(self._context)) :]

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _release(self, new: str, final: bool) -> str:
        """Add text. Of stop strings that are complete now, the one that begins first counts."""
        if not self._stop or self._unstoppable >= 0:
            return new
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
