"""What `GET /v1/warmkv/memory` tells of a replica: what it uses beside what it planned at its start."""

from __future__ import annotations

from typing import Any


def memory_of(status: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of a replica by use, as it reported them last, and its plan if it has one."""
    used = {use: status.get(f"{use}_bytes", 0) for use in ("weight", "slot", "workspace", "store", "step")}
    plan = status.get("memory")
    return {
        **{f"{use}_bytes": size for use, size in used.items()},
        "total_bytes": sum(used.values()),
        "allocator_bytes": status.get("allocator_bytes"),
        "limits": {name: limit["bytes"] for name, limit in plan["limits"].items()} if plan else {},
        "plan": plan,
    }
