"""Keys that were settings once: ignored, or read at their new place, with a warning. A right file stays right."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from warmkv.config.values import Place, put

log = logging.getLogger(__name__)

REMOVED: dict[str, str] = {
    "cluster.autoscaling.look_back_seconds": "it is cluster.autoscaling.upscale_delay_seconds, and 15 s at least",
    "cluster.health_check_seconds": "it is a sixth of gateway.stall_seconds",
    "cluster.health_timeout_seconds": "it is half of gateway.stall_seconds",
    "cluster.max_ongoing_requests": "it is engine.max_slots + engine.max_queue; lower engine.max_queue instead",
    "control.apply_seconds": "it is 5 s",
    "control.follow_seconds": "it is 10 s",
    "control.history": "100 versions are kept",
    "control.max_body_bytes": "it is gateway.max_body_bytes",
    "control.silence_seconds": "it is 15 s",
    "control.start_seconds": "it is 60 s",
    "dashboards.datasource_uid": "give --datasource to warmkv dashboards publish",
    "dashboards.folder": "give --folder to warmkv dashboards publish",
    "dashboards.token_env": "put the token into GRAFANA_TOKEN",
    "directory.follow_seconds": "it is 10 s",
    "directory.heartbeat_seconds": "it is 1 s",
    "directory.log_blocks": "it is a fifth of directory.max_blocks",
    "directory.publish_seconds": "it is 250 ms",
    "directory.silence_seconds": "it is 15 s",
    "engine.beat_seconds": "it is a twelfth of gateway.stall_seconds",
    "engine.stall_seconds": "it is five times gateway.stall_seconds",
    "gateway.access_log_files": "4 files are kept besides the one that is written",
    "gateway.access_log_queue": "10000 lines may wait",
    "gateway.error_logs_per_minute": "it is 60",
    "gateway.intake.large_bytes": "it is 1 MiB",
    "gateway.intake.max_blocks": "it is two fifths of the JSON values, which follow from gateway.max_body_bytes",
    "gateway.intake.max_depth": "it is 200, where the JSON parser ends",
    "gateway.intake.max_messages": "it is a fifth of the JSON values, which follow from gateway.max_body_bytes",
    "gateway.intake.max_stop_characters": "it is a thirtieth of the JSON values, which follow from "
    "gateway.max_body_bytes",
    "gateway.intake.max_tools": "it is a fiftieth of the JSON values, which follow from gateway.max_body_bytes",
    "gateway.intake.max_values": "it is one for 64 bytes of gateway.max_body_bytes, and 500000 at least",
    "gateway.intake.max_waiting": "it is cluster.max_queued_requests",
    "gateway.intake.parse_seconds": "it is 60 s, or gateway.request_timeout_seconds where that is less",
    "gateway.intake.read_seconds": "it is 120 s",
    "gateway.intake.threads": "there are 2, and one for large bodies",
    "gateway.intake.total_bytes": "it is 8 times gateway.max_body_bytes",
    "gateway.limited_tenants": "10000 are remembered",
    "gateway.max_requests": "it is engine.max_slots + engine.max_queue of all replicas, and twice "
    "cluster.max_queued_requests",
    "gateway.ping_seconds": "it is 5 s",
    "gateway.resume": "answers that had begun always go on in another replica; gateway.retries: 0 sends nothing again",
    "gateway.retry_seconds": "it is 0.5 s",
    "gateway.salt_env": "put the secret into WARMKV_SALT",
    "gateway.tenants_file_seconds": "it is 5 s",
    "prefix_cache.allow_lossy": "the storage of a tier decides alone",
    "prefix_cache.attention_tokens": "it is 8192",
    "prefix_cache.disk.eviction": "it is prefix_cache.eviction",
    "prefix_cache.disk.wait_seconds": "it is 5 s",
    "prefix_cache.host.eviction": "it is prefix_cache.eviction",
    "prefix_cache.lookback": "it is 20 content blocks",
    "prefix_cache.memory_share": "it is a third; set prefix_cache.memory_bytes for another size",
    "routing.breaker_failures": "it is 3",
    "routing.breaker_max_seconds": "it is 60 s",
    "routing.breaker_seconds": "it is 5 s",
    "routing.disk_credit": "it is 0.25",
    "routing.host_credit": "it is 0.75",
    "routing.prefill_weight": "it is 0.5 blocks",
    "routing.queue_weight": "it is 8 blocks",
    "routing.recent_weight": "it is 0.1 blocks",
    "routing.session_blocks": "it is 4 blocks",
    "routing.transfer_block": "it is 0.25 blocks",
    "routing.transfer_min_blocks": "it is 8 blocks",
    "routing.transfer_start": "it is 4 blocks",
    "simulator.roofline.overhead_seconds": "it is 1 ms",
    "transfer.concurrent": "it is 4",
    "transfer.half_life": "it is 8 measurements",
    "transfer.handover_bytes": "it is 256 MiB; cluster.drain_seconds: 0 turns handing over off",
    "transfer.handover_seconds": "it is a third of cluster.drain_seconds",
    "transfer.piece_bytes": "it is 32 MiB",
    "transfer.start_seconds": "it is 20 ms",
    "transfer.timeout_seconds": "it is a thirtieth of gateway.stall_seconds",
    "transfer.token_seconds": "it is 100 us until a replica has measured; routing.transfer: always does not ask",
}
"""What each became, or what to do instead."""

MOVED: dict[str, str] = {
    "engine.prefill_chunk": "engine.step_tokens",
    **{f"simulator.{key}": f"simulator.model.{key}" for key in ("layers", "kv_heads", "head_dim", "dtype_bytes")},
    "simulator.roofline.bandwidth_efficiency": "simulator.gpu.bandwidth_efficiency",
    "simulator.roofline.flops_efficiency": "simulator.gpu.flops_efficiency",
}
"""Where the values of keys lie now that lay elsewhere once."""

_PLAIN = {"simulator.gpu": "name", "simulator.model": "path"}
"""What a plain value stands for where one may be written in place of a mapping."""


def without_removed(tree: Mapping[str, Any], origin: Callable[[Place], str | None]) -> Mapping[str, Any]:
    """Return a tree without removed keys, and values at their new keys; a warning tells of each with its source."""
    for old, new in MOVED.items():
        place = tuple(old.split("."))
        if (found := _find(tree, place)) is not None:
            _warn(old, f"it is {new}", origin(place))
            moved = copy.deepcopy(dict(_without(tree, place)))
            section = new.rpartition(".")[0]
            if not isinstance(named := _find(moved, tuple(section.split("."))), Mapping | None):
                put(moved, section, {_PLAIN[section]: named})
            put(moved, new, found)
            tree = moved
    for dotted, now in REMOVED.items():
        place = tuple(dotted.split("."))
        without = _without(tree, place)
        if without is not tree:
            _warn(dotted, now, origin(place))
            tree = without
    return tree


@cache
def _warn(dotted: str, now: str, source: str | None) -> None:
    """Log the warning once a process: a sweep reads the same file for every point."""
    log.warning("%s is no setting any more: %s%s", dotted, now, f" ({source})" if source else "")


def _find(tree: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _without(tree: Mapping[str, Any], place: tuple[str, ...]) -> Mapping[str, Any]:
    key, *rest = place
    if key not in tree:
        return tree
    below = tree[key]
    inner = _without(below, tuple(rest)) if rest and isinstance(below, Mapping) else below
    if rest and inner is below:
        return tree
    others = {name: value for name, value in tree.items() if name != key}
    return {**others, key: inner} if rest and inner else others  # a section that is empty now may be gone, too
