"""Stores for the versions of the live configuration: a folder, or the Ray cluster's own store."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from typing import Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from warmkv.config import ControlConfig
from warmkv.platform.named_actors import NAMESPACE

log = logging.getLogger("ray.serve")

T = TypeVar("T", bound=BaseModel)


class StoreError(RuntimeError):
    """A change that could not be kept, and is therefore not in force."""


class Store(Protocol):
    """Bytes by name. Both raise OSError where that is not possible."""

    def read(self, name: str) -> bytes | None: ...
    def write(self, name: str, data: bytes) -> None: ...


class FolderStore:
    """Files in a folder, which is made if missing. A file is whole at any time: the old one, or the new one."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._path = path

    def read(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        beside = (
            self._path / f".{name}.{gethostname()}.{os.getpid()}.new"
        )  # two clusters of an upgrade may share the folder
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path / name)
        folder = os.open(self._path, os.O_RDONLY)  # or the new name may be lost with the power
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class ClusterStore:
    """Ray's key-value store: it lives as long as the head, and beyond where Ray keeps its state in Redis."""

    def read(self, name: str) -> bytes | None:
        from ray.experimental import internal_kv

        with _as_os_error():
            found: bytes | None = internal_kv._internal_kv_get(name, namespace=NAMESPACE)
        return found

    def write(self, name: str, data: bytes) -> None:
        from ray.experimental import internal_kv

        with _as_os_error():
            internal_kv._internal_kv_put(name, data, overwrite=True, namespace=NAMESPACE)


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise Ray's errors, as of a head that does not answer, as OSError."""
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        raise OSError(str(error)) from error


def store_of(config: ControlConfig) -> Store:
    """Return the store of the versions: a folder, or else Ray itself."""
    return FolderStore(config.path.absolute()) if config.path else ClusterStore()


def restored(store: Store, name: str, kind: type[T], now: float) -> tuple[T | None, str]:
    """Return what is kept under a name, None where nothing is, and why it cannot be read; then it is copied aside."""
    if (data := store.read(name)) is None:
        return None, ""
    try:
        return kind.model_validate_json(data), ""
    except ValidationError as error:
        aside = f"{name}.damaged-{int(now)}"
        store.write(aside, data)
        fault = f"{name} cannot be read and was copied to {aside}: {error.errors()[0]['msg']}"
        log.error("%s", fault)
        return None, fault
