"""The operator's key of a run of `warmkv serve`, in a file of the user's that `warmkv policy` reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from warmkv.config import GatewayConfig, OperatorConfig
from warmkv.platform.listening import is_loopback

NAME = "local"  # of the operator, in the history of the policy


def with_operator(gateway: GatewayConfig, key: str) -> GatewayConfig:
    """Return the settings with one more operator, known by the key."""
    from warmkv.platform.tenants import hash_key  # loads numpy, which `warmkv --help` does without

    operator = OperatorConfig(name=NAME, key_sha256=hash_key(key))
    return gateway.model_copy(update={"operators": (*gateway.operators, operator)})


def key_file(port: int) -> Path:
    """Return where the key of the service on that port is kept: in $XDG_RUNTIME_DIR, else in ~/.cache."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(folder) if folder else Path.home() / ".cache") / "warmkv" / f"operator-{port}"


@contextmanager
def kept(port: int, key: str) -> Iterator[Path]:
    """Keep the key in its file meanwhile, for this user only. Raises OSError if it cannot be written."""
    path = key_file(port)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of a run that was killed; its mode may be any
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    try:
        yield path
    finally:
        with suppress(FileNotFoundError):
            if path.read_text() == key:  # a later run on this port keeps its own
                path.unlink()


def read_key(url: str) -> str:
    """Return the key of the service on this machine that the URL names; empty if there is none."""
    with suppress(ValueError, OSError):
        place = urlsplit(url)
        if is_loopback(place.hostname or "") and place.port:
            return key_file(place.port).read_text()
    return ""
