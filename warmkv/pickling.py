"""Pickle frozen values by their fields, whether or not mypyc has compiled their classes."""

from __future__ import annotations

import copyreg
from dataclasses import fields
from typing import Any


def by_fields(*classes: type) -> None:
    """Let instances of frozen dataclasses be made anew from their fields when they are unpickled.

    A class that mypyc has compiled assigns to fields instead, which a frozen one refuses.
    """
    for each in classes:
        copyreg.pickle(each, _reduced)


def _reduced(value: Any) -> tuple[type, tuple[Any, ...]]:
    return type(value), tuple([getattr(value, field.name) for field in fields(value)])
