"""PyramidKV (Cai et al., 2024, arXiv 2406.02069): lower layers keep more than upper ones.

What a layer keeps falls linearly with its height (`policies/budgets.py:pyramid`); which tokens is SnapKV's choice.
"""

from __future__ import annotations

from warmkv.policies.compression.snapkv import SnapKV


class PyramidKV(SnapKV):
    """SnapKV under budgets that differ by layer."""
