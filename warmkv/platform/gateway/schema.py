"""What the APIs share: strict request models, how they are read, and warmkv's own options."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from warmkv.platform.gateway.errors import ApiError, from_validation
from warmkv.policy_spec import PolicySpec


class Body(BaseModel):
    """Base of request bodies: a field that is not known is refused, never silently dropped."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WarmkvOptions(Body):
    """The `warmkv` field of a request (`extra_body={"warmkv": {...}}` in the SDKs)."""

    policy: PolicySpec | None = Field(None, description="compression policy of this request")
    seed: int | None = Field(None, ge=0, lt=2**63, description="seed of the sampling")
    ignore_eos: bool = Field(False, description="draw max_tokens tokens whatever the model says, for benchmarks")
    replica: str | None = Field(None, description="id of the replica to prefer, as /v1/warmkv/replicas lists them")


B = TypeVar("B", bound=Body)


async def read_body(request: Request, model: type[B], limit: int) -> B:
    """Parse a JSON body. Raises ApiError: 413 over the limit, 400 where it is not what the API takes."""
    size = 0
    chunks = []
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise ApiError("request_too_large", f"The request body exceeds {limit} bytes (gateway.max_body_bytes).")
        chunks.append(chunk)
    try:
        return model.model_validate_json(b"".join(chunks))
    except ValidationError as error:
        raise from_validation(error) from None
