"""Counts what Python code does, apart from the machine's speed: bytecodes, and the characters and items that they read.

A bytecode counts 1. One whose cost grows with its operands (`in`, `+`, slices, comparisons) counts their length, too,
where they are local variables; so does a call of a method that reads all of its object.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

SIZED = ("CONTAINS_OP", "BINARY_OP", "BINARY_SUBSCR", "COMPARE_OP")
LOADS = ("LOAD_FAST", "LOAD_DEREF")
READING = frozenset(("count", "replace", "split", "rsplit", "index", "translate", "encode", "lower", "copy", "sort"))


def work_of(call: Callable[[], Any], package: str) -> int:
    """Run a call and return what it did within the files of a package; what others do counts by their calls."""
    counted = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal counted
        counted += 1
        if package not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        operands = _operands(frame.f_code)

        def opcode(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal counted
            if event == "opcode":
                counted += 1
                if sized := operands.get(frame.f_lasti):
                    counted += _cost(*sized, frame.f_locals)
            return opcode

        return opcode

    def profile(frame: FrameType, event: str, function: Any) -> None:
        nonlocal counted
        if event == "c_call" and package in frame.f_code.co_filename:
            owner = getattr(function, "__self__", None)
            counted += _size(owner) if function.__name__ in READING else 0

    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        sys.settrace(None)
    return counted


@functools.cache
def _operands(code: CodeType) -> dict[int, tuple[str, tuple[str, ...]]]:
    """Return the bytecodes of a function whose cost depends on operands: by offset, their kind and the variables they
    read.
    """
    instructions = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "PRECALL", "EXTENDED_ARG")]
    found = {}
    for at, one in enumerate(instructions):
        if one.opname not in SIZED:
            continue
        is_slice = instructions[at - 1].opname == "BUILD_SLICE"
        if one.opname == "BINARY_SUBSCR" and not is_slice:
            continue
        kind = "slice" if is_slice else "extend" if one.argrepr == "+=" else "read"
        before = instructions[max(0, at - (4 if is_slice else 2)) : at]
        if names := tuple(str(load.argval) for load in before if load.opname in LOADS):
            found[one.offset] = kind, names
    return found


def _cost(kind: str, names: tuple[str, ...], values: Mapping[str, Any]) -> int:
    """Return the characters or items that are read: of a slice those within it, of a list that grows the new ones."""
    found = [values.get(name) for name in names]
    if kind == "slice":
        whole, *bounds = found
        start, stop, *_ = [*(bound for bound in bounds if isinstance(bound, int)), 0, _size(whole)][:2]
        return max(0, (stop or _size(whole)) - start)
    if kind == "extend" and isinstance(found[0], list):
        return _size(found[-1]) if len(found) > 1 else 0
    return max(map(_size, found))


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | bytearray | list | tuple) else 0
