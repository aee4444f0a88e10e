"""Bodies of every API to tokenized requests. Synchronous, for the threads of the intake; linear in the body's size."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from warmkv.config import Needs, refusal
from warmkv.platform.gateway.apis.call_grammars import CallGrammar
from warmkv.platform.gateway.apis.chat_parsing.format import ResponseFormat
from warmkv.platform.gateway.apis.cuts import cuts_between_words
from warmkv.platform.gateway.apis.errors import ApiError, invalid
from warmkv.platform.gateway.apis.messages import requests as messages
from warmkv.platform.gateway.apis.messages.content import AnyMessage
from warmkv.platform.gateway.apis.messages.turns import MessageReading
from warmkv.platform.gateway.apis.openai import requests as openai
from warmkv.platform.gateway.apis.prompt import Turn, render
from warmkv.platform.gateway.apis.responses.requests import ResponsesRequest
from warmkv.platform.gateway.apis.responses.store import Item
from warmkv.platform.gateway.apis.schema import FieldsLeftOut, ParsedRequest, WarmkvOptions, parse
from warmkv.platform.gateway.apis.structured import Wanted, behind_thinking, thinking_is_open
from warmkv.platform.gateway.apis.template_options import variables
from warmkv.platform.gateway.apis.token_cache import TokenCache
from warmkv.platform.gateway.apis.tokens import Prompt, Rendered, tokenize
from warmkv.platform.gateway.intake.body_limits import BodyLimits, too_many
from warmkv.platform.gateway.service import Arrival, Service
from warmkv.platform.tenants import chain_root
from warmkv.policies import budgets
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.constraints.compiler import Compiler, ConstraintError
from warmkv.replicas.protocol import Constraint, SamplingParams, ThinkingBudget

BYTES_PER_TOKEN = 4  # of usual text; with fewer in a context nothing is counted twice
EDITED_CONTEXTS = 4  # a conversation may be as many contexts long before context_management clears some of it
MOST_PROMPT_LOGPROBS = 1 << 18  # in an answer, of some 15 MB
SLICE = 1 << 16  # characters that are tokenized at a time to count them


class Parsing:
    """Parses, checks and tokenizes. What is longer than `max_context` tokens is refused; all raise ApiError (400, 404).

    Methods take a request that came in, its body and a tokenizer that no other thread uses meanwhile. `restore` returns
    thinking of this service that comes back, by its signature.
    """

    def __init__(
        self,
        service: Service,
        tokenizer: Any,
        max_context: int,
        restore: Callable[[str, str], str | None] = lambda thinking, signature: None,
    ) -> None:
        self._service, self._max_context, self._restore = service, max_context, restore
        self._gateway, self._limits = service.config.gateway, BodyLimits.of(service.config.gateway)
        self._longest_token = max(len(token.encode()) for token in tokenizer.get_vocab())
        self._cache, self._cuts = TokenCache(), cuts_between_words(tokenizer)
        self._compiler = Compiler(tokenizer)
        self._format = ResponseFormat.of(tokenizer, service.config.model.response_template)

    def message(self, arrival: Arrival, data: bytes, tokenizer: Any) -> ParsedRequest:
        """Parse a body of /v1/messages."""
        left_out = FieldsLeftOut(self._gateway.strict)
        body = parse(data, messages.MessagesRequest, self._limits, left_out)
        self._service.check_model(body.model)
        if body.max_tokens == 0 and body.stream:
            raise invalid("stream: must be false when max_tokens is 0")
        messages.check_thread(body)
        sampling = body.sampling(_seed(body.warmkv.seed))
        choice = body.tool_choice.type if body.tool_choice else "auto"
        prompt, edited = self._message_prompt(arrival, tokenizer, body, body.warmkv.chat_template_kwargs)
        budget = body.thinking.budget_tokens if body.thinking is not None else None
        policy = _policy(arrival, body.warmkv)
        sampling = self._thinking_at_most(budget, "thinking.budget_tokens", sampling, policy, prompt, left_out)
        asked = ParsedRequest(
            prompt,
            sampling,
            body.options,
            body.stream,
            choice,
            headers=left_out.headers,
            context_management=edited,
            omit_thinking=body.thinking is not None and body.thinking.display == "omitted",
        )
        one_call = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
        tools = [tool.definition for tool in body.tools] if choice != "none" else []
        strict = frozenset(tool.name for tool in body.tools if tool.strict)
        expecting = self._expecting(self._within_limits(arrival, asked), tools, parallel=not one_call)
        if body.tool_choice is not None and choice in ("any", "tool"):
            return self._forced(expecting, tools, strict, body.tool_choice.name, body.wanted)
        return self._constrained(expecting, tools, strict, body.wanted)

    def count(self, arrival: Arrival, data: bytes, tokenizer: Any) -> tuple[dict[str, Any], Mapping[str, str]]:
        """Parse a body of /v1/messages/count_tokens and count its tokens; return the answer and its headers."""
        left_out = FieldsLeftOut(self._gateway.strict)
        body = parse(data, messages.CountRequest, self._limits, left_out)
        self._service.check_model(body.model)
        prompt, edited = self._message_prompt(arrival, tokenizer, body, {})
        answer: dict[str, Any] = {"input_tokens": len(prompt.tokens)}
        if edited is not None:
            cleared = sum(edit["cleared_input_tokens"] for edit in edited["applied_edits"])
            answer["context_management"] = {"original_input_tokens": len(prompt.tokens) + cleared}
        return answer, left_out.headers

    def chat(self, arrival: Arrival, data: bytes, tokenizer: Any) -> ParsedRequest:
        """Parse a body of /v1/chat/completions."""
        left_out = FieldsLeftOut(self._gateway.strict)
        return self._chat(arrival, parse(data, openai.ChatRequest, self._limits, left_out), tokenizer, left_out)

    def response(
        self, history_of: Callable[[bytes, str], list[Item] | None], arrival: Arrival, data: bytes, tokenizer: Any
    ) -> tuple[ResponsesRequest, ParsedRequest]:
        """Parse a body of /v1/responses, which may go on from a response whose history is there."""
        left_out = FieldsLeftOut(self._gateway.strict)
        body = parse(data, ResponsesRequest, self._limits, left_out)
        self._service.check_model(body.model)
        history: list[Item] | None = []
        if (previous := body.previous_response_id) is not None:
            history = history_of(arrival.lease.tenant.salt, previous)
        if history is None:
            raise ApiError("not_found_error", f"previous_response_id: there is no response {previous} (any more)")
        return body, self._chat(arrival, body.as_chat(history, left_out), tokenizer, left_out)

    def _chat(
        self, arrival: Arrival, body: openai.ChatRequest, tokenizer: Any, left_out: FieldsLeftOut
    ) -> ParsedRequest:
        self._service.check_model(body.model)
        named, chosen = body.chat_template_kwargs, body.warmkv.chat_template_kwargs
        chosen = {**named, **chosen} if self._gateway.strict else chosen
        taken = variables(tokenizer, {**body.template_variables, **named}, chosen)
        if body.reasoning_effort is not None and not taken.keys() & body.template_variables:
            left_out.note("reasoning_effort")
        for name in named.keys() - taken:
            left_out.note(f"chat_template_kwargs.{name}")
        prompt = self._prompt(arrival, tokenizer, openai.turns(body), taken)
        asked = self._completion(arrival, body, prompt, left_out)
        check_prompt_logprobs([asked])
        budget, place = body.thinking_token_budget, "thinking_token_budget"
        policy = _policy(arrival, body.warmkv)
        sampling = self._thinking_at_most(budget, place, asked.sampling, policy, prompt, left_out)
        asked = replace(asked, sampling=sampling, headers={**asked.headers, **left_out.headers})
        tools = [tool.definition for tool in body.tools] if body.tool_choice != "none" else []
        strict = frozenset(tool.function.name for tool in body.tools if tool.function.strict)
        expecting = self._expecting(asked, tools, parallel=body.parallel_tool_calls is not False)
        if isinstance(body.tool_choice, openai.NamedChoice):
            return self._forced(expecting, tools, strict, body.tool_choice.function.name, body.wanted)
        if body.tool_choice == "required":
            return self._forced(expecting, tools, strict, None, body.wanted)
        return self._constrained(expecting, tools, strict, body.wanted)

    def completion(self, arrival: Arrival, data: bytes, tokenizer: Any) -> list[ParsedRequest]:
        """Parse a body of /v1/completions, which may have several prompts."""
        left_out = FieldsLeftOut(self._gateway.strict)
        body = parse(data, openai.CompletionRequest, self._limits, left_out)
        self._service.check_model(body.model)
        asked: list[ParsedRequest] = []
        tokens = 0
        for said in body.prompts:
            prompt = self._prompt(arrival, tokenizer, said)
            tokens += len(prompt.tokens)
            if asked and tokens > self._limits.values:
                raise too_many("prompt", tokens, "tokens of all prompts", self._limits.values)
            one = self._completion(arrival, body, prompt, left_out)
            asked.append(self._constrained(one, (), frozenset(), body.wanted))
            if body.echo:
                asked[-1] = replace(asked[-1], echo=said if isinstance(said, str) else tokenizer.decode(said))
        check_prompt_logprobs(asked)
        return asked

    def forget(self, root: bytes) -> None:
        """Forget the earlier prompts of the tenant whose hashes begin with `root`."""
        self._cache.forget(root)
        self._service.history.forget(root)

    def _completion(
        self, arrival: Arrival, body: openai.CompletionBody, prompt: Prompt, left_out: FieldsLeftOut
    ) -> ParsedRequest:
        rest = self._gateway.default_output_tokens or max(1, self._max_context - len(prompt.tokens))
        sampling = body.sampling(_seed(body.warmkv.seed), min(rest, self._gateway.max_output_tokens))
        asked = ParsedRequest(
            prompt,
            sampling,
            body.options,
            body.stream,
            include_usage=body.include_usage,
            session=body.prompt_cache_key,
            n=body.n,
            prompt_logprobs=body.prompt_logprobs,
            headers=left_out.headers,
        )
        return self._within_limits(arrival, asked)

    def _thinking_at_most(
        self,
        budget: int | None,
        place: str,
        sampling: SamplingParams,
        policy: PolicySpec,
        prompt: Prompt,
        left_out: FieldsLeftOut,
    ) -> SamplingParams:
        """Limit the tokens that an answer may think.

        The field is left out where what ends the model's thinking is no token, and where no replica that can serve the
        policy can limit it.
        """
        if budget is None:
            return sampling
        format_, fault = self._format, refusal(self._service.capabilities, Needs(policy, thinking_budget=True))
        if fault or format_ is None or format_.thinking is None or format_.thinking_ids is None:
            left_out.note(place)
            return sampling
        is_open = thinking_is_open(prompt.begun, format_.thinking)
        return replace(sampling, thinking=ThinkingBudget(budget, *format_.thinking_ids, is_open))

    def _within_limits(self, arrival: Arrival, asked: ParsedRequest) -> ParsedRequest:
        """Cut max_tokens to what this server gives. Raises ApiError (400) where it is strict."""
        tokens, prompt, limit = asked.sampling.max_tokens, len(asked.prompt.tokens), self._gateway.max_output_tokens
        if tokens > limit and self._gateway.strict:
            raise invalid(f"max_tokens: {tokens} > {limit}, this server's limit (gateway.max_output_tokens)")
        cut, rest = min(tokens, limit), self._max_context - prompt
        if rest < cut and not self._gateway.strict:  # a strict one is refused by the replica, unless it is endless
            policy = _policy(arrival, asked.options)
            if not budgets.is_endless(budgets.in_force(policy, prompt, cut), prompt, cut, self._max_context):
                cut = max(rest, 1)
        if cut == tokens:
            return asked
        headers = {**asked.headers, "x-warmkv-max-tokens": str(cut)}
        return replace(asked, sampling=replace(asked.sampling, max_tokens=cut), headers=headers)

    def _message_prompt(
        self, arrival: Arrival, tokenizer: Any, body: messages.CountRequest, chosen: Mapping[str, Any]
    ) -> tuple[Prompt, dict[str, Any] | None]:
        """Return the prompt of a body, and its `context_management` as the answer tells it; None if it has none.

        `chosen` are variables of the template that the request sets.
        """
        config, taken = arrival.policy.config, variables(tokenizer, body.template_variables, chosen)
        cache = config.prefix_cache
        reading = MessageReading(cache.default_ttl, self._restore, omit_billing_line=config.gateway.omit_billing_line)

        def prompt(said: Sequence[AnyMessage], most: int) -> Prompt:
            return self._prompt(arrival, tokenizer, messages.turns(body, said, cache, reading), taken, most)

        if body.context_management is None:
            return prompt(body.messages, self._max_context), None
        largest = EDITED_CONTEXTS * self._max_context
        left, applied = body.context_management.apply(body.messages, lambda said: len(prompt(said, largest).tokens))
        return prompt(left, self._max_context), {"applied_edits": applied}

    def _expecting(self, asked: ParsedRequest, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> ParsedRequest:
        """Have the answer read for calls of tools, and for thinking, if the model has a format for them."""
        if (format_ := self._format) is None:
            return asked
        if (expected := format_.expected(asked.prompt.begun, tools, parallel=parallel)) is None:
            return asked
        return replace(asked, expected=expected, sampling=replace(asked.sampling, shown_ids=format_.shown_ids))

    def _constrained(
        self, asked: ParsedRequest, tools: Sequence[Mapping[str, Any]], strict: frozenset[str], wanted: Wanted | None
    ) -> ParsedRequest:
        """Constrain an answer to the form that is wanted, or calls of tools; those in `strict` to their schemas.

        Raises ApiError (400) with the place of what no replica could compile.
        """
        grammar = self._calls(asked, tools, strict)
        named = [number for number, tool in enumerate(tools) if tool["function"]["name"] in strict]
        if named and grammar is None:
            raise invalid(f"tools.{named[0]}: this model's calls cannot be constrained: strict is not possible")
        if wanted is None:
            if grammar is None or not named:
                return asked
            return self._constrained_calls(asked, grammar, grammar.beside_text(), f"tools.{named[0]}")
        constraint = wanted.constraint
        self._check_constraint(wanted.place, constraint)
        if grammar is not None and grammar.syntax.sign and constraint.kind != "grammar":
            try:
                return self._constrained_calls(asked, grammar, grammar.beside_format(constraint), wanted.place)
            except ApiError:  # too many tools, say: without strict ones the form alone is possible
                if named:
                    raise
        if named:
            raise invalid(f"tools.{named[0]}: strict is not possible beside {wanted.place} with this model")
        if asked.expected is not None and (thinking := asked.expected.format.thinking) is not None:
            constraint = behind_thinking(constraint, asked.prompt.begun, thinking, asked.expected.format.special)
            self._check_constraint(wanted.place, constraint)
        sampling = replace(asked.sampling, constraint=constraint)
        if constraint.kind == "grammar" and constraint is wanted.constraint:  # one's own, which begins with the answer
            sampling = replace(sampling, thinking=None)
        return replace(asked, sampling=sampling)

    def _forced(
        self,
        asked: ParsedRequest,
        tools: Sequence[Mapping[str, Any]],
        strict: frozenset[str],
        name: str | None,
        wanted: Wanted | None,
    ) -> ParsedRequest:
        """Constrain an answer to calls of tools, or one call of a tool. Raises ApiError (400) where it cannot be.

        The form that is wanted is that of a text, which such an answer has none of.
        """
        if wanted is not None:
            self._check_constraint(wanted.place, wanted.constraint)
        chosen = [tool for tool in tools if name in (None, tool["function"]["name"])]
        if not chosen:
            raise invalid(f"tool_choice: there is no tool {name!r}" if tools else "tool_choice: there are no tools")
        if (grammar := self._calls(asked, tools, strict)) is None:
            raise invalid("tool_choice: this model's calls cannot be forced; auto and none are possible")
        forced = replace(grammar, tools=chosen, parallel=grammar.parallel and name is None).forced()
        return self._constrained_calls(asked, grammar, forced, "tool_choice")

    @staticmethod
    def _calls(asked: ParsedRequest, tools: Sequence[Mapping[str, Any]], strict: frozenset[str]) -> CallGrammar | None:
        """Return how an answer calls tools; None where it does not, or calls cannot be constrained."""
        if not tools or asked.expected is None or (syntax := asked.expected.format.calls) is None:
            return None
        format_, parallel = asked.expected.format, asked.expected.parallel
        return CallGrammar(syntax, tools, format_.special, parallel, strict, asked.prompt.begun, format_.thinking)

    def _constrained_calls(
        self, asked: ParsedRequest, grammar: CallGrammar, constraint: Constraint, place: str
    ) -> ParsedRequest:
        """Constrain an answer with calls. Raises ApiError (400) with the tool that cannot be compiled, or the place."""
        try:
            self._compiler.matcher(constraint)
        except ConstraintError:
            for number, tool in enumerate(grammar.tools):
                if place != "tool_choice" and tool["function"]["name"] not in grammar.strict:
                    continue  # whose schema is no part of it
                alone = replace(grammar, tools=[tool], parallel=False, thinking=None)
                self._check_constraint(f"tools.{number}", alone.forced())
            self._check_constraint(place, constraint)
        return replace(asked, sampling=replace(asked.sampling, constraint=constraint))

    def _check_constraint(self, place: str, constraint: Constraint) -> None:
        try:
            self._compiler.matcher(constraint)
        except ConstraintError as error:
            raise invalid(f"{place}: {error}") from None

    def _prompt(
        self,
        arrival: Arrival,
        tokenizer: Any,
        said: Sequence[Turn] | str | array[int],
        variables: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> Prompt:
        """Return the prompt of a conversation, or of a text or token ids as they are.

        `variables` are the template's own. At most `most` tokens fit; those of the context if that is left out. Raises
        ApiError (400) where the prompt cannot fit, or an id is none of the tokenizer's.
        """
        most = self._max_context if most is None else most
        config = arrival.policy.config
        root, block_size = chain_root(arrival.lease.tenant.salt, config), config.prefix_cache.block_size
        if isinstance(said, array):
            if (largest := max(said)) >= (size := len(tokenizer)):
                raise invalid(f"prompt: there is no token {largest} among the {size} of this model")
            prompt = Prompt.of_ids(said, root, block_size)
        else:
            rendered = self._rendered(tokenizer, said, variables, most)
            begun = self._format.answer_begun(rendered.pieces) if self._format is not None else ""
            pieces = rendered.cut() if self._cuts else rendered
            prompt = replace(tokenize(tokenizer, pieces, self._cache, root, block_size), begun=begun)
        if len(prompt.tokens) > most:
            raise invalid(f"{len(prompt.tokens)} prompt tokens exceed the context of {self._max_context} tokens")
        return prompt

    def _rendered(
        self, tokenizer: Any, said: Sequence[Turn] | str, variables: Mapping[str, Any] | None, most: int
    ) -> Rendered:
        """Return the text of a prompt in pieces. Raises ApiError (400) where it cannot fit."""
        if isinstance(said, str):
            self._check_room([said], tokenizer, most, special=True)
            rendered = Rendered.of_text(said)
        else:
            texts = [turn.thinking for turn in said] + [block.text for turn in said for block in turn.blocks]
            self._check_room(texts, tokenizer, most)
            rendered = render(tokenizer, said, variables)
        return rendered

    def _check_room(self, texts: Sequence[str], tokenizer: Any, most: int, *, special: bool = False) -> None:
        """Refuse texts that cannot fit before all of them is tokenized: a token takes hundreds of bytes meanwhile.

        Texts of many bytes are counted in slices first. A cut can only add a token or two, so that twice the context
        is more than enough to refuse. `special` texts may contain special tokens.
        """
        characters = sum(map(len, texts))
        too_long = characters > most * self._longest_token  # a character is a byte at least
        if not too_long and sum(len(text.encode()) for text in texts) > BYTES_PER_TOKEN * most:
            counted = 0
            for group in _slices(texts):
                batch = tokenizer(group, add_special_tokens=False, split_special_tokens=not special)
                counted += sum(map(len, batch["input_ids"]))
                if too_long := counted > 2 * most:
                    break
        if too_long:
            raise invalid(f"The prompt exceeds the context of {self._max_context} tokens.")


def _policy(arrival: Arrival, options: WarmkvOptions) -> PolicySpec:
    """Return the compression policy of a request."""
    return options.policy or arrival.policy.config.compression.policy


def check_prompt_logprobs(asked: Sequence[ParsedRequest]) -> None:
    """Refuse to tell more log-probabilities of prompts than an answer can hold. Raises ApiError (400)."""
    told = ((one, one.sampling.prompt_logprobs) for one in asked)
    found = sum(one.n * len(one.prompt.tokens) * (1 + top) for one, top in told if top is not None)
    if found > MOST_PROMPT_LOGPROBS:
        raise invalid(
            f"prompt: {found} log-probabilities (of each token of all prompts, and the most probable ones beside it) "
            f"are more than {MOST_PROMPT_LOGPROBS}; ask for fewer prompts at a time"
        )


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
