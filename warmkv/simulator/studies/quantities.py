"""Amounts as people write them: `1M tokens`, `2GiB`, `300s`, `1h`; and the KV bytes of a token of a model."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from warmkv.faults import UserError
from warmkv.model_shape import ModelShapeError, kv_figures
from warmkv.policies.slot_sizes import KVShape

Unit = Literal["tokens", "blocks"]
_AMOUNT = re.compile(r"([0-9][0-9_]*\.?[0-9]*(?:e[0-9]+)?|inf|unlimited)([a-z]*)")
_COUNT = re.compile(r"([kmg]?)(tokens?|blocks?|)")
_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_BYTES = {"b": 1} | {f"{p}{b}": base**n for n, p in enumerate("kmgt", 1) for b, base in (("b", 1000), ("ib", 1024))}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class QuantityError(UserError):
    """A text that names no such amount; the message says how to write one."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """A capacity in tokens or blocks; `text` as written."""

    amount: float
    unit: Unit
    text: str


def capacity(text: str, token_bytes: int | None) -> Capacity:
    """Read `10k`, `1M tokens`, `5000 blocks`, `2GiB` or `unlimited`; bytes need `token_bytes`. Raises QuantityError."""
    amount, rest = _parts(text, "capacity")
    if (count := _COUNT.fullmatch(rest)) is not None:
        unit: Unit = "blocks" if count[2].startswith("block") else "tokens"
        return Capacity(amount * _THOUSANDS[count[1]], unit, text.strip())
    if rest in _BYTES:
        if not token_bytes:
            raise QuantityError(f"a capacity of {text} needs the bytes of a token: name a model or give them")
        return Capacity(amount * _BYTES[rest] / token_bytes, "tokens", text.strip())
    raise QuantityError(f"{text!r} is no capacity; write 10k, 1M tokens, 5000 blocks, 2GiB or unlimited")


def seconds(text: str) -> float:
    """Read `300`, `300s`, `5m`, `1h` or `unlimited`. Raises QuantityError."""
    amount, unit = _parts(text, "time")
    if unit not in _SECONDS:
        raise QuantityError(f"{text!r} is no time; write 300, 300s, 5m, 1h or unlimited")
    return amount * _SECONDS[unit]


def model_token_bytes(path: Path) -> int:
    """Return KV bytes of a token of the model in a folder, from its config.json. Raises QuantityError."""
    try:
        figures = kv_figures(path)
        return KVShape(figures["layers"], figures["kv_heads"], figures["head_dim"], figures["dtype_bytes"]).token_bytes
    except ModelShapeError as error:
        raise QuantityError(str(error)) from None


def _parts(text: str, what: str) -> tuple[float, str]:
    """Split a quantity into number and unit, whatever the case and the spaces."""
    match = _AMOUNT.fullmatch(re.sub(r"\s", "", text).lower())
    if match is None:
        raise QuantityError(f"{text!r} is no {what}: it begins with a number that is not negative, or is unlimited")
    return (math.inf if match[1] in ("inf", "unlimited") else float(match[1])), match[2]
