"""Packed block keys in tests: short names, filled up to 8 bytes."""

from __future__ import annotations

from warmkv.prefixes.mask_table import KEY_BYTES, pack, unpack


def key(name: bytes) -> bytes:
    return name.ljust(KEY_BYTES, b"\0")


def packed(*names: bytes) -> bytes:
    return pack([key(name) for name in names])


def names(keys: bytes) -> set[bytes]:
    """Return the short names of packed keys."""
    return {each.rstrip(b"\0") for each in unpack(keys)}
