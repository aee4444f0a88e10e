"""Storage codecs: how the entries of a decode slot are kept in memory.

`codec(name)` gives one. Codecs are values: they hold nothing about a request, and encoding is a function of its input.
"""

from __future__ import annotations

from typing import get_args

from warmkv.policies.compression.storage.base import Codec
from warmkv.policies.compression.storage.fp8 import Fp8
from warmkv.policies.compression.storage.kivi import Kivi
from warmkv.policies.compression.storage.plain import Plain
from warmkv.policies.compression.storage.turboquant import Turbo
from warmkv.policy_spec import Storage

__all__ = ["Codec", "codec"]

_CODECS: dict[str, Codec] = {c.name: c for c in (Plain(), Fp8(), Kivi(4), Kivi(2), Turbo(4), Turbo(3))}
assert set(_CODECS) == set(get_args(Storage))


def codec(name: Storage) -> Codec:
    """The codec of that name, always the same object. Raises ValueError if there is none."""
    if name not in _CODECS:
        raise ValueError(f"no storage is called {name!r}; there are {', '.join(_CODECS)}")
    return _CODECS[name]
