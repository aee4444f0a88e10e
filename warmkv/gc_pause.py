"""Disable cyclic garbage collection while many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable cyclic GC inside, and set it back after: for requests and jobs of a replay, or modules of large packages.

    Each collection would visit all of them. Reference counting goes on as ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # what was made meanwhile joins the oldest, so that none of it is visited now
                gc.freeze()
                gc.unfreeze()
            gc.enable()
