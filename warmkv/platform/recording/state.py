"""What a recording keeps from run to run, so that its log stays one: the salt of hashes, and the scale of texts."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from warmkv.faults import UserError
from warmkv.prefixes.prompt_text import Scale

SALT_BYTES = 32


class StateError(UserError):
    """A state file that cannot be used."""


@dataclass(slots=True)
class State:
    """The salt and the scale, and the file that has them; without a file they end with the process."""

    salt: bytes
    scale: Scale = field(default_factory=Scale)
    path: Path | None = None
    saved: bytes | None = None  # the file's salt, where another one is used

    @classmethod
    def of(cls, path: Path, salt: str | None = None) -> State:
        """Read a state file, or make one that only its owner can read; `salt` overrides its salt. Raises StateError."""
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            state = cls(
                bytes.fromhex(saved["salt"]), Scale(None, {str(k): float(v) for k, v in saved["scale"].items()})
            )
            state.path = path
        except FileNotFoundError:
            state = cls(secrets.token_bytes(SALT_BYTES), path=path)
            state.save()
        except OSError as error:
            raise StateError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise StateError(
                f"{path} is no state of `warmkv record`; remove it, or name another with --state"
            ) from None
        if salt is not None:
            state.saved, state.salt = state.salt, salt.encode()
        return state

    def save(self) -> None:
        """Write the file anew, whole or not at all. Raises StateError."""
        if self.path is None:
            return
        written = self.path.with_name(f"{self.path.name}.new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(file, "w", encoding="utf-8") as out:
                json.dump({"salt": (self.saved or self.salt).hex(), "scale": self.scale.known}, out)
            written.replace(self.path)
        except OSError as error:
            raise StateError(f"cannot write {self.path}: {error.strerror}") from None
