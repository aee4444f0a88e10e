"""Response templates of model families, for tokenizers that have none of their own. Only data.

They are in the format of transformers (`tokenizer.response_template`). Fields whose name begins with `tool_calls` hold
calls, `reasoning_content` thinking, all others text. A call's name and `arguments`, or `parameters`, are under
`function`. Delimiters that are special tokens of a tokenizer are shown to the parser. Whitespace between parts is
dropped there; expressions are bounded, so that text which might go on to match is short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from warmkv.config.model import ResponseTemplate


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """What stands around the JSON of a call's arguments, with `{name}` for the tool's, and around all calls.

    Calls that are constrained are written so. Without `between` forced ones are one.

    `sign` is what they begin with, where they may stand within text. `not_text` is a regular expression of all texts
    that have, or begin, a call, with `{names}` for the tools'. Where text is in `notes`, it says what these begin with,
    and `next_note` what stands between two.
    """

    before: str
    behind: str = ""
    between: str = ""
    first: str = ""
    last: str = ""
    sign: str = ""
    not_text: str = ""
    notes: tuple[str, ...] = ()
    next_note: str = ""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How models of a family write calls and thinking. `signs` are all found in its chat templates.

    Where calls are `undelimited`, only those that name a tool of the request are calls. Without `calls` they cannot be
    constrained: their arguments are not JSON.
    """

    template: Mapping[str, Any]
    signs: tuple[str, ...]
    undelimited: bool = False
    calls: CallSyntax | None = None


NAME = "(?P<name>[A-Za-z0-9_.-]{1,128})"
SPACE = r"\s{0,16}"
THINK = {"open": "<think>", "close": "</think>"}
TEXT = {"content": "text"}
WHOLE_CALL = {"content": "json", "transform": {"type": "function", "function": "{content}"}}
ARGUMENTS = {"transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}}
CHATML = r"<\|im_start\|>assistant\n"
ANY = "(?s:.*)"
BEGUN = rf'{SPACE}\{{{SPACE}"name"{SPACE}:'
JSON_CALL = rf'(?=\{{{SPACE}"name"{SPACE}:)'

FAMILIES: Mapping[ResponseTemplate, ModelFamily] = {
    # <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    # <|message|>{...}<|call|>; the recipient may stand before the channel.
    "gpt_oss": ModelFamily(
        {
            "start_anchor": "<|start|>assistant",
            "fields": {
                "reasoning_content": {
                    "open_pattern": rf"(?:<\|start\|>assistant{SPACE})?<\|channel\|>analysis{SPACE}<\|message\|>",
                    "close": ["<|end|>", "<|return|>"],
                },
                "tool_calls": {
                    "open_pattern": rf"(?:<\|start\|>assistant{SPACE})?(?:"
                    rf"to=functions\.{NAME}{SPACE}<\|channel\|>(?:commentary|analysis)"
                    rf"|<\|channel\|>(?:commentary|analysis){SPACE}to=functions\.{NAME}"
                    r")[^<]{0,64}(?:<\|constrain\|>[^<]{0,64})?<\|message\|>",
                    "close": ["<|call|>", "<|end|>"],
                    "repeats": True,
                    "content": "json",
                    **ARGUMENTS,
                },
                "final": {
                    "open_pattern": rf"(?:<\|start\|>assistant{SPACE})?<\|channel\|>(?:final|commentary){SPACE}"
                    r"(?:<\|constrain\|>[^<]{0,64})?<\|message\|>",
                    "close": ["<|end|>", "<|return|>"],
                },
                "content": TEXT,
            },
        },
        signs=("<|channel|>", "<|message|>"),
        calls=CallSyntax(
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            "<|call|>",
            notes=tuple(f"<|channel|>{channel}<|message|>" for channel in ("analysis", "commentary", "final")),
            next_note="<|end|><|start|>assistant",
        ),
    ),
    # <tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>
    "glm4_moe": ModelFamily(
        {
            "start_anchor": "<|assistant|>",
            "fields": {
                "reasoning_content": THINK,
                "tool_calls": {
                    "open_pattern": rf"<tool_call>{SPACE}{NAME}{SPACE}(?=<arg_key>|</tool_call>)",
                    "close": "</tool_call>",
                    "repeats": True,
                    "content": "xml-inline",
                    "content_args": {
                        "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
                    },
                    **ARGUMENTS,
                },
                "content": TEXT,
            },
        },
        signs=("<arg_key>", "<tool_call>"),
    ),
    # <tool_call>\n<function=f>\n<parameter=k>\nv\n</parameter>\n</function>\n</tool_call>
    "qwen3_coder": ModelFamily(
        {
            "start_anchor_pattern": CHATML,
            "fields": {
                "reasoning_content": THINK,
                "tool_calls": {
                    "open_pattern": rf"<tool_call>{SPACE}<function={NAME}>",
                    "close_pattern": rf"</function>{SPACE}</tool_call>",
                    "repeats": True,
                    "content": "xml-inline",
                    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
                    **ARGUMENTS,
                },
                "content": TEXT,
            },
        },
        signs=("<function=", "<tool_call>"),
    ),
    # <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>: Hermes, Qwen 2.5 and 3, SmolLM 3 and many more
    "hermes": ModelFamily(
        {
            "start_anchor_pattern": CHATML,
            "fields": {
                "reasoning_content": THINK,
                "tool_calls": {
                    "open": "<tool_call>",
                    "close": "</tool_call>",
                    "repeats": True,
                    **WHOLE_CALL,
                },
                "content": TEXT,
            },
        },
        signs=("<tool_call>",),
        calls=CallSyntax(
            '<tool_call>\n{"name": "{name}", "arguments": ',
            "}\n</tool_call>",
            "\n",
            sign="<tool_call>",
            not_text=f"{ANY}<tool_call>{ANY}",
        ),
    ),
    # <start_function_call>call:f{k:<escape>v<escape>}<end_function_call>
    "function_gemma": ModelFamily(
        {
            "start_anchor": "<start_of_turn>model\n",
            "fields": {
                "tool_calls": {
                    "open_pattern": rf"<start_function_call>{SPACE}call:{NAME}",
                    "close": "<end_function_call>",
                    "repeats": True,
                    "content": "json",
                    "content_args": {"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
                    **ARGUMENTS,
                },
                "content": TEXT,
            },
        },
        signs=("<start_function_call>",),
    ),
    # [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...], in later models [TOOL_CALLS]f[ARGS]{...} for each call
    "mistral": ModelFamily(
        {
            "start_anchor": ["[/INST]", "[/TOOL_RESULTS]"],
            "fields": {
                "reasoning_content": {"open": "[THINK]", "close": "[/THINK]"},
                "tool_calls": {
                    "open_pattern": rf"\[TOOL_CALLS\]{SPACE}(?=\[{SPACE}\{{)",
                    "content": "json",
                    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
                    "transform_each": True,
                },
                "tool_calls_named": {
                    "open_pattern": rf"\[TOOL_CALLS\]{SPACE}{NAME}"
                    rf"(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?{SPACE}(?=\{{)",
                    "close_pattern": r"(?=\[TOOL_CALLS\])",
                    "repeats": True,
                    "content": "json",
                    **ARGUMENTS,
                },
                "content": TEXT,
            },
        },
        signs=("[TOOL_CALLS]",),
        calls=CallSyntax(
            '{"name": "{name}", "arguments": ',
            "}",
            ", ",
            "[TOOL_CALLS][",
            "]",
            sign="[TOOL_CALLS]",
            not_text=rf"{ANY}\[TOOL_CALLS\]{ANY}",
        ),
    ),
    # {"name": "f", "parameters": {...}} as the whole answer, or several with semicolons between them
    "llama3": ModelFamily(
        {
            "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "fields": {
                "tool_calls": {
                    "open_pattern": rf"(?:\A{SPACE}(?:<\|python_tag\|>)?|(?<=\}}{SPACE});){SPACE}{JSON_CALL}",
                    "close_pattern": rf"(?={SPACE};{SPACE}{JSON_CALL})",
                    "repeats": True,
                    **WHOLE_CALL,
                },
                "content": TEXT,
            },
        },
        signs=("<|start_header_id|>", "tool"),
        calls=CallSyntax(
            '{"name": "{name}", "parameters": ',
            "}",
            "; ",
            not_text=rf"{SPACE}(<\|python_tag\|>)?{BEGUN}{ANY}|{ANY}\}}{SPACE};{BEGUN}{ANY}",
        ),
        undelimited=True,
    ),
    # f\n{...}, every further call behind <|assistant|>
    "glm4": ModelFamily(
        {
            "start_anchor": "<|assistant|>",
            "fields": {
                "tool_calls": {
                    "open_pattern": rf"(?:\A|<\|assistant\|>){SPACE}{NAME}\n{SPACE}(?=\{{)",
                    "close_pattern": r"(?=<\|assistant\|>)|<\|observation\|>",
                    "repeats": True,
                    "content": "json",
                    **ARGUMENTS,
                },
                "content": TEXT,
            },
        },
        signs=("<|observation|>",),
        calls=CallSyntax("{name}\n", not_text=rf"{SPACE}({{names}})\n{SPACE}\{{{ANY}"),
        undelimited=True,
    ),
    # {"name": "f", "parameters": {...}}, alone or in a fenced block, as Google's guide has the model asked for it
    "gemma3": ModelFamily(
        {
            "start_anchor": "<start_of_turn>model\n",
            "fields": {
                "tool_calls": {
                    "open_pattern": rf"```(?:json|tool_call|tool_code)?{SPACE}{JSON_CALL}",
                    "close": "```",
                    "repeats": True,
                    **WHOLE_CALL,
                },
                "tool_calls_alone": {"open_pattern": rf"\A{SPACE}{JSON_CALL}", "repeats": True, **WHOLE_CALL},
                "content": TEXT,
            },
        },
        signs=("<start_of_turn>",),
        calls=CallSyntax(
            '```tool_call\n{"name": "{name}", "parameters": ',
            "}\n```",
            "\n",
            sign="```tool_call",
            not_text=rf"{BEGUN}{ANY}|{ANY}```(json|tool_call|tool_code)?{BEGUN}{ANY}",
        ),
        undelimited=True,
    ),
    # <think>...</think> and text
    "think": ModelFamily(
        {
            "start_anchor_pattern": CHATML + r"|<｜Assistant｜>",
            "fields": {"reasoning_content": THINK, "content": TEXT},
        },
        signs=("<think>",),
    ),
}


def family_of(chat_template: str) -> ModelFamily | None:
    """Return the first family all of whose signs are in a chat template; None if there is none."""
    return next((family for family in FAMILIES.values() if all(sign in chat_template for sign in family.signs)), None)
