"""Whole answers as JSON, written beside the event loop where they are large."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi.responses import JSONResponse, Response


async def json_answer(body: dict[str, Any], headers: Mapping[str, str], *, large: bool) -> Response:
    """Return an answer as JSON.

    What is `large`, as with log-probabilities, is written in a thread by orjson: json's encoder would hold the GIL ten
    times as long.
    """
    if not large:
        return JSONResponse(body, headers=headers)
    data = await asyncio.to_thread(orjson.dumps, body)
    return Response(data, headers=headers, media_type="application/json")
