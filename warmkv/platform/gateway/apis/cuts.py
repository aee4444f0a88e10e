"""Long texts in parts that have the tokens which they have in the whole, so that a text's beginning is known again.

A byte-level BPE merges within words alone, and finds them from left to right. So a text may be cut before the space
between two lower-case letters: whatever stands before or behind, a word ends there and one begins.
"""

from __future__ import annotations

import json
import re
from typing import Any

PART_CHARACTERS = 2048  # a part is as long, and longer where no two words follow each other
_BETWEEN_WORDS = re.compile("[a-z](?= [a-z])")
_DIGITS = frozenset((r"\d", r"\d{1,2}", r"\d{1,3}", r"\p{N}", r"\p{N}{1,2}", r"\p{N}{1,3}"))
_ENDING = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = frozenset(  # of cl100k and the tokenizers made after it: Llama 3, Qwen 2 and 3
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}{_ENDING}" for digits in _DIGITS
)


def cuts_between_words(tokenizer: Any) -> bool:
    """Return True if a tokenizer is known to give the parts of a text the tokens that they have in the whole.

    What it adds around a text may stand in front only.
    """
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return False
    made = json.loads(backend.to_str())
    normalizer, added = made["normalizer"], made["added_tokens"]
    around = tokenizer("")["input_ids"]
    return (
        made["model"]["type"] == "BPE"
        and not made["model"]["dropout"]
        and (normalizer is None or normalizer["type"] == "NFC")
        and _splits(made["pre_tokenizer"])
        and not any(_joins_words(token) for token in added)
        and tokenizer("a")["input_ids"][: len(around)] == around
    )


def _joins_words(added: dict[str, Any]) -> bool:
    """Return True if an added token may hold two words, or depend on, or take, what is beside it."""
    content = added["content"]
    return added["single_word"] or bool(re.search(r"\s", content)) or (added["rstrip"] and content[-1:].islower())


def parts(text: str) -> list[str]:
    """Cut a text between words. Where it is cut does not depend on what follows the two words."""
    found, start = [], 0
    while (place := _BETWEEN_WORDS.search(text, start + PART_CHARACTERS - 1)) is not None:
        found.append(text[start : place.end()])
        start = place.end()
    return [*found, text[start:]]


def _splits(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Return True if words are told from each other, and nothing is added in front of a text."""
    if pre_tokenizer is None:
        return False
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    words = False
    for step in steps:
        if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            words |= step["use_regex"]
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            pattern = step["pattern"].get("Regex")
            words |= pattern in _WORDS
            if pattern not in _WORDS | _DIGITS:
                return False
        elif step["type"] != "Digits":
            return False
    return words
