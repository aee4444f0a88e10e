"""What the APIs share: strict request models, how they are parsed, and warmkv's own options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from warmkv.platform.gateway.apis.errors import from_validation, invalid
from warmkv.platform.gateway.apis.tokens import Prompt
from warmkv.platform.gateway.intake import body_limits
from warmkv.platform.gateway.intake.body_limits import BodyLimits
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.protocol import SamplingParams

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first fault alone is told: each costs pydantic a kilobyte."""

LONGEST_POLICY = 1000


class Body(BaseModel):
    """Base of request bodies: a field that is not known is refused, never silently dropped."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, value: Any) -> Any:
        """Leave one unknown field to be refused: each costs pydantic a kilobyte."""
        if not isinstance(value, dict) or cls.model_config.get("extra") != "forbid":
            return value
        unknown = [name for name in value if name not in cls.model_fields]
        if len(unknown) < 2:
            return value
        dropped = set(unknown[1:])
        return {name: item for name, item in value.items() if name not in dropped}


class WarmkvOptions(Body):
    """The `warmkv` field of a request (`extra_body={"warmkv": {...}}` in the SDKs)."""

    policy: PolicySpec | None = Field(None, description="compression policy of this request")
    seed: int | None = Field(None, ge=0, lt=2**63, description="seed of the sampling")
    ignore_eos: bool = Field(False, description="draw max_tokens tokens whatever the model says, for benchmarks")
    replica: str | None = Field(
        None, max_length=1000, description="id of the replica to prefer, as /v1/warmkv/replicas lists them"
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
    tool_choice: str = "auto"
    include_usage: bool = False  # at the end of an OpenAI stream


B = TypeVar("B", bound=Body)


def parse(data: bytes, model: type[B], limits: BodyLimits) -> B:
    """Parse a JSON body in linear time and space. Raises ApiError (400) where it is not what the API takes."""
    body_limits.check_bytes(data, limits)
    try:
        tree = from_json(data)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise invalid(f"the body is nested deeper than {body_limits.PARSER_DEPTH}") from None
        raise invalid(f"Invalid JSON: {error}") from None
    body_limits.check_counts(tree, limits)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise from_validation(error) from None
