"""The Serve application: a gateway in front of replicas, and the directory actor between them."""

from __future__ import annotations

import secrets
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from warmkv.config import ClusterConfig, Config, ConfigError, parse
from warmkv.config.cluster import STOP_SECONDS
from warmkv.platform.control import start_control
from warmkv.platform.document import NOT_ON_THE_HEAD
from warmkv.platform.gateway.deployment import Gateway
from warmkv.platform.gateway.intake.overload import most_open
from warmkv.platform.listening import check_listening
from warmkv.platform.named_actors import replicas_name
from warmkv.platform.named_router import NamedRouter
from warmkv.platform.prefix_directory import start_directory
from warmkv.platform.tenants import roots_of, secret_of_environment
from warmkv.platform.tenants_file import roots_in_force
from warmkv.platform.whatif.actor import start_whatif
from warmkv.replicas.deployment import Replica

NAMED = RequestRouterConfig(request_router_class=NamedRouter)


def build(args: dict[str, Any]) -> serve.Application:
    """Build the Serve application (Serve's entry point); `args` is the configuration, settings at their defaults left
    out.

    Raises ConfigError where the configuration cannot be used.
    """
    return assembled(args)


def assembled(
    args: dict[str, Any],
    *,
    replica: type[Any] = Replica,
    gateway: type[Any] = Gateway,
    router: RequestRouterConfig = NAMED,
) -> serve.Application:
    """Build the application with any parts: races put others there."""
    config = parse(args)
    check_listening(config.gateway)
    configured = secret_of_environment()
    secret = configured or secrets.token_bytes(32)
    try:
        roots = roots_in_force(config, configured)
    except ConfigError:  # its tenants file may be where gateways run, and only there
        roots = roots_of(config, configured, ())
    directory = start_directory(config.cluster.application, config.directory)
    cluster = config.cluster
    start_control(cluster.application, config.control)
    start_whatif(config, directory)
    patience = config.gateway.health_seconds
    health = {"health_check_period_s": patience / 3, "health_check_timeout_s": patience}

    def deployed(name: str, group: Config) -> serve.Application:
        cluster = group.cluster
        return serve.deployment(
            replica,
            name=replicas_name(name),
            **_size(cluster),
            max_ongoing_requests=group.ongoing_requests,
            **_reserved(cluster),
            graceful_shutdown_timeout_s=cluster.stop_seconds,
            **health,
            request_router_config=router,
        ).bind(args, directory, name, roots)

    replicas = {name: deployed(name, group) for name, group in config.groups().items()}
    ingress = serve.deployment(
        serve.ingress()(gateway),
        name="gateway",
        num_replicas=cluster.gateways,
        # The gateway refuses what is too much itself, as its APIs say it; Serve, whose refusals are plain text, never.
        max_ongoing_requests=2 * most_open(config),
        max_queued_requests=-1,
        ray_actor_options={"num_cpus": 0, "label_selector": NOT_ON_THE_HEAD},
        graceful_shutdown_timeout_s=STOP_SECONDS + cluster.drain_seconds,
        **health,
    )
    return ingress.bind(args, secret, replicas, directory)


def _reserved(cluster: ClusterConfig) -> dict[str, Any]:
    """Return what Ray reserves for a replica as Serve's options: several GPUs as a placement group, on one node."""
    needs = {"CPU": cluster.cpus_per_replica, "GPU": cluster.gpus_per_replica}
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": needs["CPU"], "num_gpus": needs["GPU"]}}
    if needs["GPU"] > 1:
        bundle = {name: amount for name, amount in needs.items() if amount}
        options |= {"placement_group_bundles": [bundle], "placement_group_strategy": "STRICT_PACK"}
    return options


def _size(cluster: ClusterConfig) -> dict[str, Any]:
    """Return the number of replicas as Serve's options."""
    scaling = cluster.autoscaling
    if scaling is None:
        return {"num_replicas": cluster.replicas}
    return {
        "autoscaling_config": {
            "min_replicas": scaling.min_replicas,
            "initial_replicas": cluster.replicas,
            "max_replicas": scaling.max_replicas,
            "target_ongoing_requests": scaling.target_ongoing_requests,
            "upscale_delay_s": scaling.upscale_delay_seconds,
            "downscale_delay_s": scaling.downscale_delay_seconds,
            "look_back_period_s": scaling.look_back_seconds,
        },
    }
