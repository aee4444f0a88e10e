"""Constraints to matchers of llguidance, within limits of size and work that do not depend on the machine."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from warmkv.replicas.protocol import Constraint, UnservableRequestError

LONGEST = 1 << 17
"""Characters of a constraint. The largest object that fits (5,000 properties) compiles in about a second."""

LONGEST_GBNF, MOST_GBNF_RULES = 1 << 14, 256
"""Characters and rules of a grammar in GBNF, which is translated to Lark in quadratic time."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # work of compiling regular expressions: some 20 ms
    step_lexer_fuel=100_000,  # and of a mask: some 7 ms
    step_max_items=10_000,  # of the Earley parser, in a mask
    max_items_in_row=1000,  # and behind a byte: a bound on ambiguity, 250 variants of an anyOf
    max_lexer_states=20_000,  # 40 MB
    max_grammar_size=100_000,  # symbols
    verbose_errors=False,
)

PROBED = 4
"""Tokens by which a constraint is tried."""

MOST_CACHED = 64
"""Compiled constraints that are kept, whatever asks for them: the ones used last."""

MOST_CACHED_CHARACTERS = 1 << 20
"""Characters of these together: compiled objects take some 100 bytes for each."""

WHITESPACE = r" |\n[ \t]{0,32}"
"""Between the tokens of JSON, or none: as json.dumps writes it, with and without indentation. No more, since models
that may write whitespace for ever sometimes do."""

EXCERPT = re.compile(r"\n +\d+ \| .*", re.DOTALL)
IN_GRAMMAR = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: ")


class ConstraintError(UnservableRequestError):
    """A constraint that cannot be compiled, or exceeds a limit."""


class Compiler:
    """Compiles constraints for a tokenizer, and keeps what was used last. May be called from any thread.

    `vocabulary` is the model's, where it is more than the tokenizer's; `eos_ids` are the tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int = 0, eos_ids: Collection[int] = ()) -> None:
        self._source, self._vocabulary, self._eos_ids = tokenizer, vocabulary, sorted(eos_ids)
        self._tokenizer: LLTokenizer | None = None  # made when it is first needed: it takes seconds for large ones
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """Return a matcher of its own at the start of an answer. Raises ConstraintError."""
        with self._lock:
            tokenizer = self.tokenizer()
            if (known := self._compiled.get(constraint)) is not None:
                self._compiled.move_to_end(constraint)
                return known.deep_copy()
        compiled = _compile(constraint, tokenizer)
        with self._lock:
            self._compiled[constraint] = compiled
            while len(self._compiled) > MOST_CACHED or self._characters() > MOST_CACHED_CHARACTERS:
                self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def check(self, constraint: Constraint) -> None:
        """Raise ConstraintError where a constraint cannot be compiled. Nothing of it is kept."""
        with self._lock:
            tokenizer = self.tokenizer()
        _compile(constraint, tokenizer)

    def tokenizer(self) -> LLTokenizer:
        """Return llguidance's view of the tokenizer. Raises ConstraintError where it is not a fast one."""
        if self._tokenizer is None:
            backend = getattr(self._source, "backend_tokenizer", None)
            if backend is None:
                raise ConstraintError("this model's tokenizer is not one of the tokenizers library")
            backend = copy.deepcopy(backend)  # which others may be encoding with
            backend.no_padding()
            backend.no_truncation()
            size = max(self._vocabulary, backend.get_vocab_size(with_added_tokens=True))
            self._tokenizer = LLTokenizer(backend.to_str(), n_vocab=size, eos_token=self._eos_ids or None)
        return self._tokenizer

    def _characters(self) -> int:
        return sum(len(constraint.text) for constraint in self._compiled)

    @property
    def cached(self) -> int:
        """Return how many compiled constraints are kept."""
        return len(self._compiled)


def _compile(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher:
    if len(constraint.text) > LONGEST:
        raise ConstraintError(f"{len(constraint.text)} characters are more than {LONGEST}")
    matcher = LLMatcher(tokenizer, grammar(constraint), log_level=0, limits=LIMITS)
    probe = matcher.deep_copy()  # what nothing satisfies, and what is too much work, shows within a few tokens
    for _ in range(PROBED):
        if probe.is_stopped():  # by an error, too
            break
        bits = np.frombuffer(probe.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        probe.consume_tokens([int(allowed[-1])] if len(allowed) else [])
    if probe.is_error():
        raise ConstraintError(reason(probe))
    if matcher.is_stopped():
        raise ConstraintError("no text satisfies it, or only the empty one")
    return matcher


def grammar(constraint: Constraint) -> str:
    """Return a constraint as llguidance takes it. Raises ConstraintError where its text is not of its kind."""
    text = constraint.text
    try:
        if constraint.kind in ("json_schema", "json_object"):
            schema = text if constraint.kind == "json_schema" else '{"type": "object"}'
            if not isinstance(json.loads(schema), dict):
                raise ConstraintError("a JSON schema is an object")
            return LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
            )
        if constraint.kind == "regex":
            return LLMatcher.grammar_from_regex(text)
        if constraint.kind == "choice":
            if not (texts := json.loads(text)):
                raise ConstraintError("there is no text to choose")
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts)))
        return LLMatcher.grammar_from_lark(text if is_lark_syntax(text) else _from_gbnf(text))
    except ConstraintError:
        raise
    except Exception as error:  # the translation from GBNF raises what it likes
        raise ConstraintError(str(error) or type(error).__name__) from None


def reason(matcher: LLMatcher) -> str:
    """Return what is wrong with a matcher, without its state and without the grammar, which may be one of ours."""
    message: str = matcher.get_error() or "nothing satisfies it"
    return IN_GRAMMAR.sub("", EXCERPT.sub("", message.partition("\n<")[0]))


def _from_gbnf(text: str) -> str:
    rules = text.count("::=")
    if not rules:
        raise ConstraintError("neither Lark (a rule `start: ...`) nor GBNF (a rule `root ::= ...`)")
    if len(text) > LONGEST_GBNF or rules > MOST_GBNF_RULES:
        raise ConstraintError(
            f"{len(text)} characters and {rules} rules of GBNF are more than {LONGEST_GBNF} and {MOST_GBNF_RULES}; "
            "Lark may be longer"
        )
    return gbnf_to_lark(text)
