"""A Ray cluster of several nodes on this machine, each one `ray start`, whose parts can be killed, stopped and cut off.

Whatever belongs to a node carries a mark of its own in its environment, so nothing else on the machine is ever touched.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.network import Network
from tests.polling import PATIENCE, until
from warmkv.platform.local import free_port

MARK = "WARMKV_TEST_NODE"
AGENT = "ray::DashboardAgent"  # the last part of a node that comes up
DIRECTORY, CONTROL = "ray::DirectoryActor", "ray::Control"
REPLICA, GATEWAY = "ray::ServeReplica:warmkv:replica", "ray::ServeReplica:warmkv:gateway"


@dataclass
class Process:
    """A process as /proc shows it."""

    pid: int
    parent: int
    command: list[str]
    environment: dict[str, str]

    @classmethod
    def read(cls, pid: int) -> Process | None:
        try:
            folder = Path(f"/proc/{pid}")
            command = folder.joinpath("cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            pairs = folder.joinpath("environ").read_bytes().decode(errors="replace").split("\0")
            parent = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            return None  # it has ended
        return cls(pid, parent, command, dict(pair.partition("=")[::2] for pair in pairs if "=" in pair))

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def processes() -> list[Process]:
    found = (Process.read(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [process for process in found if process is not None]


@dataclass
class Node:
    """A node of the cluster: the processes of one `ray start`, and what they start."""

    mark: str
    address: str = "127.0.0.1"

    def processes(self) -> list[Process]:
        """Return those with the mark, and their children: a worker that names itself may overwrite its environment."""
        every = processes()
        ours = {process.pid for process in every if process.environment.get(MARK) == self.mark}
        while more := {process.pid for process in every if process.parent in ours} - ours:
            ours |= more
        return [process for process in every if process.pid in ours]

    def find(self, title: str) -> list[Process]:
        return [process for process in self.processes() if process.command[0].startswith(title)]

    def find_program(self, name: str) -> list[Process]:
        return [process for process in self.processes() if process.command[0].endswith(f"/{name}")]

    def kill(self) -> None:
        """As if it lost its power."""
        for process in self.processes():
            process.signal(signal.SIGKILL)


@dataclass
class Cluster:
    """A head and workers, in a network of their own or, where there is none, all at this machine's own address."""

    settings: dict[str, str]
    network: Network | None = None
    port: int = field(default_factory=lambda: free_port("127.0.0.1"))
    nodes: dict[str, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Short, for the sockets in it have a limit of about 100 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="wk", dir="/tmp"))
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "WARMKV_"))},
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "RAY_TMPDIR": str(self.folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_LOG_TO_STDERR": "0",
            "WARMKV_SALT": "salt of the tests",
            "OMP_NUM_THREADS": "1",
            **self.settings,
        }

    @property
    def gcs(self) -> str:
        return f"{self.nodes['head'].address}:{self.port}"

    def within(self, name: str) -> list[str]:
        return self.network.within(name) if self.network else []

    def add(self, name: str, cpus: int) -> None:
        """Start a node; `head` comes first."""
        address = self.network.join(name) if self.network else "127.0.0.1"
        node = Node(f"{name}-{secrets.token_hex(8)}", address)
        self.nodes[name] = node
        if name == "head":  # a second one would find the workers of the first, and think that it still runs
            self.folder.joinpath("ray_current_cluster").unlink(missing_ok=True)
        where = (
            ["--head", f"--port={self.port}", "--include-dashboard=false", "--no-monitor"]
            if name == "head"
            else [f"--address={self.gcs}"]
        )
        command = [
            *self.within(name),
            str(Path(sys.executable).with_name("ray")),
            "start",
            *where,
            f"--node-ip-address={address}",
            f"--num-cpus={cpus}",
            "--num-gpus=0",
            "--include-log-monitor=false",
            f"--object-store-memory={100 << 20}",
            f"--temp-dir={self.folder}",
            "--disable-usage-stats",
        ]
        self._start(command, node, lambda: bool(node.find(AGENT)))

    def _start(
        self,
        command: list[str],
        node: Node,
        is_there: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Start a node: on a busy machine one gives up if its parts do not find each other in time; then again."""
        for attempts_left in (4, 3, 2, 1, 0):
            prepare()
            try:
                self._run(command, node, environment)
                until(lambda: is_there() or not node.find_program("raylet"), "the node is there")
                if node.find_program("raylet"):
                    return
            except AssertionError:
                if not attempts_left:
                    raise
            node.kill()
        raise AssertionError(f"the node {node.mark} ends by itself whenever it is started")

    def add_all(self, cpus: Mapping[str, int]) -> None:
        """Start the nodes of a new cluster, `head` first and then the others at once."""
        self.add("head", cpus["head"])
        others = [name for name in cpus if name != "head"]
        if self.network:
            for name in others:
                self.network.join(name)  # one after the other: each takes the next address
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.add, others, [cpus[name] for name in others]))

    def start(self, document: Path) -> None:
        """Start the applications of a Serve document, by a driver on the head that ends when they answer."""
        self._drive("start", str(document))

    def wait_until_given_up(self, name: str) -> None:
        """Wait until Ray takes a node that cannot be reached for dead."""
        self._drive("given_up", self.nodes[name].address)

    def _drive(self, script: str, argument: str) -> None:
        command = [sys.executable, "-m", f"tests.faults.{script}", self.gcs, argument]
        self._run([*self.within("head"), *command], self.nodes["head"])

    def run(self, name: str, *command: str) -> None:
        """Run a program of this environment on a node, as a hook of its pod would."""
        program = str(Path(sys.executable).with_name(command[0]))
        variables = {**self.environment, "RAY_ADDRESS": self.gcs}  # KubeRay tells every pod
        self._run([*self.within(name), program, *command[1:]], self.nodes[name], variables)

    def _run(self, command: list[str], node: Node, environment: Mapping[str, str] | None = None) -> None:
        done = subprocess.run(
            command,
            env={**(environment or self.environment), MARK: node.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}"

    def find(self, title: str) -> list[Process]:
        return [process for node in self.nodes.values() for process in node.find(title)]

    def remove(self, name: str) -> None:
        self.nodes.pop(name).kill()

    def kill_gcs(self) -> None:
        (self._gcs,) = self.nodes["head"].find_program("gcs_server")
        self._gcs.signal(signal.SIGKILL)

    def start_gcs(self) -> None:
        """Start what `kill_gcs` killed as it was; its state must be in Redis."""
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen(self._gcs.command, env=self._gcs.environment, start_new_session=True, **quiet)

    def stop(self) -> None:
        for node in self.nodes.values():
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def redis(host: str) -> Iterator[str | None]:
    """Yield the address of a Redis of its own, that keeps nothing on disk; None where it is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    port = free_port(host)
    command = [
        program,
        "--port",
        str(port),
        "--bind",
        host,
        "--protected-mode",
        "no",
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"{host}:{port}"
    finally:
        server.kill()
        server.wait()
