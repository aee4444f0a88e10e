"""Where a template shows tools and calls: as JSON in one of the forms that templates have, or in a form of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

from warmkv.platform.gateway.apis.errors import invalid
from warmkv.platform.gateway.apis.turns import ContentBlock, Turn, flat, is_json, leading, to_json


class Cuts(NamedTuple):
    """Locate tools and calls among a template's pieces (start, stop, content block). Some are no JSON."""

    places: list[list[tuple[int, int, int]]]
    not_json: set[int]  # content blocks


def places_of(turns: Sequence[Turn], templates: Sequence[str]) -> Cuts:
    """Find the tools and calls in the template. Those that it does not show as JSON end with the piece they are in.

    `templates[i]` stands behind the text of i blocks. Tools stand somewhere before the first message's text, a call
    behind the text of its message. The first match counts, so a place does not depend on what follows it. The form in
    which the first tool and the first call are found is tried first for all others, so that a search ends where it
    finds something and all of them together are linear. Raises ApiError (400) where one is not shown at all.
    """
    not_json = set[int]()
    named = (0, 0)  # piece and place behind the name of the last that is no JSON
    places: list[list[tuple[int, int, int]]] = [[] for _ in templates]
    texts = index = at = offset = 0
    usual: dict[bool, Sequence[int]] = {}  # order in which forms are tried, of tools and of calls
    head = sum(not is_json(turn, block) for turn, block in flat(leading(turns)))
    for turn in turns:
        texts += sum(not is_json(turn, block) for block in turn.blocks)
        for block in turn.blocks:
            if is_json(turn, block):
                is_tool = turn.role == "tools"
                pieces = range(at, head + 1) if is_tool else range(texts, texts + 1)
                form = cache(partial(_form, turn, block))
                kinds = range(4 if is_tool else 2)
                order = usual.get(is_tool, kinds)
                found = (
                    (piece, start, start + len(form(kind)), kind)
                    for piece in pieces
                    for kind in order
                    if (start := templates[piece].find(form(kind), offset if piece == at else 0)) >= 0
                )
                if (place := next(found, None)) is not None:
                    at, start, offset, kind = place
                    usual[is_tool] = (kind, *(other for other in kinds if other != kind))
                else:
                    name: str = block.value["function"]["name"] if is_tool else (block.call or "")
                    pieces = range(named[0] if is_tool else texts, pieces.stop)
                    ends = (
                        (piece, templates[piece].find(name, named[1] if piece == named[0] else 0)) for piece in pieces
                    )
                    if (shown := next((end for end in ends if end[1] >= 0), None)) is None:
                        raise invalid("This model's chat template does not show tools and their calls.")
                    named = (shown[0], shown[1] + len(name))
                    not_json.add(index)
                    at = head if is_tool else texts
                    start = offset = len(templates[at])
                places[at].append((start, offset, index))
            index += 1
    return Cuts(places, not_json)


def _form(turn: Turn, block: ContentBlock, kind: int) -> str:
    """Return a form in which templates write a call's arguments, or a tool: whole, or what is under `function`."""
    if kind == 0:
        return block.text
    return to_json(block.value["function"] if kind > 1 else block.value, 4 if kind % 2 else None)
