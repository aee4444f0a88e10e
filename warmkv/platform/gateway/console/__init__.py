"""The console: one page for operators without Grafana. It holds no secret, so it needs no key; what it calls does."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

FOLDER = Path(__file__).parent
FILES = {
    "style.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
PATHS = ("/console", *(f"/console/{name}" for name in FILES))
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_console(app: FastAPI) -> None:
    """Add `/console` and its files, read once at the start."""

    def add(path: str, name: str, kind: str) -> None:
        content = (FOLDER / name).read_bytes()

        @app.get(path, include_in_schema=False)
        async def page() -> Response:
            return Response(content, media_type=kind, headers=HEADERS)

    add("/console", "index.html", "text/html; charset=utf-8")
    for name, kind in FILES.items():
        add(f"/console/{name}", name, kind)
