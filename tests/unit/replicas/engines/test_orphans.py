"""Processes end with the one that started them, and go on where they are let go."""

import subprocess
import sys

import pytest

from tests.polling import PATIENCE
from warmkv.replicas.engines.orphans import kill_with_this_process

WAITING = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
STARTER = """
import os, signal, subprocess, sys
from warmkv.replicas.engines.orphans import kill_with_this_process
kill_with_this_process([int(sys.argv[1])])
os.kill(os.getpid(), signal.SIGKILL)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfd")


def test_what_a_killed_process_had_started_is_killed():
    with subprocess.Popen(WAITING, stdin=subprocess.PIPE) as child:
        assert subprocess.run([sys.executable, "-c", STARTER, str(child.pid)], check=False).returncode == -9
        assert child.wait(PATIENCE) == -9


def test_what_is_let_go_lives_on():
    with subprocess.Popen(WAITING, stdin=subprocess.PIPE) as child:
        watcher = kill_with_this_process([child.pid, 1 << 22])
        watcher.kill()
        watcher.communicate()
        child.communicate(b"")
        assert child.returncode == 0
