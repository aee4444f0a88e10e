"""Tools of the Responses API as chat completions have them: functions, those of a namespace under a longer name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from warmkv.platform.gateway.apis.errors import invalid
from warmkv.platform.gateway.apis.schema import FieldsLeftOut

Tool = dict[str, Any]


def qualified(namespace: str | None, name: str) -> str:
    """Return the name under which a model sees a function, which belongs to a namespace or to none."""
    return f"{namespace}__{name}" if namespace else name


def chat_tools(tools: Iterable[Tool], left_out: FieldsLeftOut) -> list[Tool]:
    """Return tools as chat completions have them. Those of other types stay, and are refused there.

    The first function of a namespace tells what the namespace is for. A web search without access to the web, as Codex
    sends it, finds nothing: it is left out. Raises ApiError (400) where a namespace has anything but functions.
    """
    found: list[Tool] = []
    for place, tool in enumerate(tools):
        match tool.get("type"):
            case "function":
                found.append(_function(tool))
            case "namespace":
                about = tool.get("description")
                for member in _members(place, tool):
                    renamed = {**member, "name": qualified(tool.get("name"), member["name"])}
                    if about:
                        renamed["description"] = "\n".join(filter(None, (about, member.get("description"))))
                        about = None
                    found.append(_function(renamed))
            case "web_search" if tool.get("external_web_access") is False:
                left_out.note("tools.web_search")
            case _:
                found.append(tool)
    return found


def names_in_namespaces(tools: Iterable[Tool]) -> dict[str, dict[str, str]]:
    """Return what a call of a namespace's function says besides its arguments, by the name that the model knows."""
    return {
        qualified(tool.get("name"), member["name"]): {"name": member["name"], "namespace": tool["name"]}
        for tool in tools
        if tool.get("type") == "namespace"
        for member in tool["tools"]
    }


def _members(place: int, tool: Tool) -> Sequence[Tool]:
    members = tool.get("tools")
    if not isinstance(tool.get("name"), str) or not isinstance(members, list):
        raise invalid(f"tools.{place}: a namespace has a name and tools")
    for number, member in enumerate(members):
        if not isinstance(member, dict) or member.get("type") != "function":
            raise invalid(f"tools.{place}.tools.{number}.type: Input should be 'function'")
        if not isinstance(member.get("name"), str):
            raise invalid(f"tools.{place}.tools.{number}.name: Field required")
    return members


def _function(tool: Tool) -> Tool:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
