"""Ways drawn in docs/architecture.md, a function a line, held against the code: they exist and are called in order."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import warmkv

PACKAGE = Path(warmkv.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"


class Hop(NamedTuple):
    file: str  # within the package
    function: str  # with its class, or the function that it is defined in


def drawn(heading: str) -> list[Hop]:
    """Return the hops of the first block of code below a heading: lines of a file, a function and what it does."""
    block = PAGE.read_text().partition(f"{heading}\n")[2].partition("```\n")[2].partition("```")[0]
    words = [line.split() for line in block.splitlines() if line.strip()]
    return [Hop(line[0], line[1]) for line in words]


def unknown(hops: Iterable[Hop]) -> list[Hop]:
    """Return the hops of which the code has no function."""
    return [hop for hop in hops if hop.function not in _functions(hop.file)]


def _functions(file: str) -> set[str]:
    def names(node: ast.AST, above: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield f"{above}{child.name}"
                yield from names(child, f"{above}{child.name}.")
            else:
                yield from names(child, above)

    path = PACKAGE / file
    return set(names(ast.parse(path.read_text()), "")) if path.exists() else set()


@contextmanager
def calls(carries: Callable[[Any], bool] | None = None) -> Iterator[list[Hop]]:
    """Collect the calls of the package's functions, in this thread and in those that begin meanwhile.

    With `carries`, only calls with an argument that it accepts. A coroutine's wake-up is a call, too.
    """
    root, found = f"{PACKAGE}/", list[Hop]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(root) or code.co_name.startswith("<"):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if carries is None or any(carries(frame.f_locals.get(name)) for name in names):
            found.append(Hop(code.co_filename.removeprefix(root), code.co_qualname.replace("<locals>.", "")))

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]


def first_missing(hops: Sequence[Hop], called: Iterable[Hop]) -> Hop | None:
    """Return the first hop that is not called behind those before it; None if all are."""
    calls = iter(called)
    return next((hop for hop in hops if hop not in calls), None)
