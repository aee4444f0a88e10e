"""What outlives the what-if service's actor: candidates of operators, and the autopilot's open step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from warmkv.config import Section
from warmkv.platform.live_config_store import Store, StoreError, restored
from warmkv.platform.whatif.decision import Step


class Kept(Section):
    candidates: Mapping[str, Mapping[str, Any]] = Field({}, description="changes of operators' candidates, by name")
    step: Step | None = None


class Memory:
    """Keep it in the store of the live configuration.

    What cannot be read is copied aside, and nothing is known; `fault` tells so until something is kept again.
    """

    def __init__(self, store: Store, application: str, now: float) -> None:
        self._store, self._name = store, f"{application}-what-if.json"
        found, self.fault = restored(store, self._name, Kept, now)
        self.kept = found or Kept()

    def keep(self, **changed: Any) -> None:
        """Keep changed fields: a small write, for each change by an operator or step. Raises StoreError; then nothing
        has changed.
        """
        kept = self.kept.model_copy(update=changed)
        try:
            self._store.write(self._name, kept.model_dump_json(indent=1).encode())
        except OSError as error:
            raise StoreError(f"it could not be kept: {error}") from None
        self.kept, self.fault = kept, ""
