"""Which API a path belongs to, and who it is for. Paths are those within the application (`path_of`)."""

from __future__ import annotations

from collections.abc import Mapping

from starlette._utils import get_route_path
from starlette.types import Scope

APIS = {
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/models": "models",
    "/v1/embeddings": "embeddings",
}
OPENAI_APIS = frozenset({"chat", "completions", "responses", "embeddings"})
OTHER_APIS = frozenset({"messages", "count_tokens", "prefixes", "warmkv"})
OF_TENANTS = "/v1/warmkv/prefixes"  # alone of warmkv's own: a tenant forgets what is stored of it


def path_of(scope: Scope) -> str:
    """Return the path within the application, without `gateway.route_prefix`."""
    return get_route_path(scope)  # as endpoints are found


def api_of(path: str) -> str:
    """Return the API of a path, from a fixed set: "other" for what is not there."""
    if path.startswith("/v1/warmkv/"):
        return "prefixes" if path == OF_TENANTS else "warmkv"
    path = path.rstrip("/")
    for known, name in APIS.items():
        if path.endswith(known):
            return name
    if "/v1/responses/" in path:
        return "responses"
    return "models" if "/v1/models/" in path else "other"


def of_operators(path: str) -> bool:
    """Return True for a path that is for operators only."""
    return api_of(path) == "warmkv"


def speaks_openai(path: str, headers: Mapping[str, str]) -> bool:
    """Return True where a client wants OpenAI's form: by the API of the path, or by its headers if that is of several.

    Clients of the Messages API send their version, even with a bearer token.
    """
    if (api := api_of(path)) in OPENAI_APIS | OTHER_APIS:
        return api in OPENAI_APIS
    if "anthropic-version" in headers or "x-api-key" in headers:
        return False
    return headers.get("authorization", "").lower().startswith("bearer ")
