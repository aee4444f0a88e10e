"""Bodies of every API to tokenized requests. Synchronous, for the threads of the intake; linear in the body's size."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from warmkv.platform.gateway.apis import messages, openai
from warmkv.platform.gateway.apis.errors import invalid
from warmkv.platform.gateway.apis.prompt import Prompt, Turn, render, render_text
from warmkv.platform.gateway.apis.schema import ParsedRequest, parse
from warmkv.platform.gateway.intake.body_limits import BodyLimits
from warmkv.platform.gateway.service import LiveConfig, Service

BYTES_PER_TOKEN = 4  # of usual text; with fewer in a context nothing is counted twice
SLICE = 1 << 16  # characters that are tokenized at a time to count them


class Parsing:
    """Parses, checks and tokenizes. What is longer than `max_context` tokens is refused; all raise ApiError (400, 404).

    Methods take a body and a tokenizer that no other thread uses meanwhile, and the policy that the request came under.
    """

    def __init__(self, service: Service, tokenizer: Any, max_context: int) -> None:
        self._service, self._max_context = service, max_context
        self._gateway, self._limits = service.config.gateway, BodyLimits.of(service.config.gateway)
        self._longest_token = max(len(token.encode()) for token in tokenizer.get_vocab())

    def message(self, policy: LiveConfig, data: bytes, tokenizer: Any) -> ParsedRequest:
        """Parse a body of /v1/messages."""
        body = parse(data, messages.MessagesRequest, self._limits)
        self._service.check_model(body.model)
        if body.max_tokens == 0 and body.stream:
            raise invalid("stream: must be false when max_tokens is 0")
        sampling = body.sampling(_seed(body.warmkv.seed))
        choice = body.tool_choice.type if body.tool_choice else "auto"
        return ParsedRequest(self._prompt(policy, body, tokenizer), sampling, body.warmkv, body.stream, choice)

    def count(self, policy: LiveConfig, data: bytes, tokenizer: Any) -> int:
        """Parse a body of /v1/messages/count_tokens and count its tokens."""
        body = parse(data, messages.CountRequest, self._limits)
        self._service.check_model(body.model)
        return len(self._prompt(policy, body, tokenizer).tokens)

    def chat(self, policy: LiveConfig, data: bytes, tokenizer: Any) -> ParsedRequest:
        """Parse a body of /v1/chat/completions."""
        body = parse(data, openai.ChatRequest, self._limits)
        self._service.check_model(body.model)
        return self._completion(body, self._rendered(tokenizer, openai.turns(body)))

    def completion(self, policy: LiveConfig, data: bytes, tokenizer: Any) -> ParsedRequest:
        """Parse a body of /v1/completions."""
        body = parse(data, openai.CompletionRequest, self._limits)
        self._service.check_model(body.model)
        self._check_room([body.prompt], tokenizer, special=True)
        return self._completion(body, self._fitting(render_text(tokenizer, body.prompt)))

    def _completion(self, body: openai.CompletionBody, prompt: Prompt) -> ParsedRequest:
        sampling = body.sampling(_seed(body.warmkv.seed), self._gateway.default_output_tokens)
        usage = body.stream_options is not None and body.stream_options.include_usage
        return ParsedRequest(prompt, sampling, body.warmkv, body.stream, include_usage=usage)

    def _prompt(self, policy: LiveConfig, body: messages.CountRequest, tokenizer: Any) -> Prompt:
        cache = policy.config.prefix_cache
        turns = messages.turns(body, cache.default_ttl)
        self._service.check_marks([block.ttl for turn in turns for block in turn.blocks], cache)
        return self._rendered(tokenizer, turns)

    def _rendered(self, tokenizer: Any, turns: Sequence[Turn]) -> Prompt:
        self._check_room([block.text for turn in turns for block in turn.blocks], tokenizer)
        return self._fitting(render(tokenizer, turns))

    def _check_room(self, texts: Sequence[str], tokenizer: Any, *, special: bool = False) -> None:
        """Refuse texts that cannot fit before all of them is tokenized: a token takes hundreds of bytes meanwhile.

        Texts of many bytes are counted in slices first. A cut can only add a token or two, so that twice the context
        is more than enough to refuse. `special` texts may contain special tokens.
        """
        characters, most = sum(map(len, texts)), self._max_context
        too_long = characters > most * self._longest_token  # a character is a byte at least
        if not too_long and sum(len(text.encode()) for text in texts) > BYTES_PER_TOKEN * most:
            counted = 0
            for group in _slices(texts):
                batch = tokenizer(group, add_special_tokens=False, split_special_tokens=not special)
                counted += sum(map(len, batch["input_ids"]))
                if too_long := counted > 2 * most:
                    break
        if too_long:
            raise invalid(f"The prompt exceeds the context of {most} tokens.")

    def _fitting(self, prompt: Prompt) -> Prompt:
        if len(prompt.tokens) > self._max_context:
            raise invalid(f"{len(prompt.tokens)} prompt tokens exceed the context of {self._max_context} tokens")
        return prompt


def _slices(texts: Iterable[str]) -> Iterator[list[str]]:
    """Cut texts, and yield groups of `SLICE` characters."""
    group: list[str] = []
    room = SLICE
    for text in texts:
        at = 0
        while at < len(text):
            group.append(text[at : at + room])
            at, room = at + len(group[-1]), room - len(group[-1])
            if not room:
                yield group
                group, room = [], SLICE
    if group:
        yield group


def _seed(chosen: int | None) -> int:
    return secrets.randbits(63) if chosen is None else chosen
