"""Every setting of warmkv, with its default, as one frozen tree: one file a section. Nothing else defines a default."""

from warmkv.config.base import AutoBytes, ConfigError, Section
from warmkv.config.capabilities import Capabilities, Needs, able, move_blocks, refusal
from warmkv.config.cluster import AutoscalingConfig, ClusterConfig
from warmkv.config.compression import CompressionConfig
from warmkv.config.control import AutopilotConfig, ControlConfig, WhatIfConfig
from warmkv.config.dashboards import DashboardsConfig
from warmkv.config.engine import EngineConfig
from warmkv.config.gateway import GatewayConfig
from warmkv.config.model import ModelConfig
from warmkv.config.prefix_cache import BlockStorage, DiskConfig, Eviction, PrefixCacheConfig, TierConfig
from warmkv.config.pricing import ModelPrices, Prices, PricingConfig
from warmkv.config.reading import describe, load, parse
from warmkv.config.routing import DirectoryConfig, RoutingConfig, TransferConfig
from warmkv.config.simulator import FailureConfig, SimulatorConfig, SloConfig
from warmkv.config.tenants import (
    KeyConfig,
    KeyHolder,
    LimitsConfig,
    OperatorConfig,
    Right,
    TenantConfig,
    TenantLimits,
    check_key_holders,
)
from warmkv.config.tree import Config, place_in
from warmkv.config.values import put, read_value

__all__ = [
    "AutoBytes",
    "AutopilotConfig",
    "AutoscalingConfig",
    "BlockStorage",
    "Capabilities",
    "ClusterConfig",
    "CompressionConfig",
    "Config",
    "ConfigError",
    "ControlConfig",
    "DashboardsConfig",
    "DirectoryConfig",
    "DiskConfig",
    "EngineConfig",
    "Eviction",
    "FailureConfig",
    "GatewayConfig",
    "KeyConfig",
    "KeyHolder",
    "LimitsConfig",
    "ModelConfig",
    "ModelPrices",
    "Needs",
    "OperatorConfig",
    "PrefixCacheConfig",
    "Prices",
    "PricingConfig",
    "Right",
    "RoutingConfig",
    "Section",
    "SimulatorConfig",
    "SloConfig",
    "TenantConfig",
    "TenantLimits",
    "TierConfig",
    "TransferConfig",
    "WhatIfConfig",
    "able",
    "check_key_holders",
    "describe",
    "load",
    "move_blocks",
    "parse",
    "place_in",
    "put",
    "read_value",
    "refusal",
]
