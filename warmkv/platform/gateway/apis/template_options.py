"""What a chat template takes besides messages and tools: variables of its own, and the thinking of earlier answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta

from warmkv.platform.gateway.apis.errors import invalid

_RENDERING = frozenset(("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"))
_GLOBALS = frozenset(("raise_exception", "strftime_now", "namespace", "range", "dict", "lipsum", "cycler", "joiner"))
_THINKING = re.compile(r"""(?:\.|\[\s*["']|\bget\(\s*["'])(reasoning_content|reasoning|thinking)\b""")
END_OF_THINKING = "</think>"
BEGIN_OF_THINKING = "<think>"


@lru_cache(maxsize=16)
def variables_of(template: str) -> frozenset[str]:
    """Return the variables that a request may set, as `enable_thinking`; none where the template cannot be parsed."""
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True).parse(template)
    except TemplateSyntaxError:  # of transformers' own tags, say
        return frozenset()
    found = meta.find_undeclared_variables(tree) - _RENDERING - _GLOBALS
    return frozenset(name for name in found if not name.endswith("_token"))


def variables(tokenizer: Any, wanted: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a template is rendered with: of `wanted` what it takes, and all that a request has `chosen` by name.

    Raises ApiError (400) where it does not take what was chosen.
    """
    template = getattr(tokenizer, "chat_template", None)
    known = variables_of(template) if isinstance(template, str) else frozenset()
    if unknown := next((name for name in chosen if name not in known), None):
        takes = ", ".join(sorted(known)) or "none"
        raise invalid(f"chat_template_kwargs: this model's template takes {takes}, not {unknown!r}")
    return {name: value for name, value in wanted.items() if name in known} | dict(chosen)


@lru_cache(maxsize=16)
def thinking_key(template: str) -> str | None:
    """Return the key of a message under which a template takes thinking; None where it shows none of earlier turns."""
    return next(iter(_THINKING.findall(template)), None)


def split_thinking(text: str) -> tuple[str, str]:
    """Return the thinking in the text of an answer, and what follows it, as templates that look for `</think>` do."""
    thinking, found, rest = text.partition(END_OF_THINKING)
    if not found:
        return "", text
    thinking = thinking.rpartition(BEGIN_OF_THINKING)[2]
    return thinking.strip(), rest.rpartition(END_OF_THINKING)[2].lstrip("\n")
