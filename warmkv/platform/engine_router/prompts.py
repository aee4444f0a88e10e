"""A request's body as a router needs it: whose prefix it is, its blocks, and the session that it names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from warmkv.platform import json_values
from warmkv.platform.recording.exchange import MOST_VALUES
from warmkv.prefixes import hashing, prompt_text
from warmkv.request_context import session_of_body, session_of_headers

SALT_FIELD = "cache_salt"
"""Field of vLLM's APIs by which prompts are kept apart in its prefix cache."""

EXTRA_FIELD, REPORT_MODE = "vllm_xargs", "kv_cache_report_mode"
"""Field and key by which a request has vLLM tell again of the blocks that it finds, each of which counts as a copy."""


class Prompt(NamedTuple):
    """Hold keys of a prompt's blocks by its text and, where they are known, by its tokens."""

    text: Sequence[bytes] = ()
    tokens: Sequence[bytes] = ()
    session: bytes = b""

    @property
    def hashes(self) -> Sequence[bytes]:
        """Return the keys that are nearest to what servers store."""
        return self.tokens or self.text


def read_body(data: bytes) -> dict[str, Any] | None:
    """Return a request's body; None where it is no JSON object. Raises RecursionError or TooManyValuesError."""
    try:
        asked = json_values.loads(data, MOST_VALUES) if data else None
    except ValueError:
        return None
    return asked if isinstance(asked, dict) else None


def prompt_of(headers: Mapping[str, str], asked: Mapping[str, Any], block_size: int) -> Prompt:
    """Return the blocks of a body's text, kept apart by its salt, and the session that it or a header names."""
    root = hashing.chain_root((salt_of(asked) or "").encode("utf-8", "surrogatepass"), str(asked.get("model", "")))
    parts = [part._replace(ttl=None) for part in prompt_text.parts_of(asked)]
    session = session_of_headers(headers) or session_of_body(asked.get("prompt_cache_key"), asked.get("metadata"))
    hashes = prompt_text.plan(parts, root, block_size, prompt_text.BYTES_PER_TOKEN).plan.hashes
    return Prompt(hashes, (), session.encode("utf-8", "surrogatepass"))


def salt_of(asked: Mapping[str, Any]) -> str | None:
    """Return the `cache_salt` of a body; None where there is none."""
    salt = asked.get(SALT_FIELD)
    return salt if isinstance(salt, str) and salt else None


def root_of(salt: str | None) -> bytes:
    """Return the root of the chain of tokens under a salt: whatever vLLM tells of has one."""
    return hashing.chain_root((salt or "").encode("utf-8", "surrogatepass"), "kv-events")


def tenant_salt(secret: str, headers: Mapping[str, str], asked: Mapping[str, Any]) -> str:
    """Derive the `cache_salt` of a request's API key; one that the client chose tells its own prompts apart."""
    bearer = headers.get("authorization", "")
    key = headers.get("x-api-key") or bearer.partition(" ")[2] or bearer
    hashed = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
    return hashing.tenant_salt(secret.encode(), f"route:{hashed}:{salt_of(asked) or ''}").hex()


def without_reports(data: bytes, asked: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """Return a body, and what it says, without the wish to have blocks told of again."""
    extra = asked.get(EXTRA_FIELD)
    if not isinstance(extra, dict) or REPORT_MODE not in extra:
        return data, asked
    asked = asked | {EXTRA_FIELD: {name: value for name, value in extra.items() if name != REPORT_MODE}}
    return json.dumps(asked).encode(), asked


def with_salt(data: bytes, asked: dict[str, Any], salt: str) -> bytes:
    """Return a body with another `cache_salt`; all else of it keeps its bytes where it had none."""
    if SALT_FIELD in asked or json.detect_encoding(data) != "utf-8":
        return json.dumps(asked | {SALT_FIELD: salt}).encode()
    comma = "," if asked else ""
    return data.rstrip()[:-1] + f'{comma}"{SALT_FIELD}":"{salt}"}}'.encode()
