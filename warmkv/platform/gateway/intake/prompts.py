"""Conversations and texts to prompts of tokens. What cannot fit is refused before all of it is tokenized."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from warmkv.platform.gateway.apis.chat_parsing.format import ResponseFormat
from warmkv.platform.gateway.apis.cuts import cuts_between_words
from warmkv.platform.gateway.apis.errors import invalid
from warmkv.platform.gateway.apis.overflow import PromptTooLongError
from warmkv.platform.gateway.apis.prompt import render
from warmkv.platform.gateway.apis.token_cache import TokenCache
from warmkv.platform.gateway.apis.tokens import Kind, Piece, Prompt, Rendered, token_counts, tokenize
from warmkv.platform.gateway.apis.turns import Turn
from warmkv.platform.gateway.service import Arrival
from warmkv.platform.tenants import chain_root

BYTES_PER_TOKEN = 4  # of usual text; with fewer in a context nothing is counted twice


class Prompts:
    """Make prompts of at most `max_context` tokens. Threads share it; each brings a tokenizer of its own.

    `format_` tells which end of a prompt belongs to the answer.
    """

    def __init__(self, tokenizer: Any, max_context: int, format_: ResponseFormat | None) -> None:
        self.max_context, self._format = max_context, format_
        self.longest_token = max(len(token.encode()) for token in tokenizer.get_vocab())
        self._cache, self._cuts = TokenCache(), cuts_between_words(tokenizer)

    def forget(self, root: bytes) -> None:
        """Forget the earlier prompts of the tenant whose hashes begin with `root`."""
        self._cache.forget(root)

    def tokenized(
        self,
        arrival: Arrival,
        tokenizer: Any,
        said: Sequence[Turn] | str | array[int],
        field: str,
        variables: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> Prompt:
        """Return the prompt of a conversation, or of a text or token ids as they are.

        `field` is where the request has it, `variables` are the template's own. At most `most` tokens fit; those of the
        context if that is left out. Raises PromptTooLongError, ApiError (400) where an id is none of the tokenizer's.
        """
        most = self.max_context if most is None else most
        config = arrival.policy.config
        root, block_size = chain_root(arrival.lease.tenant.salt, config), config.prefix_cache.block_size
        if isinstance(said, array):
            if (largest := max(said)) >= (size := len(tokenizer)):
                raise invalid(f"prompt: there is no token {largest} among the {size} of this model")
            prompt = Prompt.of_ids(said, root, block_size)
        else:
            self._check_room(said, tokenizer, field, most)
            rendered = _rendered(tokenizer, said, variables)
            begun = self._format.answer_begun(rendered.pieces) if self._format is not None else ""
            prompt = replace(tokenize(tokenizer, self._cut(rendered), self._cache, root, block_size), begun=begun)
        if len(prompt.tokens) > most:
            raise PromptTooLongError(len(prompt.tokens), self.max_context, field)
        return prompt

    def num_tokens(self, arrival: Arrival, tokenizer: Any, said: Sequence[Turn], variables: Mapping[str, Any]) -> int:
        """Return the number of tokens of a conversation, which may exceed the context."""
        try:
            return len(self.tokenized(arrival, tokenizer, said, "messages", variables).tokens)
        except PromptTooLongError as error:
            if error.exact:
                return error.tokens
        return sum(token_counts(tokenizer, self._cut(_rendered(tokenizer, said, variables)).pieces))

    def _cut(self, rendered: Rendered) -> Rendered:
        return rendered.cut() if self._cuts else rendered

    def _check_room(self, said: Sequence[Turn] | str, tokenizer: Any, field: str, most: int) -> None:
        """Refuse texts that cannot fit before all of them is tokenized: a token takes hundreds of bytes meanwhile.

        Texts of many bytes are counted in slices first. A cut can only add a token or two, so that twice the context
        is more than enough to refuse. A text without a template may contain special tokens.
        """
        kind: Kind = "more" if isinstance(said, str) else "content"
        texts = [said] if isinstance(said, str) else [text for turn in said for text in _texts(turn)]
        characters = sum(map(len, texts))
        if characters > most * self.longest_token:  # a character is a byte at least
            raise PromptTooLongError(-(-characters // self.longest_token), self.max_context, field, exact=False)
        if sum(len(text.encode()) for text in texts) <= BYTES_PER_TOKEN * most:
            return
        tokens = 0
        for count in token_counts(tokenizer, [Piece(text, kind) for text in texts]):
            tokens += count
            if tokens > 2 * most:
                raise PromptTooLongError(tokens, self.max_context, field, exact=False)


def _texts(turn: Turn) -> Iterator[str]:
    yield turn.thinking
    for block in turn.blocks:
        yield block.text


def _rendered(tokenizer: Any, said: Sequence[Turn] | str, variables: Mapping[str, Any] | None) -> Rendered:
    return Rendered.of_text(said) if isinstance(said, str) else render(tokenizer, said, variables)
