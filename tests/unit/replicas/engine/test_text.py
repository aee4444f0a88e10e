"""Incremental decoding: what is given out is never taken back, whatever the pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenizers import PurePython, of_bytes, of_sentencepiece
from warmkv.replicas.engine.text import Detokenizer, StopSearch

BYTES = of_bytes()
"""Its tokens are single bytes: the worst case for characters of several bytes."""


both = pytest.mark.parametrize("library", [lambda tokenizer: tokenizer, PurePython], ids=["tokenizers", "python"])


def run(tokenizer: Any, text: str, stop: Sequence[str] = ()) -> tuple[str, str | None]:
    detokenizer = Detokenizer(tokenizer, stop)
    given_out = ""
    for byte in text.encode():
        given_out += detokenizer.push(byte)
        assert "\ufffd" not in given_out or "\ufffd" in text
        if detokenizer.stopped_by is not None:
            return given_out, detokenizer.stopped_by
    return given_out + detokenizer.finish(), detokenizer.stopped_by


@both
@given(text=st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])))
def test_the_pieces_are_the_text(library, text):
    assert run(library(BYTES), text) == (text, None)


@given(st.text("abé€", max_size=30), st.lists(st.text("abé€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stops_before_the_first_stop_string_that_appears(text, stops):
    # The first to be complete as the text grows, and of those that are complete at once, the one that begins first.
    for end in range(1, len(text) + 1):
        found = [(text[:end].index(stop), stop) for stop in stops if stop in text[:end]]
        if found:
            at, stop = min(found)
            assert run(BYTES, text, stops) == (text[:at], stop)
            return
    assert run(BYTES, text, stops) == (text, None)


def test_text_that_may_begin_a_stop_string_is_held_back():
    detokenizer = Detokenizer(BYTES, ["END"])
    assert [detokenizer.push(byte) for byte in b"aENx"] == ["a", "", "", "ENx"]


@both
def test_bytes_that_form_no_character_are_given_out_in_time(library):
    detokenizer = Detokenizer(library(BYTES))
    given_out = "".join(detokenizer.push(0xFF) for _ in range(100))
    assert len(given_out) >= 90


@both
def test_the_prompt_is_context_and_not_text(library):
    """A SentencePiece tokenizer drops the space before the first word of what it decodes."""
    words = library(of_sentencepiece(["a", "b", "c", "d"]))
    assert Detokenizer(words, context=[1, 2]).push(3) == " d"
    assert Detokenizer(words).push(3) == "d"


@both
@given(context=st.binary(max_size=4), text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_no_context_is_given_out_again(library, context, text):
    """Whatever a prompt ends with: the bytes of a character in part, or a replacement character itself."""
    detokenizer = Detokenizer(library(BYTES), context=list(context))
    given_out = "".join(detokenizer.push(byte) for byte in text.encode()) + detokenizer.finish()
    assert given_out == text


def test_an_incomplete_character_at_the_end_is_given_out_as_it_is():
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push("é".encode()[0]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_stop_string_is_searched_in_linear_time():
    """Each character is compared twice at most on average, whatever the stop string and the text have in common."""

    class Counted(str):
        compared = 0

        def __getitem__(self, key):
            Counted.compared += not isinstance(key, slice)
            return super().__getitem__(key)

    search = StopSearch(Counted("a" * 1000 + "b"))
    Counted.compared = 0
    for _ in range(500):
        assert search.feed("aaaa") == 0
    assert Counted.compared <= 2 * 2 * 2000
    assert search.matched == 1000
    assert search.feed("ab") == 2


def test_tokens_without_text_are_not_decoded_again_and_again():
    tokenizer, longest = of_bytes(special=[0]), 0

    class Watched(Detokenizer):
        def _text(self, ids: Sequence[int]) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super()._text(ids)

    detokenizer = Watched(tokenizer)
    pieces = []
    for token in [65, *[0] * 500, 66]:
        pieces.append(detokenizer.push(token))
        longest = max(longest, len(detokenizer._unread))
    assert "".join(pieces) == "AB"
    assert longest < 20


@both
def test_special_tokens_are_shown_where_they_are_text(library):
    tokenizer = library(of_bytes(special=[0, 1]))
    ids = [*b"a", 0, 1, *b"b", 1, *"é".encode(), 1]
    detokenizer = Detokenizer(tokenizer, shown=[1])
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == "a<special 1>b<special 1>é<special 1>"
    detokenizer = Detokenizer(tokenizer, ["<special 1>b"], shown=[1])
    assert "".join(map(detokenizer.push, ids)) == "a"


@both
def test_a_shown_token_is_not_the_first_of_a_text(library):
    """The space of the word behind it stays, and so do bytes before it that form no character."""
    words = library(of_sentencepiece(["a", "b", "c", "d"]))
    detokenizer = Detokenizer(words, context=[0], shown=[1])
    assert "".join(map(detokenizer.push, [2, 1, 3])) == " cb d"
    detokenizer = Detokenizer(library(of_bytes(special=[1])), shown=[1])
    assert "".join(map(detokenizer.push, ["é".encode()[0], 1, *b"b"])) == "\ufffd<special 1>b"
