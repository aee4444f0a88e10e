"""The whole configuration, with the checks across sections."""

from __future__ import annotations

from pydantic import model_validator

from warmkv.config.base import Section
from warmkv.config.cluster import ClusterConfig
from warmkv.config.compression import CompressionConfig
from warmkv.config.control import ControlConfig
from warmkv.config.dashboards import DashboardsConfig
from warmkv.config.engine import NOT_OF_VLLM, EngineConfig
from warmkv.config.gateway import GatewayConfig
from warmkv.config.model import ModelConfig
from warmkv.config.prefix_cache import PrefixCacheConfig
from warmkv.config.pricing import Prices, PricingConfig
from warmkv.config.routing import DirectoryConfig, RoutingConfig, TransferConfig
from warmkv.config.simulator import SimulatorConfig


class Config(Section):
    """The whole tree; `warmkv config schema` prints it as JSON schema."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    compression: CompressionConfig = CompressionConfig()
    prefix_cache: PrefixCacheConfig = PrefixCacheConfig()
    pricing: PricingConfig = PricingConfig()
    routing: RoutingConfig = RoutingConfig()
    transfer: TransferConfig = TransferConfig()
    directory: DirectoryConfig = DirectoryConfig()
    control: ControlConfig = ControlConfig()
    gateway: GatewayConfig = GatewayConfig()
    cluster: ClusterConfig = ClusterConfig()
    simulator: SimulatorConfig = SimulatorConfig()
    dashboards: DashboardsConfig = DashboardsConfig()

    @property
    def prices(self) -> Prices:
        """Return the prices of the model that is served."""
        return self.pricing.of(self.model.name)

    @property
    def ongoing_requests(self) -> int:
        """Return the requests that Serve sends to one replica at a time."""
        return self.engine.max_slots + self.engine.max_queue

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.engine.kind == "vllm":
            self._check_vllm()
        if missing := sorted(set(self.prefix_cache.ttls) - set(self.pricing.write)):
            raise ValueError(f"pricing.write has no multiplier for the TTL {missing[0]!r} of prefix_cache.ttls")
        for failure in self.simulator.failures:
            if failure.replica >= (most := self.cluster.most_replicas):
                raise ValueError(f"simulator.failures: no replica {failure.replica} of {most}; the first is 0")
        for alias, name in self.gateway.models.items():
            if name != self.model.name:
                raise ValueError(
                    f"gateway.models: {alias} is {name}, but the model that is served is {self.model.name}"
                )
        return self

    def _check_vllm(self) -> None:
        if refusal := self.engine.refusal(self.compression.policy):
            raise ValueError(f"compression.policy: {refusal}")
        for dotted in NOT_OF_VLLM:
            section, name = dotted.split(".")
            held = getattr(self, section)
            if getattr(held, name) != type(held).model_fields[name].get_default():
                raise ValueError(f"{dotted} cannot be had from an engine of kind vllm: leave it out")
