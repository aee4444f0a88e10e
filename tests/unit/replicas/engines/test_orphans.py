"""Processes end with the one that started them, and go on where they are let go."""

import subprocess
import sys

import pytest

from tests.polling import PATIENCE
from warmkv.replicas.engines.orphans import children_end_with_this_process, settled

# Starts another one when it is told to, says so and stays: what a process has started that ends before the watcher's
# last look is not found by it. What both have inherited as output is open while they live.
WAITING = """
import subprocess, sys, time
for line in sys.stdin:
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"], stdin=subprocess.DEVNULL)
    print("started", flush=True)
    time.sleep(1000)
"""
STARTER = """
import os, signal, subprocess, sys
from warmkv.replicas.engines.orphans import children_end_with_this_process, settled
when, waiting = sys.argv[1:]
if when == "starting":
    child = subprocess.Popen([sys.executable, "-S", "-c", waiting], stdin=subprocess.PIPE)
    watcher = children_end_with_this_process()
else:
    watcher = children_end_with_this_process()
    child = subprocess.Popen([sys.executable, "-S", "-c", waiting], stdin=subprocess.PIPE)
    settled(watcher)
child.stdin.write(b"start\\n")
child.stdin.flush()
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfd")


@pytest.mark.parametrize("when", ["starting", "settled"])
def test_what_a_killed_process_had_started_is_killed_and_what_that_had_started(when):
    """Its output ends when all that have it are gone; a child that is not watched itself is found by its parent."""
    command = [sys.executable, "-c", STARTER, when, WAITING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"started\n"
        rest, _ = starter.communicate(b"\n", timeout=PATIENCE)
        assert (rest, starter.returncode) == (b"", -9)


def test_what_is_let_go_lives_on():
    with subprocess.Popen([sys.executable, "-S", "-c", WAITING], stdin=subprocess.PIPE) as child:
        watcher = children_end_with_this_process()
        settled(watcher)
        watcher.kill()
        watcher.communicate()
        child.communicate()
        assert child.returncode == 0
