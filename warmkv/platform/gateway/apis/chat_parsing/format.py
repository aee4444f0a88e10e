"""How the model that is served writes its answers, and what a request expects of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from warmkv.config import ConfigError
from warmkv.config.model import ResponseTemplate
from warmkv.platform.gateway.apis.chat_parsing.families import FAMILIES, CallSyntax, ModelFamily, family_of
from warmkv.platform.gateway.apis.tokens import Piece

if TYPE_CHECKING:
    from warmkv.platform.gateway.apis.chat_parsing.parser import PartParser


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """How a model writes thinking and calls. Templates are transformers', loaded, the second without calls."""

    template: Any
    without_calls: Any
    undelimited: bool
    shown_ids: tuple[int, ...]  # special tokens that are delimiters
    thinking: tuple[str, str] | None = None  # what opens and closes it, where these are texts
    thinking_ids: tuple[int, int] | None = None  # where each of these is a token
    calls: CallSyntax | None = None  # of those that are constrained
    special: Mapping[str, int] = field(default_factory=dict)  # ids of special tokens

    @classmethod
    def of(cls, tokenizer: Any, named: ResponseTemplate | None = None) -> ResponseFormat | None:
        """Return the format that is named, else the tokenizer's own, else its family's; None if there is none.

        Raises ConfigError for a template of the tokenizer that transformers cannot load.
        """
        from transformers.utils.chat_parsing.response_templates import load_response_template

        if (family := _family(tokenizer, named)) is None:
            return None
        fields = family.template.get("fields") or {}
        others = {name: field for name, field in fields.items() if not name.startswith("tool_calls")}
        delimiters = "\n".join(_texts(family.template)).replace("\\", "")
        added = getattr(tokenizer, "added_tokens_decoder", {})
        shown = (number for number, token in added.items() if token.special and token.content in delimiters)
        ids = {token.content: number for number, token in added.items()}
        thinking = _delimiters(fields.get("reasoning_content", {}))
        try:
            loaded = load_response_template(dict(family.template))
        except ValueError as error:
            raise ConfigError(
                f"response_template of the model's tokenizer: {error}; name a family with model.response_template"
            ) from None
        return cls(
            loaded,
            load_response_template({**family.template, "fields": others}) if others else None,
            family.undelimited,
            tuple(sorted(shown)),
            thinking,
            None if thinking is None or not {*thinking} <= ids.keys() else (ids[thinking[0]], ids[thinking[1]]),
            family.calls,
            {token.content: number for number, token in added.items() if token.special},
        )

    @property
    def thinks(self) -> bool:
        """Return True where answers have more than text and calls."""
        return self.without_calls is not None and len(self.without_calls.fields) > 1

    def answer_begun(self, pieces: Sequence[Piece]) -> str:
        """Return the prompt from the template's last anchor on, or the template's last text where there is none.

        What users write is no anchor, even if it looks like one.
        """
        anchor = self.template.start_anchor_re
        for number in range(len(pieces) - 1, -1, -1):
            if pieces[number].kind == "template" and anchor.search(pieces[number].text):
                return "".join(piece.text for piece in pieces[number:])
        return pieces[-1].text if pieces and pieces[-1].kind == "template" else ""

    def expected(
        self, begun: str, tools: Sequence[Mapping[str, Any]] = (), *, parallel: bool = True
    ) -> ExpectedResponse | None:
        """Return what is expected of an answer that is `begun` so, with calls if there are tools; None if only text."""
        if not tools and not self.thinks:
            return None
        return ExpectedResponse(self, begun, tuple(tools), parallel)


@dataclass(frozen=True, slots=True)
class ExpectedResponse:
    """What a request expects of its answer besides text; `begun` is the end of the prompt that belongs to it."""

    format: ResponseFormat
    begun: str
    tools: tuple[Mapping[str, Any], ...]
    parallel: bool

    def parser(self) -> PartParser:
        """Return a parser for the answer's text."""
        from warmkv.platform.gateway.apis.chat_parsing.parser import PartParser

        template = self.format.template if self.tools else self.format.without_calls
        names = {tool["function"]["name"] for tool in self.tools} if self.format.undelimited else None
        return PartParser(template, self.begun, self.tools, names, self.parallel)


def _family(tokenizer: Any, named: ResponseTemplate | None) -> ModelFamily | None:
    if named is not None:
        return FAMILIES.get(named)
    if (own := getattr(tokenizer, "response_template", None)) is not None:
        return ModelFamily(own, ())
    chat = getattr(tokenizer, "chat_template", None) or ""
    chat = chat if isinstance(chat, str) else "\n".join(chat.values())
    if (family := family_of(chat)) is None:
        return None
    fields = {name: field for name, field in family.template["fields"].items() if field.get("open", "") in chat}
    return replace(family, template={**family.template, "fields": fields})


def _delimiters(field: Mapping[str, Any]) -> tuple[str, str] | None:
    opening, closing = field.get("open"), field.get("close")
    return (opening, closing) if isinstance(opening, str) and isinstance(closing, str) else None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)
