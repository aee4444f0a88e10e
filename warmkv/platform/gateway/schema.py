"""What the APIs share: strict request models and warmkv's own options."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

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
