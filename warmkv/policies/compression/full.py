"""The full cache: the baseline that every method is compared with."""

from __future__ import annotations

from warmkv.policies.compression.base import Policy


class Full(Policy):
    """Keep everything; the answers are those of plain transformers."""
