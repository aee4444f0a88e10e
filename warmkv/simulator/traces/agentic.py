"""Agentic sessions: a session a line, with `id`, `block_size`, `hash_id_scope` and `requests`, each with `t` in seconds
from the session's start, `in`, `out`, `hash_ids` of its full blocks and `think_time`.

Sessions whose scope is "local" number their blocks for themselves, so equal numbers of two sessions mean nothing. What
subagents did inside a request is not replayed (the published figures leave it out, too); they are counted as skipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from warmkv.simulator.traces.columns import Row, RowError
from warmkv.simulator.traces.rows import (
    Format,
    Parse,
    Reading,
    field,
    has_keys,
    listed,
    mapping,
    number,
    objects,
    whole,
)

LOCAL_IDS = 1 << 40  # local block numbers are below it, so that session and number fit into 64 bits


def parser(reading: Reading) -> Parse:
    sessions = reading.learned.sessions

    def parse(line: str) -> Iterable[Row | None]:
        session = mapping(line)
        name = str(field(session, "id"))
        size = reading.block_size or whole(session, "block_size")
        if size < 1:
            raise RowError(f"block_size must be positive, not {size}")
        local = session.get("hash_id_scope", "local") == "local"
        base = sessions.setdefault(name, len(sessions)) * LOCAL_IDS if local else 0
        for request in listed(session, "requests"):
            if not isinstance(request, dict):
                raise RowError("a request of the session is no JSON object")
            if request.get("type") == "subagent":
                yield None
                continue
            ids = listed(request, "hash_ids")
            if local and ids:
                _check(ids)
            yield Row(
                arrival=number(request, "t"),
                input_tokens=whole(request, "in"),
                output_tokens=whole(request, "out"),
                blocks=[base + number for number in ids] if base else ids,
                block_size=size,
                session=name,
                think=number(request, "think_time") if "think_time" in request else 0.0,
            )

    return parse


def _check(ids: list[Any]) -> None:
    """Raise RowError for ids that are no numbers of a session's blocks."""
    try:
        fit = 0 <= min(ids) <= max(ids) < LOCAL_IDS
    except TypeError:
        raise RowError("hash_ids must be integers") from None
    if not fit:
        raise RowError(f"hash_ids of a session must be from 0 to 2**40, not {min(ids)} to {max(ids)}")


AGENTIC = Format(
    "agentic",
    lambda line: has_keys(line, ("requests", "block_size")),
    parser,
    objects,
    "all sessions begin at 0: times count from the start of each",
)
