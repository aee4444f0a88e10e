"""Small tokenizers for tests, of the library that the service uses."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def of_bytes(values: Sequence[int] = range(256), special: Sequence[int] = ()) -> Tokenizer:
    """Return a tokenizer whose token i is the byte `values[i]`, or shows no text where i is special."""
    letters = _byte_letters()
    names = [f"<special {i}>" if i in special else letters[value] for i, value in enumerate(values)]
    return _tokenizer(names, decoders.ByteLevel(), special)


def of_characters(characters: str, special: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer whose token i is an ASCII character, which encodes as well; the special ones come last."""
    names = [_byte_letters()[ord(character)] for character in characters]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return tokenizer


def of_words(words: Sequence[str]) -> Tokenizer:
    """Return a tokenizer whose token i is a word."""
    return _tokenizer(words, decoders.Fuse(), ())


def of_sentencepiece(words: Sequence[str]) -> Tokenizer:
    """Return one that drops the space of the first word that it decodes, as SentencePiece does."""
    return _tokenizer([f"\u2581{word}" for word in words], decoders.Metaspace(), ())


class PurePython:
    """A tokenizer that is not of the tokenizers library, with nothing but `decode`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def _byte_letters() -> dict[int, str]:
    """The letters that stand for bytes in a byte-level tokenizer (GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as themselves; the others above 255
    others = [value for value in range(256) if value not in shown]
    return {value: chr(value) for value in shown} | {value: chr(256 + n) for n, value in enumerate(others)}


def _tokenizer(names: Sequence[str], decoder: decoders.Decoder, special: Sequence[int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, names[0]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(names[i], special=True) for i in special])
    return tokenizer
