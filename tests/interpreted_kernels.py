"""Interpret Triton's kernels in half of the time.

The interpreter replaces what `triton.language` offers at every launch, and again at every function that the kernel
calls, by the same: looking for what is to be replaced took half of a launch.
"""

from __future__ import annotations

from typing import Any


def replace_language_once_a_launch() -> None:
    """Leave `triton.language` as the launch has it while the kernel calls functions."""
    import triton.language as tl
    from triton.runtime import interpreter

    replaced: set[frozenset[int]] = set()  # by the launch that goes on, for functions that see these modules
    restore = interpreter._LangPatchScope.restore

    def restored(scope: Any) -> None:
        replaced.clear()
        restore(scope)

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        seen = frozenset(id(one) for one in function.fn.__globals__.values() if one is tl or one is tl.core)
        if seen not in replaced:
            interpreter._patch_lang(function.fn)
            replaced.add(seen)
        return function.rewrite()(*args, **kwargs)

    interpreter._LangPatchScope.restore = restored
    interpreter.InterpretedFunction.__call__ = call
