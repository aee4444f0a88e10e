"""Token ids of a prompt, asked of the servers themselves: they render it as they will when they answer."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import aiohttp

from warmkv.platform.engine_router.prompts import read_body
from warmkv.platform.json_values import TooManyValuesError

log = logging.getLogger(__name__)

PASSED_ON = ("authorization", "x-api-key")
MISSING = (404, 405, 501)
IMAGES = frozenset(
    ("image", "image_url", "input_image", "input_audio", "audio_url", "video_url", "document", "input_file")
)
"""Content of which servers store blocks under more than their tokens."""


class Post(Protocol):
    """Send a JSON body to an address; return the status and the answer. Raises ClientError, OSError or ValueError."""

    async def __call__(self, url: str, body: Any, headers: Mapping[str, str]) -> tuple[int, Any]: ...


def poster(session: aiohttp.ClientSession, seconds: float) -> Post:
    """Return what posts by a session, each time for so many seconds at most."""

    async def post(url: str, body: Any, headers: Mapping[str, str]) -> tuple[int, Any]:
        timeout = aiohttp.ClientTimeout(total=seconds)
        typed = {**headers, "Content-Type": "application/json"}  # a session that passes headers on adds none itself
        async with session.post(url, json=body, headers=typed, timeout=timeout) as answer:
            if answer.status == 200:
                return answer.status, await answer.json(content_type=None)
            return answer.status, read_body(await answer.read())

    return post


class Tokenizers:
    """Ask servers in turn for token ids; of those that lack an endpoint, once."""

    def __init__(self) -> None:
        self._turn = itertools.count()
        self._lacking: set[tuple[str, str]] = set()  # servers, and APIs whose prompts they do not tokenize
        self.asked = self.failed = 0

    async def tokens(
        self,
        post: Post,
        engines: Sequence[str],
        api: str,
        path: str,
        asked: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> Sequence[int]:
        """Return the token ids of a request's prompt; () where they cannot be had in time.

        `path` is that of the request, decoded, with what stands before `/v1` where it is served.
        """
        if api == "completions" and (ids := _ids(asked.get("prompt"))):
            return ids
        if has_images(asked) or (api == "completions" and not isinstance(asked.get("prompt"), str)):
            return ()
        able = [engine for engine in engines if (engine, api) not in self._lacking]
        if not able:
            return ()
        engine = able[next(self._turn) % len(able)]
        path = path.rstrip("/")
        if api in ("chat", "completions"):
            path = f"{path.rpartition('/v1/')[0]}/tokenize"
        else:
            path += "/render"  # vLLM has it with --enable-scale-out
        self.asked += 1
        try:
            status, answer = await post(
                engine + path, asked, {name: headers[name] for name in PASSED_ON if name in headers}
            )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError, TooManyValuesError):
            self.failed += 1
            return ()
        if status in MISSING and not _lacks_model(answer):
            self._lacking.add((engine, api))
            log.warning("%s has no %s: prompts of %s are routed by what servers were sent", engine, path, api)
        found = _ids(answer.get("tokens", answer.get("token_ids"))) if isinstance(answer, dict) else ()
        self.failed += not found
        return found


def _lacks_model(answer: Any) -> bool:
    """Tell if a 404 is vLLM's own, of the model that a request names, and not that of an endpoint which is missing."""
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    return isinstance(error, dict) and error.get("type") == "NotFoundError"


def has_images(value: Any) -> bool:
    """Tell if content of other kinds than text is anywhere in a body."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(kind := value.get("type"), str) and kind in IMAGES:
                return True
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return False


def _ids(value: Any) -> Sequence[int]:
    """Return token ids as they are; () for what is none, or empty."""
    if isinstance(value, list) and value and all(type(item) is int and 0 <= item < 1 << 32 for item in value):
        return value
    return ()
