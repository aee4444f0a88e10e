"""Text and key words for the tiny model: the running interpreter's own standard library, split once and for all.

The split depends only on a file's path and on a word's letters, so that training, evaluation and the tests agree on
what was held out without sharing a file.
"""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})
HELDOUT_FILE_SHARE = 25
HELDOUT_WORD_SHARE = 8
MAX_LINE_CHARS = 160
MIN_WORD_COUNT = 3
INVENTED_SHARE = 0.3
_WORD = re.compile(r"\b[a-z]{4,9}\b")
# Comments and docstrings, near enough: where a module's English words are. Parsing properly takes twenty times as long.
_PROSE = re.compile(r"#[^\n]*|\"{3}.*?\"{3}|'{3}.*?'{3}", re.DOTALL)


def _bucket(text: str, buckets: int) -> int:
    """Hash `text` to a bucket that is the same in every process (`hash` is salted per process)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % buckets


def file_split(name: str) -> Split:
    """Return the split of a standard-library file, by its path relative to the library's root."""
    return "heldout" if _bucket("file:" + name, HELDOUT_FILE_SHARE) == 0 else "train"


def word_split(word: str) -> Split:
    """Return the split of a key word, by its letters."""
    return "heldout" if _bucket("word:" + word, HELDOUT_WORD_SHARE) == 0 else "train"


@cache
def _library() -> tuple[tuple[str, str], ...]:
    """Return (relative path, text) of every standard-library module that takes part, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            files.append((relative.as_posix(), path.read_text(encoding="utf-8", errors="ignore")))
    return tuple(files)


def texts(split: Split) -> tuple[str, ...]:
    """Return the texts of the standard-library files of one split, whole files, sorted by path."""
    return tuple(text for name, text in _library() if file_split(name) == split)


@cache
def key_words(split: Split) -> tuple[str, ...]:
    """Return the key words of one split, sorted: lowercase words of 4 to 9 letters from docstrings and comments."""
    counts: Counter[str] = Counter()
    for _, text in _library():
        for piece in _PROSE.findall(text):
            counts.update(_WORD.findall(piece))
    return tuple(sorted(w for w, n in counts.items() if n >= MIN_WORD_COUNT and word_split(w) == split))


class World:
    """What a task family draws from: the text lines and key words of one split, and a token counter.

    Args:
        split: which side of the held-out split to draw from.
        count: number of tokens of a text; the length of a sample is measured with it.
        longest_word: leave out key words of more tokens than this (with the space before them); None takes all.
    """

    def __init__(self, split: Split, count: Callable[[str], int], longest_word: int | None = None) -> None:
        self.split = split
        self.count = count
        self.words = key_words(split)
        self.invented_share = INVENTED_SHARE if longest_word is None else 0.0
        if longest_word is not None:
            self.words = tuple(word for word in self.words if count(" " + word) <= longest_word)
        self._files = tuple(
            lines
            for text in texts(split)
            if len(lines := [x.rstrip() for x in text.splitlines() if len(x) <= MAX_LINE_CHARS]) >= 20
        )
        self._sizes = [len(lines) for lines in self._files]
        self._costs: dict[str, int] = {}

    def cost(self, line: str) -> int:
        """Return tokens of `line` and its line end; remembered, since the same lines are drawn again and again."""
        known = self._costs.get(line)
        if known is None:
            known = self._costs[line] = self.count(line + "\n")
        return known

    def keys(self, rng: random.Random, count: int) -> list[str]:
        """Draw `count` distinct key words of the split.

        In training a part of them is invented from two halves of words, so that matching pays and remembering does not.
        """
        if self.split == "heldout":
            return rng.sample(self.words, count)
        chosen: dict[str, None] = {}
        while len(chosen) < count:
            word = rng.choice(self.words)
            if rng.random() < self.invented_share:
                other = rng.choice(self.words)
                word = word[: len(word) // 2 + 1] + other[len(other) // 2 :]
            if word_split(word) == "train":
                chosen[word] = None
        return list(chosen)

    def filler(self, rng: random.Random, tokens: int) -> list[str]:
        """Return consecutive lines of real source text, at most `tokens` tokens of them."""
        taken: list[str] = []
        left = tokens
        while left > 0:
            lines = rng.choices(self._files, weights=self._sizes)[0]
            for line in lines[rng.randrange(len(lines)) :]:
                price = self.cost(line)
                if price > left:
                    return taken
                taken.append(line)
                left -= price
        return taken
