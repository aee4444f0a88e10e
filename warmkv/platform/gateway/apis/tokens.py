"""Pieces of a prompt to tokens and block hashes: of what was not seen before, once.

Each piece is tokenized by itself, so a prefix that ends at a content block has the same tokens whatever follows it.
That is what lets a breakpoint be found again by the next request, and the tokens of its prefix be kept. It also keeps
special tokens apart from what users write: `<|im_end|>` in a message is plain text.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from warmkv.platform.gateway.apis.cuts import parts
from warmkv.platform.gateway.apis.token_cache import TokenCache, TokenizedPiece
from warmkv.prefixes.hashing import DIGEST_BYTES, block_hashes
from warmkv.prefixes.misses import content_hash, names_of

Kind = Literal["template", "content", "plain", "more"]
OPTIONS: dict[Kind, dict[str, bool]] = {
    "template": {"add_special_tokens": False, "split_special_tokens": False},
    "content": {"add_special_tokens": False, "split_special_tokens": True},  # special tokens are plain text here
    "plain": {},  # a prompt without a template: as the tokenizer takes it
    "more": {"add_special_tokens": False},  # what follows its first part
}

SLICE = 1 << 16  # characters that are tokenized at a time where tokens are only counted


class Piece(NamedTuple):
    """Text that is tokenized by itself. `block` is the number of the content block that it is, None for none."""

    text: str
    kind: Kind
    block: int | None = None


Place = tuple[str | int, ...]
"""Where a content block stands in its request, as ("messages", 2, "content", 0)."""


def place_name(place: Place) -> str:
    """Return a place as errors name it: `messages.2.content.0`."""
    return ".".join(map(str, place))


@dataclass(frozen=True, slots=True)
class Outline:
    """What is known of a prompt's content blocks besides their tokens; all but the last have an item for each."""

    places: tuple[Place, ...] = ()
    contents: tuple[int, ...] = ()  # hashes, of this process, of what each says
    names: tuple[int, ...] = ()  # and of what it and all before it say
    joined: tuple[bool, ...] = ()  # in one run of calls, or of results, with the block before (breakpoints.py)
    thinking: tuple[int, ...] = ()  # blocks behind which the template showed thinking of an earlier answer


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text: its pieces, the mark of each content block, and how many blocks the tools and system have."""

    pieces: Sequence[Piece]
    ttls: tuple[str | None, ...]
    leading: int = 0
    outline: Outline = Outline()

    def cut(self) -> Rendered:
        """Return the prompt with its long pieces in parts; for tokenizers that allow it (cuts.py)."""
        pieces: list[Piece] = []
        for piece in self.pieces:
            first, *others = parts(piece.text)
            more: Kind = "more" if piece.kind == "plain" else piece.kind
            pieces += [Piece(first, piece.kind), *(Piece(text, more) for text in others)]
            pieces[-1] = pieces[-1]._replace(block=piece.block)
        return replace(self, pieces=pieces)

    @classmethod
    def of_text(cls, text: str) -> Rendered:
        """Return a prompt without a template, for plain completion."""
        contents = (content_hash(text),)
        return cls(
            [Piece(text, "plain", 0)], (None,), 0, Outline((("prompt",),), contents, names_of(contents), (False,))
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt. `ends[i]` is the position behind content block i, `ttls[i]` its mark.

    `head` is the position behind the tools and the system prompt, 0 if there are none. `hashes` are those of the full
    blocks, in a chain that begins at `root`.
    """

    tokens: tuple[int, ...]
    ends: tuple[int, ...]
    ttls: tuple[str | None, ...]
    head: int = 0
    hashes: tuple[bytes, ...] = ()
    root: bytes = b""
    outline: Outline = Outline()
    begun: str = ""  # the end of its text that belongs to the answer, as `<think>`

    @classmethod
    def of_ids(cls, ids: array[int], root: bytes, block_size: int) -> Prompt:
        """Return a prompt that came as token ids."""
        hashes = tuple(block_hashes(ids, block_size, root))
        return cls(tuple(ids.tolist()), (len(ids),), (None,), hashes=hashes, root=root)


def tokenize(tokenizer: Any, rendered: Rendered, cache: TokenCache, root: bytes, block_size: int) -> Prompt:
    """Return the tokens of a prompt, and its block hashes, whose chain begins at the tenant's `root`.

    What the cache has of the prompt's leading pieces is taken from there, and the others are left in it.
    """
    pieces = rendered.pieces
    keys = list(itertools.accumulate(pieces, _key, initial=root))[1:]
    known = cache.find(root, keys)
    tokens, hashes = array("I"), list[bytes]()
    for found in known:
        tokens.extend(found.tokens)
        hashes += found.hashes
    start = len(tokens)
    new = [array("I", ids) for ids in _encode(tokenizer, pieces[len(known) :])]
    for ids in new:
        tokens.extend(ids)
    hashes += block_hashes(tokens[len(hashes) * block_size :], block_size, hashes[-1] if hashes else root)
    for ids in new:
        ending = hashes[start // block_size : (start + len(ids)) // block_size]
        known.append(TokenizedPiece(ids, tuple(ending)))
        start += len(ids)
    cache.keep(root, dict(zip(keys, known, strict=True)))
    positions = itertools.accumulate(len(found.tokens) for found in known)
    ends = [0] * len(rendered.ttls)
    for piece, position in zip(pieces, positions, strict=True):
        if piece.block is not None:
            ends[piece.block] = position
    # A template may show a block before one that comes earlier in the request, such as the system prompt before the
    # tools. The prefix that ends at a block covers all blocks before it in either order.
    ends = list(itertools.accumulate(ends, max))
    head = ends[rendered.leading - 1] if rendered.leading else 0
    return Prompt(tuple(tokens.tolist()), tuple(ends), rendered.ttls, head, tuple(hashes), root, rendered.outline)


def token_counts(tokenizer: Any, pieces: Iterable[Piece]) -> Iterator[int]:
    """Count tokens slice by slice: they take hundreds of bytes each, and are never held together.

    A piece that is longer than `SLICE` is cut, which can add a token or two.
    """
    return (sum(map(len, _encode(tokenizer, group))) for group in slices(pieces))


def slices(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces, long ones cut, in groups of at most `SLICE` characters."""
    group, size = list[Piece](), 0
    for piece in pieces:
        for start in range(0, len(piece.text), SLICE):
            part = piece._replace(text=piece.text[start : start + SLICE])
            if size + len(part.text) > SLICE:
                yield group
                group, size = [], 0
            group.append(part)
            size += len(part.text)
    yield group


def _key(before: bytes, piece: Piece) -> bytes:
    """Return the name of a piece behind others that `before` names."""
    text = piece.text.encode(errors="surrogatepass")
    return hashlib.blake2b(before + piece.kind[0].encode() + text, digest_size=DIGEST_BYTES).digest()


def _encode(tokenizer: Any, pieces: Sequence[Piece]) -> list[list[int]]:
    """Return the token ids of every piece. One call for all of a kind: a call costs more than a short text."""
    found: list[list[int]] = [[] for _ in pieces]
    for kind, options in OPTIONS.items():
        places = [at for at, piece in enumerate(pieces) if piece.kind == kind and piece.text]
        if places:
            texts = [pieces[at].text for at in places]
            batch = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, **options)
            for at, ids in zip(places, batch["input_ids"], strict=True):
                found[at] = ids
    return found
