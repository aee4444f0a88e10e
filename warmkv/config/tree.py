"""The whole configuration, with the checks across sections."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError, model_validator

from warmkv.config.base import Section
from warmkv.config.capabilities import Capabilities, Needs, refusal
from warmkv.config.cluster import ClusterConfig
from warmkv.config.compression import CompressionConfig
from warmkv.config.control import ControlConfig
from warmkv.config.dashboards import DashboardsConfig
from warmkv.config.engine import NOT_OF, VLLM_STORAGES, EngineConfig
from warmkv.config.gateway import GatewayConfig
from warmkv.config.model import ModelConfig
from warmkv.config.prefix_cache import PrefixCacheConfig
from warmkv.config.pricing import Prices, PricingConfig
from warmkv.config.routing import DirectoryConfig, RoutingConfig, TransferConfig
from warmkv.config.simulator import SimulatorConfig
from warmkv.policy_spec import PolicySpec

OF_GROUPS: dict[str, frozenset[str]] = {
    "cluster": frozenset(("replicas", "autoscaling", "cpus_per_replica", "gpus_per_replica")),
    "engine": frozenset(EngineConfig.model_fields),
    "model": frozenset(("device",)),
    "prefix_cache": frozenset(
        ("memory_bytes", "eviction", "storage", "host", "disk", "moving_bytes", "tenant_share", "packs", "keep_warm")
    ),
    "simulator": frozenset(("profile", "gpu", "step_a", "step_b", "step_c")),
}
"""Settings in which groups of replicas may differ: all others are of the model, or of the gateways."""


def place_in(group: str, setting: str) -> str:
    """Return where a setting of a group of replicas is written; the configuration itself is the group ""."""
    return f"cluster.groups.{group}.{setting}" if group else setting


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

    def prices_of(self, model: str) -> Prices:
        """Return the prices of a model that a log names: its own where it has any, else those of the one served."""
        return self.pricing.of(model if model in self.pricing.models else self.model.name)

    @property
    def batches_as_vllm(self) -> bool:
        """Return True if simulated replicas form their batches as vLLM does."""
        batching = self.simulator.batching
        return batching == "mixed" or (batching == "auto" and self.engine.kind == "vllm")

    @property
    def whole_cache(self) -> PolicySpec:
        """Return the policy that keeps everything, which vLLM does in the format of its prefixes."""
        return PolicySpec(storage=self.prefix_cache.storage if self.engine.kind == "vllm" else "model")

    @property
    def kv_block(self) -> int | None:
        """Return the tokens of the blocks that a running sequence takes; None where it has a slot."""
        return self.prefix_cache.block_size if self.engine.kind == "vllm" else None

    @property
    def has_one_pool(self) -> bool:
        """Return True if simulated replicas keep requests and prefixes in one pool of blocks, as vLLM does."""
        return self.engine.kind == "vllm" and self.batches_as_vllm

    @property
    def ongoing_requests(self) -> int:
        """Return the requests that Serve sends to one replica at a time."""
        return self.engine.max_slots + self.engine.max_queue

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.engine.kind == "vllm":
            self._check_vllm()
        self._check_defaults(NOT_OF[self.engine.kind])
        if self.engine.batch_invariant and (storage := self.prefix_cache.storage) != "model":
            raise ValueError(
                f"engine.batch_invariant cannot be had with prefix_cache.storage {storage}: what others have stored "
                "would be rounded"
            )
        if fault := refusal(self.capabilities.values(), Needs(self.compression.policy)):
            raise ValueError(f"compression.policy: {fault}")
        if missing := sorted(set(self.prefix_cache.ttls) - set(self.pricing.write)):
            raise ValueError(f"pricing.write has no multiplier for the TTL {missing[0]!r} of prefix_cache.ttls")
        self._check_failures()
        for alias, name in self.gateway.models.items():
            if name != self.model.name:
                raise ValueError(
                    f"gateway.models: {alias} is {name}, but the model that is served is {self.model.name}"
                )
        return self

    @property
    def capabilities(self) -> dict[str, Capabilities]:
        """Return what each group of replicas can do."""
        groups = self.groups().items()
        return {name: group.engine.capabilities(group.prefix_cache.storage) for name, group in groups}

    def groups(self) -> dict[str, Config]:
        """Return the configuration of each group of replicas; that of the configuration itself has the name "".

        Raises ValueError with the place of a setting that cannot be another one in a group, or is wrong.
        """
        plain = self.model_copy(update={"cluster": self.cluster.model_copy(update={"groups": {}})})
        found = {"": plain} | {name: _group(plain, name, tree) for name, tree in self.cluster.groups.items()}
        return {name: group._with_failures_of(name) for name, group in found.items()}

    def _with_failures_of(self, name: str) -> Config:
        failures = tuple(failure for failure in self.simulator.failures if failure.group == name)
        if failures == self.simulator.failures:
            return self
        return self.model_copy(update={"simulator": self.simulator.model_copy(update={"failures": failures})})

    @property
    def image_target(self) -> str:
        """Return the target of `k8s/Dockerfile` that has the packages of all groups; empty where every target does."""
        return next(filter(None, (group.engine.image_target for group in self.groups().values())), "")

    @property
    def most_replicas(self) -> int:
        """Return the most replicas that there may be, of all groups."""
        return sum(group.cluster.most_replicas for group in self.groups().values())

    @property
    def first_replicas(self) -> int:
        """Return the replicas at the start, of all groups."""
        return sum(group.cluster.replicas for group in self.groups().values())

    def _check_failures(self) -> None:
        if not self.simulator.failures:
            return
        most = {name: group.cluster.most_replicas for name, group in self.groups().items()}
        for failure in self.simulator.failures:
            if failure.group not in most:
                known = ", ".join(name for name in most if name) or "none"
                raise ValueError(f"simulator.failures: no group {failure.group!r} in cluster.groups, which has {known}")
            if failure.replica >= most[failure.group]:
                raise ValueError(
                    f"simulator.failures: no replica {failure.replica} of {most[failure.group]}; the first is 0"
                )

    def _check_vllm(self) -> None:
        if (storage := self.prefix_cache.storage) not in VLLM_STORAGES:
            known = ", ".join(VLLM_STORAGES)
            raise ValueError(
                f"prefix_cache.storage: {storage} cannot be had from an engine of kind vllm, which has {known}"
            )

    def _check_defaults(self, settings: Sequence[str]) -> None:
        for dotted in settings:
            section, name = dotted.split(".")
            held = getattr(self, section)
            if getattr(held, name) != type(held).model_fields[name].get_default():
                raise ValueError(f"{dotted} cannot be had from an engine of kind {self.engine.kind}: leave it out")


def _group(plain: Config, name: str, tree: Mapping[str, Any]) -> Config:
    """Return a configuration with what differs in a group of replicas. Raises ValueError."""
    at = f"cluster.groups.{name}"
    if not re.fullmatch("[a-z0-9-]+", name):
        raise ValueError(f"{at}: a name has small letters, digits and dashes")
    merged = plain.model_dump(mode="json", exclude_defaults=True)
    for others in ("compression", "simulator"):  # of requests that may be for another group; see below
        merged.pop(others, None)
    for section, settings in tree.items():
        if section not in OF_GROUPS or not isinstance(settings, Mapping):
            raise ValueError(f"{at}.{section}: write the settings of {', '.join(OF_GROUPS)} that differ")
        if other := sorted(settings.keys() - OF_GROUPS[section]):
            known = ", ".join(sorted(OF_GROUPS[section]))
            raise ValueError(f"{at}.{section}.{other[0]} cannot differ; known: {known}")
        merged[section] = {**merged.get(section, {}), **copy.deepcopy(dict(settings))}
    kind = merged.get("engine", {}).get("kind", plain.engine.kind)
    for setting in NOT_OF.get(str(kind), ()):  # inherited ones are left out; the group's own are refused
        section, _, key = setting.partition(".")
        if key not in tree.get(section, {}):
            merged.get(section, {}).pop(key, None)
    storage = merged.get("prefix_cache", {}).get("storage")
    if kind == "vllm" and storage in VLLM_STORAGES:
        merged["compression"] = {"policy": {"storage": storage}}  # the only one that it serves
    try:
        group = Config.model_validate(merged)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, (at, *fault["loc"])))
        raise ValueError(f"{place}: {fault['msg'].removeprefix('Value error, ')}") from None
    own = {name: getattr(group.simulator, name) for name in group.simulator.model_fields_set}
    simulator = plain.simulator.model_copy(update=own)
    return group.model_copy(update={"simulator": simulator})
