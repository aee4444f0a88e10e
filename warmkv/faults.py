"""Telling faults of the user from faults of warmkv: only the former are shown without a traceback."""

from __future__ import annotations

import sys
import traceback

INTERNAL = 70
"""Exit code of a fault of warmkv itself (EX_SOFTWARE of sysexits.h)."""


class UserError(ValueError):
    """Something that the user can put right: a file, an option, a setting. Its message says what, and how."""


def tell_internal(error: BaseException, version: str) -> None:
    """Print an error that nobody expected to stderr, with its traceback and where to report it."""
    traceback.print_exception(error, file=sys.stderr)
    print(
        f"\nThis is a fault of warmkv {version}, not of what you asked for. Please report it as an issue of the "
        "repository,\nwith the traceback above, the command and its settings (`warmkv config show`).",
        file=sys.stderr,
    )
