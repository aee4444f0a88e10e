"""Bodies of every API to tokenized requests. Synchronous, for the threads of the intake; linear in the body's size."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from warmkv.config import Needs, refusal
from warmkv.platform.gateway.apis.chat_parsing.format import ResponseFormat
from warmkv.platform.gateway.apis.errors import ApiError, invalid
from warmkv.platform.gateway.apis.messages import requests as messages
from warmkv.platform.gateway.apis.messages.content import AnyMessage
from warmkv.platform.gateway.apis.messages.turns import MessageReading
from warmkv.platform.gateway.apis.openai import requests as openai
from warmkv.platform.gateway.apis.openai.chat import NamedChoice
from warmkv.platform.gateway.apis.overflow import answer_too_long
from warmkv.platform.gateway.apis.responses.requests import ResponsesRequest, in_own_terms
from warmkv.platform.gateway.apis.responses.store import Item
from warmkv.platform.gateway.apis.schema import FieldsLeftOut, ParsedRequest, WarmkvOptions, parse
from warmkv.platform.gateway.apis.structured import thinking_is_open
from warmkv.platform.gateway.apis.template_options import variables
from warmkv.platform.gateway.apis.tokens import Prompt
from warmkv.platform.gateway.apis.turns import Turn
from warmkv.platform.gateway.intake.body_limits import BodyLimits, too_many
from warmkv.platform.gateway.intake.constraining import ToolUse, constrained
from warmkv.platform.gateway.intake.prompts import Prompts
from warmkv.platform.gateway.model_names import check_model
from warmkv.platform.gateway.service import Arrival, Service
from warmkv.policies import budgets
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.constraints.compiler import Compiler
from warmkv.replicas.protocol import SamplingParams, ThinkingBudget
from warmkv.request_context import session_of_body

EDITED_CONTEXTS = 4  # a conversation may be as many contexts long before context_management clears some of it
MOST_LOGPROBS = 1 << 18  # of a request's prompts and answers: some 100 MB until they are written, 20 MB of JSON
THINKING_SHARE = 0.75  # of the tokens that max_tokens is cut to, at most; the rest is for the answer


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
        self._service, self._restore = service, restore
        self._gateway, self._limits = service.config.gateway, BodyLimits.of(service.config.gateway)
        self._compiler = Compiler(tokenizer)
        self._format = ResponseFormat.of(tokenizer, service.config.model.response_template)
        self.prompts = Prompts(tokenizer, max_context, self._format)

    def message(self, arrival: Arrival, data: bytes, tokenizer: Any) -> ParsedRequest:
        """Parse a body of /v1/messages."""
        left_out = FieldsLeftOut(self._gateway.strict)
        body = parse(data, messages.MessagesRequest, self._limits, left_out)
        check_model(body.model, self._service.config)
        if body.max_tokens == 0 and body.stream:
            raise invalid("stream: must be false when max_tokens is 0")
        messages.check_thread(body)
        sampling = body.sampling(_seed(body.warmkv.seed))
        choice = body.tool_choice.type if body.tool_choice else "auto"
        named = body.tool_choice.name if body.tool_choice else None
        prompt, edited = self._message_prompt(arrival, tokenizer, body, left_out)
        budget = body.thinking.budget_tokens if body.thinking is not None else None
        policy = _policy(arrival, body.warmkv)
        sampling = self._thinking_at_most(budget, "thinking.budget_tokens", sampling, policy, prompt, left_out)
        asked = ParsedRequest(
            prompt,
            sampling,
            body.options,
            body.stream,
            choice if named is None else f"{choice} {named}",
            session=session_of_body(None, body.metadata),
            headers=left_out.headers,
            context_management=edited,
            omit_thinking=body.thinking is not None and body.thinking.display == "omitted",
        )
        one_call = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
        use = ToolUse(
            [tool.definition for tool in body.tools] if choice != "none" else [],
            frozenset(tool.name for tool in body.tools if tool.strict),
            None if named is None else frozenset((named,)),
            forced=choice in ("any", "tool"),
            single=named is not None,
        )
        asked = self._within_limits(arrival, asked, "messages")
        return constrained(self._compiler, self._expecting(asked, use.tools, parallel=not one_call), use, body.wanted)

    def count(self, arrival: Arrival, data: bytes, tokenizer: Any) -> tuple[dict[str, Any], Mapping[str, str]]:
        """Parse a body of /v1/messages/count_tokens and count its tokens; return the answer and its headers."""
        left_out = FieldsLeftOut(self._gateway.strict)
        body = parse(data, messages.CountRequest, self._limits, left_out)
        check_model(body.model, self._service.config)
        turns, taken = self._message_turns(arrival, tokenizer, body, {}, left_out)

        def tokens(said: Sequence[AnyMessage]) -> int:
            return self.prompts.num_tokens(arrival, tokenizer, turns(said), taken)

        left: Sequence[AnyMessage] = body.messages
        applied = None
        if body.context_management is not None:
            left, applied = body.context_management.apply(body.messages, tokens)
        answer: dict[str, Any] = {"input_tokens": tokens(left)}
        if applied is not None:
            cleared = sum(edit["cleared_input_tokens"] for edit in applied)
            answer["context_management"] = {"original_input_tokens": answer["input_tokens"] + cleared}
        return answer, left_out.headers

    def chat(self, arrival: Arrival, data: bytes, tokenizer: Any) -> ParsedRequest:
        """Parse a body of /v1/chat/completions."""
        left_out = FieldsLeftOut(self._gateway.strict)
        body = parse(data, openai.ChatRequest, self._limits, left_out)
        return self._chat(arrival, body, tokenizer, left_out, "messages")

    def response(
        self, history_of: Callable[[bytes, str], list[Item] | None], arrival: Arrival, data: bytes, tokenizer: Any
    ) -> tuple[ResponsesRequest, ParsedRequest]:
        """Parse a body of /v1/responses, which may go on from a response whose history is there."""
        left_out = FieldsLeftOut(self._gateway.strict)
        body = parse(data, ResponsesRequest, self._limits, left_out)
        check_model(body.model, self._service.config)
        history: list[Item] | None = []
        if (previous := body.previous_response_id) is not None:
            history = history_of(arrival.lease.tenant.salt, previous)
        if history is None:
            raise ApiError(
                "not_found_error",
                f"previous_response_id: there is no response {previous}, or not all that it goes on from (any more)",
            )
        try:
            return body, self._chat(arrival, body.as_chat(history, left_out), tokenizer, left_out, "input")
        except ApiError as error:
            raise in_own_terms(error) from None

    def _chat(
        self, arrival: Arrival, body: openai.ChatRequest, tokenizer: Any, left_out: FieldsLeftOut, field: str
    ) -> ParsedRequest:
        """Make a request of a chat, which its API has in a `field`."""
        check_model(body.model, self._service.config)
        named, chosen = body.chat_template_kwargs, body.warmkv.chat_template_kwargs
        chosen = {**named, **chosen} if self._gateway.strict else chosen
        taken = variables(tokenizer, {**body.template_variables, **named}, chosen)
        if body.reasoning_effort is not None and not taken.keys() & body.template_variables:
            left_out.note("reasoning_effort")
        for name in named.keys() - taken:
            left_out.note(f"chat_template_kwargs.{name}")
        prompt = self.prompts.tokenized(arrival, tokenizer, openai.turns(body), field, taken)
        asked = self._completion(body, prompt, left_out)
        budget, place = body.thinking_token_budget, "thinking_token_budget"
        policy = _policy(arrival, body.warmkv)
        sampling = self._thinking_at_most(budget, place, asked.sampling, policy, prompt, left_out)
        asked = replace(asked, sampling=sampling, headers=left_out.headers)
        asked = self._within_limits(arrival, asked, field, named=body.token_limit is not None)
        check_logprobs([asked])
        use = ToolUse(
            [tool.definition for tool in body.tools] if body.tool_choice != "none" else [],
            frozenset(tool.function.name for tool in body.tools if tool.function.strict),
            body.allowed_tools,
            forced=body.must_call,
            single=isinstance(body.tool_choice, NamedChoice),
        )
        expecting = self._expecting(asked, use.tools, parallel=body.parallel_tool_calls is not False)
        return constrained(self._compiler, expecting, use, body.wanted)

    def completion(self, arrival: Arrival, data: bytes, tokenizer: Any) -> list[ParsedRequest]:
        """Parse a body of /v1/completions, which may have several prompts."""
        left_out = FieldsLeftOut(self._gateway.strict)
        body = parse(data, openai.CompletionRequest, self._limits, left_out)
        check_model(body.model, self._service.config)
        asked: list[ParsedRequest] = []
        tokens = 0
        for said in body.prompts:
            prompt = self.prompts.tokenized(arrival, tokenizer, said, "prompt")
            tokens += len(prompt.tokens)
            if asked and tokens > self._limits.values:
                raise too_many("prompt", tokens, "tokens of all prompts", self._limits.values)
            one = self._completion(body, prompt, left_out)
            one = self._within_limits(arrival, one, "prompt", named=body.token_limit is not None)
            asked.append(constrained(self._compiler, one, ToolUse(()), body.wanted))
            if body.echo:
                asked[-1] = replace(asked[-1], echo=said if isinstance(said, str) else tokenizer.decode(said))
        check_logprobs(asked)
        return asked

    def forget(self, root: bytes) -> None:
        """Forget the earlier prompts of the tenant whose hashes begin with `root`."""
        self.prompts.forget(root)
        self._service.history.forget(root)

    def _completion(self, body: openai.CompletionBody, prompt: Prompt, left_out: FieldsLeftOut) -> ParsedRequest:
        rest = self._gateway.default_output_tokens or max(1, self.prompts.max_context - len(prompt.tokens))
        sampling = body.sampling(_seed(body.warmkv.seed), min(rest, self._gateway.max_output_tokens))
        return ParsedRequest(
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

    def _within_limits(
        self, arrival: Arrival, asked: ParsedRequest, field: str, *, named: bool = True
    ) -> ParsedRequest:
        """Cut max_tokens to what this server gives, and what of them may be thought.

        Raises ApiError (400) where nothing is left, or the server is strict and the request `named` them itself.
        """
        tokens, prompt, limit = asked.sampling.max_tokens, len(asked.prompt.tokens), self._gateway.max_output_tokens
        if tokens > limit and self._gateway.strict:
            raise invalid(f"max_tokens: {tokens} > {limit}, this server's limit (gateway.max_output_tokens)")
        context = self.prompts.max_context
        cut, rest = min(tokens, limit), context - prompt
        if rest < cut:
            policy = _policy(arrival, asked.options)
            if not budgets.is_endless(budgets.in_force(policy, prompt, cut), prompt, cut, context):
                if rest < 1 or (named and self._gateway.strict):
                    raise answer_too_long(prompt, cut, context, field)
                cut = rest
        if named and cut == tokens:
            return asked
        headers, thinking = dict(asked.headers), asked.sampling.thinking
        if named:
            headers["x-warmkv-max-tokens"] = str(cut)
        if thinking is not None and thinking.tokens > (most := int(THINKING_SHARE * cut)):
            thinking = replace(thinking, tokens=most)
            headers["x-warmkv-thinking-budget"] = str(most)
        return replace(asked, sampling=replace(asked.sampling, max_tokens=cut, thinking=thinking), headers=headers)

    def _message_turns(
        self,
        arrival: Arrival,
        tokenizer: Any,
        body: messages.CountRequest,
        chosen: Mapping[str, Any],
        left_out: FieldsLeftOut,
    ) -> tuple[Callable[[Sequence[AnyMessage]], list[Turn]], dict[str, Any]]:
        """Return what makes the turns of a body's messages, or of what is left of them, and variables of the template.

        `chosen` are those that the request sets. What of thinking the template does not take is left out.
        """
        config, taken = arrival.policy.config, variables(tokenizer, body.template_variables, chosen)
        thinks = self._format is not None and self._format.thinks
        switched = not taken.keys().isdisjoint(("enable_thinking", "thinking"))
        if body.thinking is not None and not switched and body.thinking.enabled != thinks:
            left_out.note("thinking")
        if "reasoning_effort" in body.template_variables and "reasoning_effort" not in taken:
            left_out.note("output_config.effort")
        cache = config.prefix_cache
        reading = MessageReading(cache.default_ttl, self._restore, omit_billing_line=config.gateway.omit_billing_line)
        return lambda said: messages.turns(body, said, cache, reading), taken

    def _message_prompt(
        self, arrival: Arrival, tokenizer: Any, body: messages.MessagesRequest, left_out: FieldsLeftOut
    ) -> tuple[Prompt, dict[str, Any] | None]:
        """Return the prompt of a body, and its `context_management` as the answer tells it; None if it has none."""
        turns, taken = self._message_turns(arrival, tokenizer, body, body.warmkv.chat_template_kwargs, left_out)

        def prompt(said: Sequence[AnyMessage], most: int) -> Prompt:
            return self.prompts.tokenized(arrival, tokenizer, turns(said), "messages", taken, most)

        context = self.prompts.max_context
        if body.context_management is None:
            return prompt(body.messages, context), None
        largest = EDITED_CONTEXTS * context
        left, applied = body.context_management.apply(body.messages, lambda said: len(prompt(said, largest).tokens))
        return prompt(left, context), {"applied_edits": applied}

    def _expecting(self, asked: ParsedRequest, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> ParsedRequest:
        """Have the answer read for calls of tools, and for thinking, if the model has a format for them."""
        if (format_ := self._format) is None:
            return asked
        if (expected := format_.expected(asked.prompt.begun, tools, parallel=parallel)) is None:
            return asked
        return replace(asked, expected=expected, sampling=replace(asked.sampling, shown_ids=format_.shown_ids))


def _policy(arrival: Arrival, options: WarmkvOptions) -> PolicySpec:
    """Return the compression policy of a request."""
    return options.policy or arrival.policy.config.compression.policy


def check_logprobs(asked: Sequence[ParsedRequest]) -> None:
    """Refuse to tell more log-probabilities than a request may have. Raises ApiError (400)."""
    found = sum(one.n * _logprobs(one) for one in asked)
    if found > MOST_LOGPROBS:
        raise invalid(
            f"logprobs: {found} log-probabilities (of each token that all prompts and answers may have, and the most "
            f"probable ones beside it) are more than {MOST_LOGPROBS}; ask for fewer prompts, answers, or tokens of an "
            "answer, at a time"
        )


def _logprobs(asked: ParsedRequest) -> int:
    """Count the log-probabilities that are told with an answer at most."""
    sampling, prompt = asked.sampling, len(asked.prompt.tokens)
    told = (prompt, sampling.prompt_logprobs), (sampling.max_tokens, sampling.logprobs)
    return sum(tokens * (1 + top) for tokens, top in told if top is not None)


def _seed(chosen: int | None) -> int:
    return secrets.randbits(63) if chosen is None else chosen
