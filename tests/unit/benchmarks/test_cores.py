"""CPU quotas as the kernel reports them. Skipped where control groups cannot be made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.live.cores import QuotaError, held_to
from tests.polling import until


@pytest.fixture
def process() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        try:
            with held_to(1.0, [started.pid]):
                pass
            yield started.pid
        except QuotaError as error:
            pytest.skip(str(error))
        finally:
            started.kill()


def groups(process: int) -> str:
    return Path(f"/proc/{process}/cgroup").read_text()


def test_a_process_is_held_to_its_share_until_the_end(process: int):
    before = groups(process)
    with held_to(0.25, [process]):
        name = f"warmkv-{os.getpid()}-{process}"
        assert name in groups(process)
        limits = [
            path.read_text().split()
            for path in Path("/sys/fs/cgroup").glob(f"**/{name}/cpu.*")
            if path.name in ("cpu.max", "cpu.cfs_quota_us")
        ]
        assert [limit[0] for limit in limits] == ["2500"]
    assert groups(process) == before
    assert not list(Path("/sys/fs/cgroup").glob(f"**/{name}"))


def test_what_a_process_has_started_is_held_with_it(process: int):
    before = groups(process)
    with subprocess.Popen(["sh", "-c", "cat; :"], stdin=subprocess.PIPE) as shell:
        listed = Path(f"/proc/{shell.pid}/task/{shell.pid}/children")
        child = until(lambda: listed.read_text().split(), "the shell has started its child")[0]
        with held_to(0.25, [shell.pid]):
            assert groups(int(child)) == groups(shell.pid) != before
        assert shell.stdin is not None
        shell.stdin.close()


def test_a_process_that_is_gone_is_told_and_nothing_stays(process: int):
    before = groups(process)
    with pytest.raises(QuotaError, match="no CPU quotas"), held_to(0.25, [process, 2**22 + 1]):
        pytest.fail("it began")
    assert groups(process) == before
    assert not list(Path("/sys/fs/cgroup").glob(f"**/warmkv-{os.getpid()}-*"))
