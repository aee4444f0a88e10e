"""The gateway: addresses, limits of requests, retries, access log."""

from __future__ import annotations

from pathlib import Path

from pydantic import ByteSize, Field, model_validator

from warmkv.config.base import Section
from warmkv.config.tenants import LimitsConfig, OperatorConfig, Right, TenantConfig, check_key_holders


class GatewayConfig(Section):
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8400, ge=0, le=65535, description="0 takes a free one")
    route_prefix: str = Field("/", pattern=r"^/", description="path under which the APIs are served")
    allow_open: bool = Field(False, description="listen beyond loopback although no tenants are configured")
    tenants: tuple[TenantConfig, ...] = Field(
        (), description="if empty, and without tenants_file, any key is accepted and is its own tenant"
    )
    tenants_file: Path | None = Field(
        None, description="YAML or JSON with further `tenants` and `operators`, read again whenever it changes"
    )
    operators: tuple[OperatorConfig, ...] = Field(
        (), description="who may change the live configuration without being a tenant"
    )
    rights: tuple[Right, ...] | None = Field(
        None,
        description="of tenants that name none: policy, replica, ignore_eos; null: all of them where no tenants are "
        "configured, else none",
    )
    limits: LimitsConfig = Field(LimitsConfig(), description="of every tenant; a tenant may have its own")
    max_body_bytes: ByteSize = Field(
        ByteSize(32 << 20),
        description="body of a request; more is refused (413). How much structure it may have follows from it (400), "
        "and how many bodies are read at a time (529)",
    )
    max_output_tokens: int = Field(8192, ge=1, description="most tokens of an answer; a larger max_tokens is cut to it")
    default_output_tokens: int | None = Field(
        None,
        ge=1,
        description="where a request names no max_tokens; null: the rest of the context, up to max_output_tokens. A "
        "decode slot is reserved for all of it",
    )
    models: dict[str, str] = Field(
        {}, description='other names of the model, for clients that have names built in: {"claude-*": its name}'
    )
    strict: bool = Field(
        False,
        description="refuse (400) fields that nobody knows, and a max_tokens above max_output_tokens or the context",
    )
    omit_billing_line: bool = Field(
        True,
        description="leave the line out of prompts with which Claude Code begins its system prompt "
        "(x-anthropic-billing-header): it changes with every request, so that no prefix would be found again",
    )
    request_timeout_seconds: float = Field(600.0, gt=0, description="longest time until the end of an answer (504)")
    retries: int = Field(
        3, ge=0, description="how often a request is sent again because a replica failed; what had begun goes on there"
    )
    stall_seconds: float = Field(
        60.0, gt=0, description="silence of a replica after which it counts as failed; more than the longest step"
    )
    access_log: Path | None = Field(None, description="file for one JSON line per request")
    access_log_bytes: ByteSize = Field(
        ByteSize(1 << 30), description="size at which it becomes access_log.1, and that access_log.2, to .4; 0: never"
    )

    @property
    def beat_seconds(self) -> float:
        """Return the longest silence of a replica whose engine goes on; then it says so."""
        return self.stall_seconds / 12

    @property
    def hung_seconds(self) -> float:
        """Return the step of the engine after which Serve replaces the replica."""
        return 5 * self.stall_seconds

    @property
    def health_seconds(self) -> float:
        """Return the time in which Serve's health check must be answered; three in a row are not, and it replaces."""
        return self.stall_seconds / 2

    @property
    def fetch_seconds(self) -> float:
        """Return the longest time that a request waits for blocks of another replica."""
        return self.stall_seconds / 30

    @property
    def is_open(self) -> bool:
        """Return True where no tenants are configured, so that any key is accepted."""
        return not self.tenants and self.tenants_file is None

    @model_validator(mode="after")
    def _check(self) -> GatewayConfig:
        check_key_holders(self.tenants, self.operators)
        return self
