"""A small request of the shape that the Claude Code client sends, turn by turn of one conversation."""

from __future__ import annotations

from typing import Any

MARK = {"cache_control": {"type": "ephemeral"}}
DEFERRED = ("WebFetch", "NotebookEdit")
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "x-app": "cli",
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    path = {"path": {"type": "string", "description": f"the file that {name} takes"}}
    schema = {"type": "object", "properties": path, "required": ["path"], "additionalProperties": False}
    return {"name": name, "description": f"{name} works on a file of the project. " * 4, "input_schema": schema, **more}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def request(model: str, turn: int = 1, calls: int = 1, **more: Any) -> dict[str, Any]:
    """Return the request of a turn, the first being 1: in each before it the model called tools, side by side.

    The last message and the one before carry the marks. The billing line is another one in every request.
    """
    names = ("Read", "Edit", "Bash")
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [text("<system-reminder>Today is Friday.</system-reminder>"), text("Fix the bug.")],
        },
        {"role": "system", "content": [text("Deferred tools: " + ", ".join(DEFERRED))]},
    ]
    for round_ in range(turn - 1):
        ids = [f"toolu_{round_}_{number}" for number in range(calls)]
        used = [{"type": "tool_use", "id": id_, "name": "Read", "input": {"path": f"{id_}.py"}} for id_ in ids]
        results = [{"type": "tool_result", "tool_use_id": id_, "content": f"the text of {id_}.py"} for id_ in ids]
        messages += [
            {"role": "assistant", "content": [text(f"I read {calls} files."), *used]},
            {"role": "user", "content": results},
        ]
    for message in messages[-2:]:
        message["content"][-1] = message["content"][-1] | MARK
    billing = f"x-anthropic-billing-header: cc_version=2.1.330.{turn}; cc_entrypoint=cli; cch={turn:05x};"
    return {
        "model": model,
        "max_tokens": 8,
        "system": [
            text(billing),
            text("You are Claude Code, an agent that works on files.", **MARK),
            text("Be brief. Read a file before you change it. " * 8, **MARK),
        ],
        "tools": [*map(tool, names), *(tool(name, defer_loading=True) for name in DEFERRED)],
        "messages": messages,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "metadata": {"user_id": "user_1"},
        "stream": False,
        **more,
    }
