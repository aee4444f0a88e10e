"""Requests of the OpenAI-compatible API, chat and plain completions."""

from __future__ import annotations

from array import array
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from warmkv.platform.gateway.apis.errors import invalid
from warmkv.platform.gateway.apis.openai import chat
from warmkv.platform.gateway.apis.openai.chat import AllowedChoice, ChatMessage, ChatTool, NamedChoice, ToolChoice
from warmkv.platform.gateway.apis.schema import Body, Items, TemplateVariables, WarmkvOptions, at_most
from warmkv.platform.gateway.apis.structured import StructuredFields
from warmkv.platform.gateway.apis.turns import Turn
from warmkv.replicas.protocol import MOST_TOP_K, SamplingParams

EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}  # templates know low, medium and high
MOST_ANSWERS = 1024  # to one request: its prompts, times n
MOST_LOGPROBS = 20  # tokens that are told beside each drawn one
MOST_BIASES = 1024  # tokens of logit_bias, and of stop_token_ids

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(Body):
    ignored = frozenset({"include_obfuscation", "continuous_usage_stats"})
    include_usage: bool = False


class CompletionBody(StructuredFields):
    """What both endpoints take, by the names of OpenAI and, beyond it, of vLLM."""

    ignored = frozenset({
        "metadata", "prediction", "priority", "prompt_cache_options", "prompt_cache_retention",
        "request_id", "safety_identifier", "service_tier", "store", "user", "verbosity",
    })  # fmt: skip
    unsupported = MappingProxyType({
        "add_special_tokens": (), "allowed_token_ids": ([],), "bad_words": ([],),
        "include_stop_str_in_output": (False,), "length_penalty": (1,),
        "return_token_ids": (False,), "return_tokens_as_token_ids": (False,), "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,), "truncate_prompt_tokens": (), "use_beam_search": (False,),
    })  # fmt: skip

    model: str
    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=128)
    best_of: int | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # -1 is another way to say all
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    logit_bias: Annotated[dict[TokenId, Bias], at_most(MOST_BIASES)] = Field({})
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | Items[str] | None = None
    stop_token_ids: Items[TokenId] = Field([], max_length=MOST_BIASES)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    chat_template_kwargs: TemplateVariables = Field({})
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_cache_key: str = ""  # names the session, for routing
    warmkv: WarmkvOptions = Field(default_factory=WarmkvOptions)  # a default that is a model would be copied

    @model_validator(mode="after")
    def _check_together(self) -> CompletionBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError(
                "prompt_logprobs: not in a stream, as in vLLM; plain completions have them there with echo"
            )
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of: this server returns all answers, so it must be n")
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            raise ValueError(f"min_tokens: {self.min_tokens} are more than max_tokens, {self.token_limit}")
        return self

    def sampling(self, seed: int, default_tokens: int) -> SamplingParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > 16:
            raise invalid("stop: at most 16 sequences")
        return SamplingParams(
            max_tokens=default_tokens if self.token_limit is None else self.token_limit,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=min(max(self.top_k, 0), MOST_TOP_K),
            seed=(seed if self.seed is None else self.seed) % 2**63,
            stop=tuple(stop),
            ignore_eos=self.options.ignore_eos,
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
        )

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Return how many of the most probable tokens are told beside each drawn one; None if none are told."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return how many are told beside each token of the prompt; None if none are told."""
        return self.prompt_logprobs

    @property
    def options(self) -> WarmkvOptions:
        """Return warmkv's own options; `ignore_eos` is a right of a tenant under either name."""
        return self.warmkv.model_copy(update={"ignore_eos": True}) if self.ignore_eos else self.warmkv

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(CompletionBody):
    """Body of /v1/chat/completions."""

    unsupported = MappingProxyType({
        **CompletionBody.unsupported,
        "add_generation_prompt": (True,), "audio": (), "chat_template": (), "continue_final_message": (False,),
        "documents": ([],), "echo": (False,), "function_call": ("none",), "functions": ([],),
        "mm_processor_kwargs": ({},), "modalities": (["text"],), "web_search_options": (),
    })  # fmt: skip

    messages: Items[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    thinking_token_budget: int | None = Field(None, ge=0)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tools: Items[ChatTool] = Field([])
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: names must be unique")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only allowed when logprobs is true")
        return self

    @property
    def allowed_tools(self) -> frozenset[str] | None:
        """Return the names of the tools to which tool_choice limits calls; None for all."""
        match self.tool_choice:
            case NamedChoice():
                return frozenset((self.tool_choice.function.name,))
            case AllowedChoice():
                return frozenset(tool.function.name for tool in self.tool_choice.allowed_tools.tools)
        return None

    @property
    def must_call(self) -> bool:
        """Return True where the answer is to be calls of tools."""
        choice = self.tool_choice
        if isinstance(choice, AllowedChoice):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedChoice)

    @property
    def num_logprobs(self) -> int | None:
        """Return how many of the most probable tokens are told beside each drawn one; None if none are told."""
        return self.top_logprobs if self.logprobs else None

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return what chat templates call thinking and effort, for those that take it."""
        effort = self.reasoning_effort
        if effort is None:
            return {}
        if effort == "none":
            return {"enable_thinking": False, "thinking": False}
        return {"reasoning_effort": EFFORTS.get(effort, effort)}

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


TokenIds = Annotated[list[Annotated[int, Field(strict=True, ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]


class CompletionRequest(CompletionBody):
    """Body of /v1/completions."""

    unsupported = MappingProxyType({**CompletionBody.unsupported, "suffix": ("",)})

    prompt: Text | TokenIds | Annotated[Items[Text] | Items[TokenIds], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        """Return how many of the most probable tokens are told beside each drawn one; None if none are told."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return how many are told beside each token of the prompt: those of `echo` are the answer's `logprobs`."""
        echoed = self.logprobs if self.echo else None
        return max((wanted for wanted in (echoed, self.prompt_logprobs) if wanted is not None), default=None)

    @field_validator("prompt", mode="before")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        if value in ("", []) or (isinstance(value, list) and ("" in value or [] in value)):
            raise ValueError("an empty prompt has no tokens that an answer could follow; give one token at least")
        return value

    @property
    def prompts(self) -> list[str | array[int]]:
        """Return the prompts, each a text or token ids."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: Any = [self.prompt] if one else self.prompt
        return [prompt if isinstance(prompt, str) else array("I", prompt) for prompt in prompts]

    @model_validator(mode="after")
    def _check_answers(self) -> CompletionRequest:
        if (answers := len(self.prompts) * self.n) > MOST_ANSWERS:
            raise ValueError(f"prompt: {answers} answers (prompts times n) are more than {MOST_ANSWERS}")
        return self


def turns(body: ChatRequest) -> list[Turn]:
    """Return the conversation. Raises ApiError (400)."""
    return chat.turns(body.messages, body.tools)
