"""What rules tell about manifests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from warmkv.platform.kubernetes.rendered import RenderedManifests


@dataclass(frozen=True, slots=True)
class RuleFinding:
    """Tell something about manifests.

    An error must be mended; a note says what is not set yet, or could not be checked.
    """

    rule: str
    where: str
    what: str
    todo: str
    level: Literal["error", "note"] = "error"


Told = Iterator[tuple[str, str, str] | tuple[str, str, str, Literal["error", "note"]]]
"""Where, what is wrong, what to do, and the level where it is a note."""

Rule = Callable[[RenderedManifests], Told]
