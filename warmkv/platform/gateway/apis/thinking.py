"""Signatures of thinking blocks: the service knows its own thinking when a client sends it back."""

from __future__ import annotations

import base64
import hashlib
import hmac
import zlib

PURPOSE = b"warmkv thinking\0"  # the secret has other uses
SEALED = "sealed\0"  # so that no thinking is taken for what another signature holds


def sign(text: str, secret: bytes) -> str:
    """Return the signature of a thinking block's text: HMAC-SHA256 as base64."""
    return base64.b64encode(hmac.digest(secret, PURPOSE + text.encode(), hashlib.sha256)).decode()


def verify(text: str, signature: str, secret: bytes) -> bool:
    """Return True if a service with this secret wrote the text. Takes the same time wherever they differ."""
    return hmac.compare_digest(sign(text, secret).encode(), signature.encode())


def seal(text: str, secret: bytes) -> str:
    """Return a signature that holds the text, for a client that is not shown it and sends it back all the same."""
    packed = base64.b64encode(zlib.compress(text.encode())).decode()
    return f"{packed}.{sign(SEALED + packed, secret)}"


def restore(text: str, signature: str, secret: bytes) -> str | None:
    """Return the thinking of a block that comes back, None where a service with this secret did not write it."""
    packed, sealed, signed = signature.rpartition(".")
    if sealed and not text and verify(SEALED + packed, signed, secret):
        return zlib.decompress(base64.b64decode(packed)).decode()
    return text if verify(text, signature, secret) else None
