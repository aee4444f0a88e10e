"""Where to send a request: the score of a replica. Pure; the live router and the simulator both call `rank`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from warmkv.config import RoutingConfig


def rank(
    replicas: Sequence[str],
    blocks: int,
    warm: Mapping[str, int],
    load: Mapping[str, int],
    config: RoutingConfig,
) -> list[str]:
    """Replicas from best to worst for a request of `blocks` blocks.

    `warm` has the leading blocks a replica holds, `load` its requests in flight; an absent replica has none. The
    cost is the blocks left to prefill plus `load_weight` blocks per request in flight. A replica with `overload`
    requests more than the least loaded one goes behind all that are not, however warm it is.
    """
    least = min((load.get(replica, 0) for replica in replicas), default=0)

    def cost(replica: str) -> tuple[bool, float, int, str]:
        busy = load.get(replica, 0)
        left = blocks - warm.get(replica, 0)
        return (busy - least >= config.overload, left + config.load_weight * busy, busy, replica)

    return sorted(replicas, key=cost)
