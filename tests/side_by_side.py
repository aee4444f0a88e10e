"""Run all tests in three pytest processes side by side: `python -m tests.side_by_side [argument of pytest ...]`.

Tests on a Ray cluster mostly wait, for processes to start and for faults to be noticed; the unit tests compute
meanwhile. The output of the first part is shown as it comes, that of the others when they have ended. With
`--then COMMAND` in front of pytest's arguments, a shell runs that command in the first part's place once it has ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

UNIT, FAULTS = "tests/unit", "tests/faults"
PARTS = {
    "on one Ray cluster": ["tests", "--ignore", UNIT, "--ignore", FAULTS],
    "faults, on a cluster of their own": [FAULTS],
    "unit tests, on all cores": [UNIT, "--numprocesses", "logical", "--maxprocesses", "8", "--dist", "worksteal"],
}
NICE = ["nice", "-n", "3"]  # for the unit tests, which nobody waits for
# What dozens of processes import is compiled once. A thread is enough for tiny models: more wait for each other.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
ENVIRONMENT.setdefault("OMP_NUM_THREADS", "1")


def main(arguments: list[str]) -> int:
    """Return 1 if a test or the command after them failed. An interrupt ends all three, each in its own order."""
    then, arguments = (arguments[1], arguments[2:]) if arguments[:1] == ["--then"] else ("", arguments)
    pytest = [sys.executable, "-m", "pytest", *arguments]
    with tempfile.TemporaryFile("w+") as faults, tempfile.TemporaryFile("w+") as unit:
        running = []
        for (name, chosen), output in zip(PARTS.items(), (None, faults, unit), strict=True):
            command = [*(NICE if chosen[0] == UNIT else []), *pytest, *chosen]
            running.append(
                (name, output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=ENVIRONMENT))
            )
        failed = False
        try:
            for name, output, process in running:
                print(f"test: {name}", flush=True)
                failed |= process.wait() != 0
                if output is not None:
                    output.seek(0)
                    print(output.read(), flush=True)
                elif then:
                    failed |= subprocess.run(then, shell=True, env=ENVIRONMENT).returncode != 0
        except KeyboardInterrupt:  # which they got from the terminal, too
            for _, _, process in running:
                process.wait()
            return 130
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
