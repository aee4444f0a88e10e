"""What makes a function a command: option objects, errors that end it with a sentence, `--json` without a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import typer
from typer.core import TyperCommand

from warmkv.config import ConfigError
from warmkv.extras import advice
from warmkv.faults import UserError
from warmkv.terminal import errors, is_standard, text_output

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


class CommandError(UserError):
    """Something that a command cannot do as asked, and the exit code that tells so."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def fail(message: str, code: int = 2) -> NoReturn:
    """End the command with a sentence on stderr and an exit code."""
    raise CommandError(message, code)


def add_command(
    app: typer.Typer, name: str | None = None, *, code: int = 2, panel: str | None = None, hidden: bool = False
) -> Callable[[Callable[..., None]], Any]:
    """Register a function as a command of an app; `code` is its exit code for errors that users can mend, `panel` where
    `--help` lists it.

    A parameter whose type is a dataclass of options (see `options.py`) stands for all of them.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        cls = type("Command", (Command,), {"error_code": code})
        app.command(name, cls=cls, rich_help_panel=panel, hidden=hidden)(_with_spread_options(function))
        return function

    return register


class Command(TyperCommand):
    """A command that ends with a sentence and an exit code where a user can mend the error."""

    error_code = 2

    def invoke(self, ctx: Any) -> Any:
        with known_errors(_name(ctx), self.error_code):
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Let `--json` stand without a file, where it means standard output: Typer itself wants a value."""
        given = []
        for arg, following in zip_longest(args, args[1:], fillvalue="--"):
            given.append(arg)
            if arg == "--json" and not self._is_file(following):
                given.append("-")
        with known_errors(_name(ctx), self.error_code):
            return super().parse_args(ctx, given)

    def _is_file(self, text: str) -> bool:
        """Tell a file for `--json` from what comes next; where arguments may be left out, it ends in .json."""
        if text.startswith("-"):
            return text == "-"
        open_ended = any(p.param_type_name == "argument" and (p.nargs != 1 or not p.required) for p in self.params)
        return not open_ended or text.endswith(".json")


@contextmanager
def known_errors(what: str, code: int) -> Iterator[None]:
    """End the program with a sentence and an exit code for what users can mend; let everything else pass."""
    try:
        yield
    except KeyboardInterrupt:
        errors.print("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except ConfigError as error:
        _end("configuration", str(error), 2)
    except CommandError as error:
        _end(what, str(error), error.code)
    except UserError as error:
        _end(what, str(error), code)
    except ModuleNotFoundError as error:
        if (said := advice(error.name)) is None:
            raise
        _end(what, said, 2)
    except BrokenPipeError:  # whoever read the output has left, as in `warmkv ... | head`
        raise
    except OSError as error:
        _end(what, f"cannot use {error.filename}: {error.strerror}" if error.filename else str(error), code)


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Say after Ctrl-C that the same command continues with what is in the folder."""
    try:
        yield
    except KeyboardInterrupt:
        errors.print(f"interrupted; the same command goes on with what is in {out}")
        raise typer.Exit(INTERRUPTED) from None


def write(text: str, file: str | Path, code: int = 2) -> None:
    """Write a text file that a user named; `-` is standard output. What cannot be written ends the command."""
    with writing(file, code), text_output(file) as out:
        out.write(text)


@contextmanager
def writing(file: str | Path, code: int = 2) -> Iterator[None]:
    """End the command with a sentence where a file or folder cannot be written."""
    try:
        yield
    except BrokenPipeError:  # whoever read standard output has left
        raise
    except OSError as error:
        fail(f"cannot write {error.filename or file}: {error.strerror or error}", code)


def make_folder_of(file: str | Path) -> None:
    """Make the folder of what will be written, before an hour of work."""
    with writing(file):
        Path(file).parent.mkdir(parents=True, exist_ok=True)


def no_standard_output(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """Refuse `-` for a folder, or a file that is more than written once: the callback of such an option."""
    if value is not None and is_standard(value):
        named = param.opts[0] if param.opts[0].startswith("-") else param.opts[0].upper()
        fail(f"{named}: `-` is standard output, which this cannot be; give it a name")
    return value


def _end(what: str, message: str, code: int) -> NoReturn:
    errors.print(f"{what}: ", style="red", end="")
    errors.print(message)
    raise typer.Exit(code)


def _name(ctx: Any) -> str:
    """Return the command as it is called under `warmkv`, or the group that it is in."""
    while ctx.parent is not None and ctx.parent.parent is not None:
        ctx = ctx.parent
    return str(ctx.info_name)


def _with_spread_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function with the fields of its option objects as parameters of their own, as Typer reads them.

    Help lists the command's own options first.
    """
    hints = get_type_hints(function, include_extras=True)
    own: list[inspect.Parameter] = []
    shared: list[inspect.Parameter] = []
    objects: dict[str, type] = {}
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if isinstance(hint, type) and is_dataclass(hint):
            objects[parameter.name] = hint
            shared += _parameters(hint)
        else:
            own.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hint))
    spread = [*own, *shared]

    @wraps(function)
    def call(**given: Any) -> None:
        for name, kind in objects.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        function(**given)

    call.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in spread}
    return call


def _parameters(options: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        annotation = hints[field.name]
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=annotation
        )


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default
