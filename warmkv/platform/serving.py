"""`warmkv serve`: the service in the foreground."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.text import Text

from warmkv.config import Config, ConfigError
from warmkv.faults import UserError
from warmkv.platform.local import (
    ENDED_SECONDS,
    ended_part,
    live_config_fault,
    memory_plans,
    metrics_addresses,
    ray_logs,
    running,
)
from warmkv.platform.operator_key import kept
from warmkv.platform.tenants import warn_of_salt
from warmkv.prefixes.index import HEARTBEAT_SECONDS
from warmkv.terminal import errors


class EndedError(UserError):
    """Say that Ray has ended under a service."""


def serve_until_stopped(config: Config, console: Console, metrics_port: int = 0) -> None:
    """Run the service until SIGINT or SIGTERM, with its metrics at a port, or at a free one where it is 0.

    Its requests end first, for as long as `cluster.drain_seconds` says; a second signal cuts them off.

    Raises OSError where a port is taken or the model folder is missing, ConfigError where the service would be open
    to other machines, StartError where a replica cannot start, EndedError where Ray ends while it serves.
    """
    if warning := warn_of_salt(config):
        errors.print(warning, style="yellow")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until it serves, both interrupt the start
    with ExitStack() as stack:
        starting = Text(f"starting Ray and {config.first_replicas} replica(s) of {config.model.name}")
        with console.status(starting) as shown:
            service = stack.enter_context(
                running(config, lambda what: shown.update(Text(what)), metrics_port=metrics_port)
            )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        _explain(service.url, config, console)
        if fault := live_config_fault(config):
            console.print(f"\n{fault}", style="red")
        try:
            path = stack.enter_context(kept(service.port, service.operator_key))
            says = f"warmkv policy show --url {service.url}    # your key as its operator is in {path}"
        except OSError:  # no home, or one that is read-only
            says = f"warmkv policy show --url {service.url}    # with an operator's key in WARMKV_API_KEY"
            if console.is_terminal:  # else it would stay in a log
                says = f"WARMKV_API_KEY={service.operator_key} warmkv policy show --url {service.url}"
        console.print(f"\n    {says}")
        console.print(f"    {service.url}/console    # the same in a browser, with live figures")
        for address in metrics_addresses():
            console.print(f"    http://{address}/metrics    # for Prometheus")
        if plans := memory_plans(config, 2 * HEARTBEAT_SECONDS):
            alike = {plans[0]: len(plans)}  # but for what happens to be free
            for plan, count in (Counter(plans) if config.cluster.groups else alike).items():
                console.print(f"\n{count} x {plan}")
        while not stop.wait(ENDED_SECONDS):
            if part := ended_part():
                raise EndedError(
                    f"Ray's {part} has ended, and the service with it. If memory was short, the kernel killed it "
                    f"(dmesg tells). Its logs are in {ray_logs()}; start the service again."
                )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        console.print("stopping as soon as what runs has ended; Ctrl-C again stops at once")


def tenant_with_key(file: Path) -> str:
    """Return the setting that makes the holder of the key in a file the only tenant.

    Raises ConfigError where the file cannot be read or is empty, or where no client could send the key.
    """
    from warmkv.platform.tenants import hash_key

    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file}: {error}") from None
    if not key:
        raise ConfigError(f"--api-key-file {file} is empty: it must hold an API key")
    if not key.isascii():
        raise ConfigError(
            f"--api-key-file {file}: the key has characters beyond ASCII, which no header of HTTP carries"
        )
    rights = "[policy, replica, ignore_eos]"
    return f"gateway.tenants=[{{name: key-file, key_sha256: '{hash_key(key)}', rights: {rights}}}]"


def _explain(url: str, config: Config, console: Console) -> None:
    name, open_to_all = config.model.name, config.gateway.is_open
    key = '"any"' if open_to_all else 'os.environ["WARMKV_TENANT_KEY"]'
    shown = "" if open_to_all else ' -H "x-api-key: $WARMKV_TENANT_KEY"'
    if not open_to_all:
        console.print("    export WARMKV_TENANT_KEY=...    # of one of the tenants\n")
    console.print(Text.assemble("serving ", (name, "bold"), " at ", (url, "bold"), " (Ctrl-C stops it)\n"))
    console.print(
        f"    import anthropic{'' if open_to_all else ', os'}\n"
        f'    client = anthropic.Anthropic(base_url="{url}", api_key={key})\n'
        f'    client.messages.create(model="{name}", max_tokens=64,\n'
        '                           messages=[{"role": "user", "content": "Hello"}])\n\n'
        f"    curl {url}/v1/chat/completions -H 'content-type: application/json'{shown} \\\n"
        f"""         -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'""",
    )
