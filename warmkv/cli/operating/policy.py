"""`warmkv policy`: see and change what a running service works by, over HTTP; list methods and storages."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from warmkv.cli.command import add_command, fail, write, writing
from warmkv.cli.options import JsonOptions
from warmkv.config import GatewayConfig, read_value
from warmkv.platform.operator_key import read_key
from warmkv.policies.compression import tables
from warmkv.policy_spec import METHODS, STORAGES
from warmkv.terminal import errors, is_standard, plain_table, show_table

TIMEOUT_SECONDS = 30.0
_DEFAULTS = GatewayConfig()

app = typer.Typer(
    no_args_is_help=True,
    help="See and change the live configuration of a service: policy, TTLs, routing, prices. For operators. "
    "List the compression methods and storages.",
)

UrlOption = Annotated[str, typer.Option(help="Where the service is.")]
KeyOption = Annotated[
    str,
    typer.Option(
        envvar="WARMKV_API_KEY",
        help="API key of an operator; for a `warmkv serve` of yours on this machine it is found.",
        show_default=False,
        show_envvar=True,
    ),
]
WhyOption = Annotated[str, typer.Option(help="The reason, kept with the version.")]
BasedOnOption = Annotated[
    int | None, typer.Option(min=0, help="Refuse the change unless this version is in force.", show_default=False)
]
URL = f"http://{_DEFAULTS.host}:{_DEFAULTS.port}"


@add_command(app, code=1)
def show(output: JsonOptions, url: UrlOption = URL, key: KeyOption = "") -> None:
    """Show the settings in force, who changed them last, and which version each gateway has.

    Example: `warmkv policy show --url http://127.0.0.1:8400`
    """
    _tell(_call("GET", url, key), output)


@add_command(app, "set", code=1)
def set_(
    changes: Annotated[list[str], typer.Argument(metavar="SETTING=VALUE...", help="As for --set of `warmkv serve`.")],
    why: WhyOption,
    output: JsonOptions,
    based_on: BasedOnOption = None,
    url: UrlOption = URL,
    key: KeyOption = "",
) -> None:
    """Change settings for all later requests: all of them, or none if one is refused.

    Ends with code 1 where a gateway does not go by the new version; it is kept nevertheless.

    Examples: `warmkv policy set compression.policy=snapkv@0.2 --why "memory is short"`,
    `warmkv policy set 'prefix_cache.ttls={5m: 300, 1h: 1800}' routing.overload=4 --why "shorter hour" --based-on 7`
    """
    wanted = {}
    for change in changes:
        setting, equals, text = change.partition("=")
        if not equals:
            fail(f"{change}: write it as section.key=value, as in compression.policy=snapkv@0.2")
        if setting.strip() in wanted:
            fail(f"{setting.strip()} is given twice")
        wanted[setting.strip()] = read_value(setting, text)
    answer = _call("PUT", url, key, body=_without_none(changes=wanted, why=why, version=based_on))
    _tell(answer, output)
    _check_in_force(answer)


@add_command(app, code=1)
def rollback(
    why: WhyOption,
    output: JsonOptions,
    to: Annotated[
        int | None, typer.Option(min=0, help="Version; 0 is the configuration at start.", show_default="the one before")
    ] = None,
    based_on: BasedOnOption = None,
    url: UrlOption = URL,
    key: KeyOption = "",
) -> None:
    """Restore the settings of an earlier version.

    Examples: `warmkv policy rollback --why "answers got worse"`, `warmkv policy rollback --to 0 --why "as configured"`
    """
    answer = _call("POST", url, key, "/rollback", _without_none(to=to, why=why, version=based_on))
    _tell(answer, output)
    _check_in_force(answer)


@add_command(app, code=1)
def history(output: JsonOptions, url: UrlOption = URL, key: KeyOption = "") -> None:
    """List the stored versions, the latest first.

    Example: `warmkv policy history --json`
    """
    found = _call("GET", url, key, "/history")

    def show() -> None:
        for version in found["versions"]:
            print(_headline(version))
            _lines(version["changes"])

    output.give(found, show)


@add_command(app, code=1)
def methods(
    output: JsonOptions,
    docs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the tables of this Markdown page anew, and print nothing; `-`: from standard input to output.",
        ),
    ] = None,
) -> None:
    """List the compression methods that are installed, those of other packages included, with their knobs.

    Example: `warmkv policy methods`
    """
    if docs is not None:
        with writing(docs, code=1):
            page = sys.stdin.read() if is_standard(docs) else docs.read_text(encoding="utf-8")
        write(tables.fill(page), docs, code=1)
        return
    found: dict[str, dict[str, Any]] = {
        name: {
            "keeps": method.keeps,
            "decoding": tables.decoding(method),
            "knobs": tables.defaults(method.knobs),
            "source": method.source,
            "module": method.__module__,
        }
        for name, method in METHODS.items()
    }

    def show() -> None:
        table = plain_table("method", "keeps", "while decoding", "knobs", left=4)
        for name, row in found.items():
            knobs = ", ".join(f"{knob}={value}" for knob, value in row["knobs"].items())
            table.add_row(*map(escape, (name, row["keeps"], row["decoding"], knobs)))
        show_table(table)

    output.give(found, show)


@add_command(app, code=1)
def storages(output: JsonOptions) -> None:
    """List the storage formats that are installed, those of other packages included.

    Bytes are of the key and the value of an entry for one KV head of 128 numbers, of a model in 16 bits.

    Example: `warmkv policy storages`
    """
    found: dict[str, dict[str, Any]] = {
        name: {
            "alias": tables.alias(storage),
            "entry_bytes": storage.entry_bytes(tables.HEAD_DIM, tables.DTYPE_BYTES),
            "group": storage.group,
            "source": storage.source,
            "module": type(storage).__module__,
        }
        for name, storage in STORAGES.items()
    }

    def show() -> None:
        table = plain_table("storage", "as a policy", "bytes of an entry", "packed by", left=2)
        for name, row in found.items():
            table.add_row(*map(escape, (name, row["alias"], f"{row['entry_bytes']:g}", str(row["group"]))))
        show_table(table)

    output.give(found, show)


def _call(method: str, url: str, key: str, path: str = "", body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Call the service; end the program with code 2 at a refusal and with 1 at any other failure."""
    try:
        request = urllib.request.Request(
            f"{url.rstrip('/')}/v1/warmkv/policy{path}",
            data=None if body is None else json.dumps(body, default=str).encode(),
            headers={"x-api-key": key or read_key(url), "content-type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            answer: Any = json.load(response)
    except urllib.error.HTTPError as error:
        fail(_message(error), code=2 if error.code < 500 else 1)
    except (json.JSONDecodeError, UnicodeDecodeError, HTTPException):
        answer = None
    except (OSError, ValueError) as error:
        fail(f"{url}: {error}", code=1)
    if not isinstance(answer, dict) or not {"version", "versions"} & answer.keys():
        fail(f"{url} answered, but not as a gateway does: is its address right?", code=1)
    return answer


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.url}: {error}"


def _tell(policy: dict[str, Any], output: JsonOptions) -> None:
    said_by = policy["parts"].values()

    def show() -> None:
        print(_headline(policy))
        if faults := dict.fromkeys(said["fault"] for said in said_by if said["fault"]):
            in_force = ", ".join(dict.fromkeys(str(said["version"]) for said in said_by))
            print("\n".join([f"it is not in force, version {in_force} is:", *faults]))
        _lines(policy["settings"])
        for part, said in sorted(policy["parts"].items()):
            print(f"gateway {part}: version {said['version']}")
        if policy["fault"]:
            print(policy["fault"])

    output.give(policy, show)
    for warning in policy.get("warnings", ()):
        errors.print(f"warning: {warning}", style="yellow")


def _check_in_force(policy: dict[str, Any]) -> None:
    """End the program with code 1 where a gateway does not go by the version."""
    number = policy["version"]
    behind = [
        f"gateway {part} goes by version {said['version']}: {said['fault'] or 'it has not answered yet'}"
        for part, said in sorted(policy["parts"].items())
        if said["version"] != number
    ]
    if behind:
        fail(f"version {number} is not in force everywhere; {'; '.join(behind)}", code=1)


def _headline(version: dict[str, Any]) -> str:
    by = f" by {version['who']} at {version['when']}" if version["when"] else ""
    back = f" (back to {version['rolled_back_to']})" if version["rolled_back_to"] is not None else ""
    return f"version {version['version']}{by}{back}: {version['why']}"


def _lines(settings: dict[str, Any]) -> None:
    for setting, value in settings.items():
        print(f"  {setting} = {value if isinstance(value, str) else json.dumps(value)}")


def _without_none(**body: Any) -> dict[str, Any]:
    return {key: value for key, value in body.items() if value is not None}
