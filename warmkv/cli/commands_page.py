"""`docs/commands.md`: every command with its options, written from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from warmkv.cli.command import write
from warmkv.terminal import is_standard

PAGES = {
    "serve": "api.md",
    "observe": "operations.md#dashboards",
    "packs": "prefix_cache.md#knowledge-packs",
    "hash-key": "tenants.md",
    "plan": "planning.md",
    "replay": "simulator.md#warmkv-replay",
    "sweep": "simulator.md#warmkv-sweep",
    "tune": "simulator.md#warmkv-tune",
    "verify": "simulator.md#warmkv-verify",
    "workload": "simulator.md#warmkv-workload",
    "cachesim": "simulator.md#warmkv-cachesim",
    "calibrate": "simulator.md#warmkv-calibrate",
    "price": "api.md",
    "eval": "evaluation.md",
    "bench": "measuring.md",
    "profile": "measuring.md",
    "policy": "control.md",
    "dashboards": "operations.md",
    "k8s": "kubernetes.md",
}
"""Where a command or a group is explained, relative to the page."""

HEAD = """# Commands

Written by `warmkv docs`, from what `--help` shows: `make docs` writes it anew.

Every command exits 0 if it did what was asked, 2 if it was asked for something that cannot be (an option, a setting,
a file), 70 for a fault of warmkv, with its traceback; `serve`, `demo`, `observe`, `record`, `route`, `policy`,
`packs`, `dashboards` and `k8s` exit 1 where the machine or the service stands in the way. `--json` prints the result
alone, as JSON; `--json FILE` writes it to a file as well. `-` is standard output where a file is written, and
standard input where a trace is read. Settings come from a YAML file (`--config`), then `WARMKV_SECTION__KEY`
variables, then `--set section.key=value`.
`warmkv --install-completion` sets up completion for the shell.
"""


def docs(
    file: Annotated[Path, typer.Argument(help="Markdown file to write.")] = Path("docs/commands.md"),
) -> None:
    """Write the page that lists every command with its options.

    Example: `warmkv docs docs/commands.md`
    """
    from warmkv.cli import app

    write(page(typer.main.get_command(app)), file)
    if not is_standard(file):
        print(f"wrote {file}")


def page(root: Any) -> str:
    """Return the page of a command tree: a table of all commands by panel, then each with its options."""
    commands = list(_commands(root, ""))
    lines = [HEAD]
    for panel in dict.fromkeys(_panel(root, name) for name, _ in commands):
        lines += [f"## {panel}", "", "| command | what it does |", "|---|---|"]
        lines += [_overview(root, name, one) for name, one in commands if _panel(root, name) == panel]
        lines.append("")
    for name, one in commands:
        lines += [f"## `warmkv {name}`", "", _text(one.help), "", *_options(one)]
    return "\n".join(lines).rstrip() + "\n"


def _commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, one in group.commands.items():
        if one.hidden:
            continue
        if hasattr(one, "commands"):
            yield from _commands(one, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", one


def _panel(root: Any, name: str) -> str:
    return str(root.commands[name.split()[0]].rich_help_panel)


def _overview(root: Any, name: str, one: Any) -> str:
    link = PAGES.get(name.split()[0])
    arguments = "".join(f" {_metavar(p)}" for p in one.params if p.param_type_name == "argument")
    shown = f"[`warmkv {name}{arguments}`](#{_anchor(name)})"
    first = _sentence(_text(one.help))
    return f"| {shown} | {_cell(first)}{f' [More]({link}).' if link else ''} |"


def _anchor(name: str) -> str:
    """Return the anchor that a heading with the command gets on GitHub."""
    return "warmkv-" + re.sub(r"[^\w -]", "", name).replace(" ", "-")


def _sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def _options(one: Any) -> Iterator[str]:
    shown = [p for p in one.params if p.name != "help" and not getattr(p, "hidden", False)]
    rows = sorted(shown, key=lambda parameter: bool(parameter.param_type_name != "argument"))
    if not rows:
        return
    yield "| option | default | |"
    yield "|---|---|---|"
    for parameter in rows:
        yield f"| {_name(parameter)} | {_default(parameter)} | {_cell(parameter.help or '')} |"
    yield ""


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_metavar(parameter)}`"
    names = "/".join([*parameter.opts, *parameter.secondary_opts])
    return f"`{names}`"


def _metavar(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name.upper())
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    shown = parameter.show_default
    if isinstance(shown, str):
        return _cell(f"`{shown}`" if "." in shown or "," in shown else shown)
    value = parameter.default() if callable(parameter.default) else parameter.default
    if value in (None, "", False) or value == [] or not shown:
        return ""
    values = value if isinstance(value, list | tuple) else [value]
    return f"`{' '.join(str(getattr(one, 'value', one)) for one in values)}`"


def _text(text: str | None) -> str:
    return re.sub(r"[ ]*\n[ ]*(?!\n)", "\n", (text or "").strip()).replace("\f", "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
