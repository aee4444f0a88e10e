"""Run clients against `warmkv serve`: `python -m tests.client_commands [NAME ...]`; docs/clients.md has the results."""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.client_commands.commands import CLIENTS, ClientError, Run
from tests.client_commands.service import serving, write_long_model
from warmkv.models.tiny import PATH

INSTALLED = Path(os.environ.get("WARMKV_CLIENT_COMMANDS", "build/client-commands")).absolute()


def main() -> None:
    """Run those that are named, or all; those that are not installed are left out, with the command that does it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(CLIENTS)} (default: all)")
    names = parser.parse_args().names or list(CLIENTS)
    if unknown := set(names) - CLIENTS.keys():
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    for name in names:
        if not CLIENTS[name].path(INSTALLED).exists():
            print(f"{name}: skipped, not installed; {CLIENTS[name].install(INSTALLED)}", flush=True)
    there = sorted((name for name in names if CLIENTS[name].path(INSTALLED).exists()), key=lambda n: CLIENTS[n].long)
    failed = False
    with tempfile.TemporaryDirectory(prefix="warmkv-clients-") as temporary:
        for long, group in itertools.groupby(there, key=lambda name: CLIENTS[name].long):
            folder = Path(temporary) / ("long" if long else "tiny")
            folder.mkdir()
            model = write_long_model(folder / "long") if long else PATH
            with serving(model, folder) as service:
                for name in group:
                    own, program = folder / name, CLIENTS[name].path(INSTALLED)
                    own.mkdir()
                    try:
                        told = CLIENTS[name].run(Run(program, own, service, len(service.records())))
                    except (ClientError, subprocess.TimeoutExpired) as error:
                        failed, told = True, f"FAILED: {error}"
                    print(f"{name} ({CLIENTS[name].package}): {told}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
