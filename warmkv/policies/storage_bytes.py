"""What an entry of a compressed cache weighs: one rule for the codecs, admission and the simulator."""

from __future__ import annotations

from math import gcd

KIVI_GROUP = 32  # numbers that share a zero point and a step (KIVI, arXiv 2402.02750)
_HALF = 2  # bytes of a zero point, a step or a scale: float16


def head_dim_multiple(storage: str) -> int:
    """Return the multiple that head_dim must be of, for the codes of a vector to fill whole bytes."""
    return {"turbo4": 2, "turbo3": 8}.get(storage, 1)


def entry_bytes(storage: str, head_dim: int, dtype_bytes: int) -> float:
    """Bytes of the key and the value of one entry of one KV head, with its share of what a group stores once.

    `dtype_bytes` is what a number of the model's own type takes; only the storage `model` keeps that type. Raises
    ValueError if there is no such storage.
    """
    match storage:
        case "model":
            return 2.0 * head_dim * dtype_bytes
        case "fp8":
            return 2.0 * head_dim
        case "kivi4" | "kivi2":
            codes = 2 * head_dim * int(storage[-1]) / 8
            key_scales = 2 * _HALF * head_dim / KIVI_GROUP  # a zero point and a step per channel of a group of tokens
            value_scales = 2 * _HALF * head_dim // gcd(KIVI_GROUP, head_dim)  # and per group of channels of a token
            return codes + key_scales + value_scales
        case "turbo4" | "turbo3":
            return 2 * (head_dim * int(storage[-1]) / 8 + _HALF)
    raise ValueError(f"no storage is called {storage!r}; there are model, fp8, kivi4, kivi2, turbo4 and turbo3")
