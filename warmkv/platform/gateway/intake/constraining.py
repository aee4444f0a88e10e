"""Answers that are held to a form, or to calls of tools. Each constraint is compiled here, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from warmkv.platform.gateway.apis.call_grammars import CallGrammar
from warmkv.platform.gateway.apis.errors import ApiError, clipped, invalid
from warmkv.platform.gateway.apis.schema import ParsedRequest
from warmkv.platform.gateway.apis.schema_patterns import patterns, without_patterns
from warmkv.platform.gateway.apis.structured import Wanted, behind_thinking
from warmkv.replicas.constraints.compiler import LONGEST, Compiler, ConstraintError
from warmkv.replicas.protocol import Constraint

MOST_PATTERNS = 64  # regular expressions of a request's tools that are tried by themselves
LONGEST_SHOWN = 200  # characters of one that a refusal shows

Tools = Sequence[Mapping[str, Any]]  # as chat templates take them


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Hold the tools that the model is shown, and how it may call them.

    Calls are limited to the tools named in `allowed`, unless that is None, and those of the tools named in `strict`
    satisfy their schemas. A `forced` answer is nothing but calls: one call where it is to be a `single` one.
    """

    tools: Tools
    strict: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None
    forced: bool = False
    single: bool = False

    def callable_tools(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the tools that may be called, each with its number."""
        for number, tool in enumerate(self.tools):
            if self.allowed is None or _name(tool) in self.allowed:
                yield number, tool

    def check_names(self) -> None:
        """Raise ApiError (400) where tool_choice names a tool that is not there, or none is."""
        names = {_name(tool) for tool in self.tools}
        if self.forced and not names:
            raise invalid("tool_choice: there are no tools")
        if unknown := next((name for name in self.allowed or () if name not in names), None):
            raise invalid(f"tool_choice: there is no tool {unknown!r}")


def constrained(compiler: Compiler, asked: ParsedRequest, use: ToolUse, wanted: Wanted | None) -> ParsedRequest:
    """Constrain an answer to the form that is wanted, or to calls of tools, as far as the request asks for either.

    Raises ApiError (400) with the place of what no replica could compile.
    """
    use.check_names()
    if wanted is not None:
        _check(compiler, wanted.place, wanted.constraint)
    grammar = _call_grammar(asked, use)
    if use.forced:  # the form that is wanted is that of a text, which such an answer has none of
        return _forced(compiler, asked, use, grammar)
    strict = next((number for number, tool in use.callable_tools() if _name(tool) in use.strict), None)
    if grammar is None and strict is not None:
        raise invalid(f"tools.{strict}: this model's calls cannot be constrained: strict is not possible")
    if grammar is None and use.allowed is not None:
        raise invalid("tool_choice: this model's calls cannot be constrained: allowed_tools is not possible")
    if wanted is not None:
        return _of_form(compiler, asked, use, grammar, wanted, strict)
    if grammar is None or (strict is None and use.allowed is None):
        return asked
    place = "tool_choice" if strict is None else f"tools.{strict}"
    return _with_calls(compiler, asked, use, grammar, grammar.beside_text(), place)


def _of_form(
    compiler: Compiler,
    asked: ParsedRequest,
    use: ToolUse,
    grammar: CallGrammar | None,
    wanted: Wanted,
    strict: int | None,
) -> ParsedRequest:
    """Constrain an answer to the form that is wanted, or calls in its place where the model can announce them.

    `strict` is the number of a strict tool, None if there is none.
    """
    constraint = wanted.constraint
    if grammar is not None and grammar.syntax.sign and constraint.kind != "grammar":
        try:
            return _with_calls(compiler, asked, use, grammar, grammar.beside_format(constraint), wanted.place)
        except ApiError:  # too many tools, say: without strict ones the form alone is possible
            if strict is not None:
                raise
    if strict is not None:
        raise invalid(f"tools.{strict}: strict is not possible beside {wanted.place} with this model")
    if asked.expected is not None and (thinking := asked.expected.format.thinking) is not None:
        constraint = behind_thinking(constraint, asked.prompt.begun, thinking, asked.expected.format.special)
        _check(compiler, wanted.place, constraint)
    sampling = replace(asked.sampling, constraint=constraint)
    if constraint.kind == "grammar" and constraint is wanted.constraint:  # one's own, which begins with the answer
        sampling = replace(sampling, thinking=None)
    return replace(asked, sampling=sampling)


def _forced(compiler: Compiler, asked: ParsedRequest, use: ToolUse, grammar: CallGrammar | None) -> ParsedRequest:
    """Constrain an answer to calls of tools. Raises ApiError (400) where it cannot be."""
    if grammar is None:
        raise invalid("tool_choice: this model's calls cannot be forced; auto and none are possible")
    grammar = replace(grammar, parallel=grammar.parallel and not use.single)
    constraint = grammar.forced()
    if len(constraint.text) <= LONGEST and _fault(compiler, constraint):
        use = _without_bad_patterns(compiler, use)
        grammar = replace(grammar, tools=use.tools)
        constraint = grammar.forced()
    return _with_calls(compiler, asked, use, grammar, constraint, "tool_choice")


def _without_bad_patterns(compiler: Compiler, use: ToolUse) -> ToolUse:
    """Return tools without the regular expressions that cannot be compiled, but for those of strict ones."""
    schemas = {
        number: tool["function"]["parameters"] for number, tool in use.callable_tools() if _name(tool) not in use.strict
    }
    found = dict.fromkeys(pattern for schema in schemas.values() for _, pattern in patterns(schema))
    tried = list(found)[:MOST_PATTERNS]
    bad = found.keys() - {pattern for pattern in tried if not _pattern_fault(compiler, pattern)}
    tools = list(use.tools)
    for number, schema in schemas.items():
        function = {**tools[number]["function"], "parameters": without_patterns(schema, bad)}
        tools[number] = {**tools[number], "function": function}
    return replace(use, tools=tools)


def _call_grammar(asked: ParsedRequest, use: ToolUse) -> CallGrammar | None:
    """Return how an answer calls tools; None where it does not, or calls cannot be constrained."""
    if not use.tools or asked.expected is None or (syntax := asked.expected.format.calls) is None:
        return None
    format_, parallel = asked.expected.format, asked.expected.parallel
    return CallGrammar(
        syntax, use.tools, format_.special, parallel, use.strict, use.allowed, asked.prompt.begun, format_.thinking
    )


def _with_calls(
    compiler: Compiler, asked: ParsedRequest, use: ToolUse, grammar: CallGrammar, constraint: Constraint, place: str
) -> ParsedRequest:
    """Constrain an answer with calls. Raises ApiError (400) with the tool that cannot be compiled, or the place."""
    if fault := _fault(compiler, constraint):
        for number, tool in use.callable_tools():
            if use.forced or _name(tool) in use.strict:  # the schema of another one is no part of it
                alone = replace(grammar, tools=[tool], parallel=False, thinking=None)
                _check_tool(compiler, number, tool, alone.forced(), strict=_name(tool) in use.strict)
        raise invalid(f"{place}: {fault}")
    return replace(asked, sampling=replace(asked.sampling, constraint=constraint))


def _check_tool(
    compiler: Compiler, number: int, tool: Mapping[str, Any], constraint: Constraint, *, strict: bool
) -> None:
    """Raise ApiError (400) where calls of a tool cannot be constrained, with the regular expression at fault."""
    if not (fault := _fault(compiler, constraint)):
        return
    place = f"tools.{number}: {'strict ' if strict else ''}tool {_name(tool)!r}"
    for at, pattern in list(patterns(tool["function"]["parameters"]))[:MOST_PATTERNS]:
        if why := _pattern_fault(compiler, pattern):
            raise invalid(f"{place}: {at}: cannot be held to {clipped(pattern, LONGEST_SHOWN)!r}: {why}")
    raise invalid(f"{place}: {fault}")


def _check(compiler: Compiler, place: str, constraint: Constraint) -> None:
    if fault := _fault(compiler, constraint):
        raise invalid(f"{place}: {fault}")


def _fault(compiler: Compiler, constraint: Constraint) -> str:
    """Return why a constraint cannot be compiled; empty where it can."""
    try:
        compiler.matcher(constraint)
    except ConstraintError as error:
        return str(error)
    return ""


def _pattern_fault(compiler: Compiler, pattern: str) -> str:
    """Return why the texts of a regular expression cannot be drawn; empty where they can."""
    constraint = Wanted.of("", "json_schema", {"type": "string", "pattern": pattern}).constraint
    try:
        compiler.check(constraint)
    except ConstraintError as error:
        return str(error).rpartition("\nerror: ")[2]
    return ""


def _name(tool: Mapping[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name
