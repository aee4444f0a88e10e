"""RocketKV (Behnam et al., 2025, arXiv 2502.14051): half of the compression for good, half anew for every token."""

from __future__ import annotations

from warmkv.policies.compression.snapkv import SnapKV


class RocketKV(SnapKV):
    """SnapKV with a wide max pooling keeps T / cr^alpha tokens (stage 1; `policies/budgets.py:rocket_kept`).

    While decoding, only the pages whose keys can match the query best are read, as many tokens as the budget allows
    (stage 2; `replicas/slots/attention.py:attend_pages`). The budget bounds what is read, not what is resident.
    """
