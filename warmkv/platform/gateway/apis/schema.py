"""What the APIs share: strict request models, how they are parsed, and warmkv's own options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from warmkv.platform.gateway.apis.chat_parsing.format import ExpectedResponse
from warmkv.platform.gateway.apis.errors import from_validation, invalid
from warmkv.platform.gateway.apis.tokens import Prompt
from warmkv.platform.gateway.intake import body_limits
from warmkv.platform.gateway.intake.body_limits import BodyLimits
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.protocol import SamplingParams

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first fault alone is told: each costs pydantic a kilobyte."""


def at_most(most: int) -> BeforeValidator:
    """Refuse objects with more entries before these are validated: pydantic tells all faults, each of a kilobyte."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"at most {most} entries, not {len(value)}")
        return value

    return BeforeValidator(check)


TemplateVariables = Annotated[dict[str, bool | int | float | str | None], at_most(16)]

LONGEST_POLICY = 1000
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


MOST_NAMED = 32  # fields that are listed as left out


@dataclass(slots=True)
class FieldsLeftOut:
    """The fields of a request that were left out, named once each. With `strict`, unknown ones are refused instead."""

    strict: bool = False
    names: dict[str, None] = field(default_factory=dict)

    def note(self, name: str) -> None:
        """Note a field. What is no plain name, which a header could not carry, is `?`."""
        if len(self.names) < MOST_NAMED:
            self.names[name if PLAIN_NAME.fullmatch(name) else "?"] = None

    @property
    def headers(self) -> dict[str, str]:
        return {"x-warmkv-ignored": ", ".join(self.names)} if self.names else {}


class Body(BaseModel):
    """Base of request bodies. A field that is null is absent.

    Fields in `ignored` do not change the answer and are left out. Those in `unsupported` would change it: they are
    refused, but for the values at which they do nothing. All others that a model does not declare are unknown: left
    out and noted where the validation's context is `FieldsLeftOut`, refused where it is strict, or absent.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    ignored: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})
    refuses_unknown: ClassVar[bool] = False  # whatever the context

    @model_validator(mode="before")
    @classmethod
    def _take_known_fields(cls, value: Any, info: ValidationInfo) -> Any:
        """Drop fields that are null or left out. Of unknown fields one stays to be refused: each costs a kilobyte."""
        if not isinstance(value, dict) or cls.model_config.get("extra") != "forbid":
            return value
        known = cls.model_fields
        if known.keys() >= value.keys() and None not in value.values():
            return value
        left_out: FieldsLeftOut = info.context or FieldsLeftOut(strict=True)
        kept, refused = {}, False
        for name, item in value.items():
            if item is None:
                continue
            if name in known:
                kept[name] = item
            elif name in cls.unsupported:
                if item not in cls.unsupported[name]:
                    raise ValueError(f"{name}: this server does not support it")
            elif name in cls.ignored or not (left_out.strict or cls.refuses_unknown):
                left_out.note(name)
            elif not refused:
                kept[name], refused = item, True
        return kept


OTHER_CONTENT = {
    "image": "images", "image_url": "images", "input_image": "images",
    "audio_url": "audio", "input_audio": "audio", "video_url": "videos",
    "file": "files", "input_file": "files",
}  # fmt: skip


class TextContent(Body):
    """Hold a text within content: content of another kind is refused by name."""

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind in OTHER_CONTENT:
            raise ValueError(text_only(OTHER_CONTENT[kind]))
        return value


def text_only(kind: str) -> str:
    """Return the refusal of content of another kind."""
    return f"this server's model takes text only, no {kind}"


class WarmkvOptions(Body):
    """The `warmkv` field of a request (`extra_body={"warmkv": {...}}` in the SDKs)."""

    refuses_unknown = True  # nobody but our own users sends it: what is unknown is a mistake

    policy: PolicySpec | None = Field(None, description="compression policy of this request")
    seed: int | None = Field(None, ge=0, lt=2**63, description="seed of the sampling")
    ignore_eos: bool = Field(False, description="draw max_tokens tokens whatever the model says, for benchmarks")
    replica: str | None = Field(
        None, max_length=1000, description="id of the replica to prefer, as /v1/warmkv/replicas lists them"
    )
    chat_template_kwargs: TemplateVariables = Field(
        {}, description="variables that the model's chat template takes, such as enable_thinking"
    )

    @field_validator("policy", mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, str | dict) and len(value) > LONGEST_POLICY:
            raise ValueError(f"a policy is at most {LONGEST_POLICY} characters, or fields, long")
        return value


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request for an answer, parsed and tokenized; nothing of its body is held any longer."""

    prompt: Prompt
    sampling: SamplingParams
    options: WarmkvOptions
    stream: bool
    tool_choice: str = "auto"  # with the tool's name, by which messages are read and written
    include_usage: bool = False  # at the end of an OpenAI stream
    session: str = ""  # that the client names: a hint for routing
    n: int = 1  # answers to this prompt
    echo: str = ""  # text that comes before them: the prompt
    prompt_logprobs: int | None = None  # by vLLM's name: tokens told beside each one of the prompt
    headers: Mapping[str, str] = field(default_factory=dict)  # of the answer: what was not taken as it was asked
    context_management: dict[str, Any] | None = None  # edits that were applied, as the answer tells it
    omit_thinking: bool = False  # from what the client is shown
    expected: ExpectedResponse | None = None  # what the answer is made of besides text

    @property
    def tokens(self) -> int:
        """Return the most tokens that all its answers may use."""
        return len(self.prompt.tokens) + self.n * self.sampling.max_tokens

    @property
    def tells_logprobs(self) -> bool:
        """Return True where log-probabilities are told, of answers or of the prompt."""
        return self.sampling.logprobs is not None or self.prompt_logprobs is not None


B = TypeVar("B", bound=Body)


def parse(data: bytes, model: type[B], limits: BodyLimits, left_out: FieldsLeftOut | None = None) -> B:
    """Parse a JSON body in linear time and space. Raises ApiError (400) where it is not what the API takes.

    Unknown fields are noted in `left_out`, and refused without it.
    """
    body_limits.check_bytes(data, limits)
    try:
        tree = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise invalid(f"the body is nested deeper than {body_limits.PARSER_DEPTH}") from None
        raise invalid(f"Invalid JSON: {error}") from None
    body_limits.check_counts(tree, limits)
    body_limits.check_finite(tree)
    try:
        return model.model_validate(tree, context=left_out)
    except ValidationError as error:
        raise from_validation(error, tree) from None
