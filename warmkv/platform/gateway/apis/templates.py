"""What a chat template does with the text of messages, by its syntax: it may write something else around marked text.

Most only write it, strip it, or ask if there is any. Others compare, search, count or encode it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from jinja2 import Environment, TemplateSyntaxError, nodes

TYPE_TESTS = frozenset(("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number"))
STRIPS = frozenset(("strip", "lstrip", "rstrip"))


class _Value(Enum):
    """What an expression may be made of."""

    OTHER = "nothing of a message's text"
    MESSAGES = "a list of messages"
    MESSAGE = "a message"
    TEXT = "text of messages, and other text before and behind it"


class _LooksError(Exception):
    """The template does something with content that marks may change."""


@dataclass(slots=True)
class Uses:
    """What a template does with texts, but for writing them: `strips` them, or `asks` if there is any."""

    strips: bool = False
    asks: bool = False

    def ignore_marks(self, texts: Sequence[str]) -> bool:
        """Return True if marks around texts, which a message joins by line breaks, change nothing else of it."""
        if self.strips and (not texts[0] or not texts[-1] or texts[0][0].isspace() or texts[-1][-1].isspace()):
            return False
        return not self.asks or any(texts)


@lru_cache(maxsize=16)
def uses_of_content(template: str) -> Uses | None:
    """Return what a template does with the texts of messages; None where it may do more, or that cannot be told."""
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True).parse(template)
        checker = _Checker()
        while checker.changed:
            checker.changed = False
            checker.visit_all(tree.body)
    except (TemplateSyntaxError, _LooksError):
        return None
    return checker.uses


class _Checker:
    """Follows messages and their texts through variables, whatever the order of statements. Raises _LooksError."""

    def __init__(self) -> None:
        self.changed, self.uses = True, Uses()
        self._variables = {"messages": _Value.MESSAGES}

    def visit_all(self, statements: Iterable[nodes.Node]) -> None:
        for statement in statements:
            self.visit(statement)

    def visit(self, node: nodes.Node) -> None:
        """Check a statement."""
        match node:
            case nodes.Output():
                if any(self.value(part) in (_Value.MESSAGES, _Value.MESSAGE) for part in node.nodes):
                    raise _LooksError
            case nodes.If():
                self._ask(node.test)
                always = self._is_text(node.test)
                if always is not False:
                    self.visit_all(node.body)
                if not always:
                    self.visit_all([*node.elif_, *node.else_])
            case nodes.For(target=nodes.Name() as target):
                items = self.value(node.iter)
                if items in (_Value.MESSAGE, _Value.TEXT):
                    raise _LooksError
                self._assign(target.name, _Value.MESSAGE if items is _Value.MESSAGES else _Value.OTHER)
                if node.test is not None:
                    self._ask(node.test)
                self.visit_all([*node.body, *node.else_])
            case nodes.Assign(target=nodes.Name() as target):
                self._assign(target.name, self.value(node.node))
            case nodes.Assign(target=nodes.NSRef() as target):
                self._assign(f"{target.name}.{target.attr}", self.value(node.node))
            case nodes.ExprStmt():
                self.value(node.node)
            case nodes.Continue() | nodes.Break():
                pass
            case _:
                raise _LooksError

    def value(self, node: nodes.Node) -> _Value:
        """Check an expression and return what it may be made of."""
        match node:
            case nodes.Name():
                return self._variables.get(node.name, _Value.OTHER)
            case nodes.Getattr():
                return self._item(node.node, node.attr)
            case nodes.Getitem():
                if isinstance(node.arg, nodes.Slice) and self.value(node.node) is _Value.MESSAGES:
                    return _Value.MESSAGES
                self._other(node.arg)
                return self._item(node.node, node.arg.value if isinstance(node.arg, nodes.Const) else None)
            case nodes.Filter(name="trim", node=nodes.Expr() as inner, args=[], kwargs=[]):
                return self._strip(inner)
            case nodes.Filter(name="length", node=nodes.Expr() as inner) if self.value(inner) is _Value.MESSAGES:
                return _Value.OTHER
            case nodes.Call(node=nodes.Getattr() as method, args=[], kwargs=[]) if method.attr in STRIPS:
                return self._strip(method.node)
            case nodes.Test() if node.name in TYPE_TESTS:
                self.value(node.node)
                return _Value.OTHER
            case nodes.Add() | nodes.Concat():
                parts = node.nodes if isinstance(node, nodes.Concat) else [node.left, node.right]
                return self._one_of([self._text(part) for part in parts])
            case nodes.And() | nodes.Or():
                return self._one_of([self._ask(node.left), self._ask(node.right)])
            case nodes.CondExpr():
                self._ask(node.test)
                return self._one_of([self.value(part) for part in (node.expr1, node.expr2) if part is not None])
            case nodes.Not():
                self._ask(node.node)
                return _Value.OTHER
            case nodes.Compare(expr=nodes.Const(), ops=[nodes.Operand(op="in" | "notin", expr=nodes.Name() as within)]):
                if self.value(within) not in (_Value.OTHER, _Value.MESSAGE):
                    raise _LooksError
                return _Value.OTHER
            case _:
                for child in node.iter_child_nodes():
                    self._other(child)
                return _Value.OTHER

    def _item(self, node: nodes.Node, key: object) -> _Value:
        """Return what an item or attribute of a value is made of."""
        if isinstance(node, nodes.Name) and f"{node.name}.{key}" in self._variables:
            return self._variables[f"{node.name}.{key}"]
        match self.value(node), key:
            case (_Value.OTHER, "previtem" | "nextitem"):  # of a loop
                return _Value.MESSAGE
            case (_Value.OTHER, _):
                return _Value.OTHER
            case (_Value.MESSAGES, None | int()):
                return _Value.MESSAGE
            case (_Value.MESSAGE, "content"):
                return _Value.TEXT
            case (_Value.MESSAGE, "role" | "name" | "tool_calls" | "tool_call_id"):
                return _Value.OTHER
        raise _LooksError

    def _text(self, node: nodes.Node) -> _Value:
        value = self.value(node)
        if value in (_Value.MESSAGES, _Value.MESSAGE):
            raise _LooksError
        return value

    def _strip(self, node: nodes.Node) -> _Value:
        value = self._text(node)
        self.uses.strips |= value is _Value.TEXT
        return value

    def _ask(self, node: nodes.Node) -> _Value:
        """Check what counts as true where it is not empty."""
        value = self.value(node)
        self.uses.asks |= value is _Value.TEXT
        return value

    def _other(self, node: nodes.Node) -> None:
        """Check what must not be made of messages."""
        if isinstance(node, nodes.Expr):
            if self.value(node) is not _Value.OTHER:
                raise _LooksError
        else:  # operands, keyword arguments, pairs
            for child in node.iter_child_nodes():
                self._other(child)

    @staticmethod
    def _one_of(values: Iterable[_Value]) -> _Value:
        found = {value for value in values if value is not _Value.OTHER}
        if len(found) > 1:
            raise _LooksError
        return found.pop() if found else _Value.OTHER

    def _assign(self, name: str, value: _Value) -> None:
        before = self._variables.get(name)
        after = self._one_of([value, before or _Value.OTHER])
        if after is not before:
            self._variables[name], self.changed = after, True

    def _is_text(self, test: nodes.Node) -> bool | None:
        """Return True for a test that text is a string, which it is, False for the opposite, None for any other."""
        match test:
            case nodes.Test(name="string") if self.value(test.node) is _Value.TEXT:
                return True
            case nodes.Not():
                inner = self._is_text(test.node)
                return None if inner is None else not inner
        return None
