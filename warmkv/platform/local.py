"""Running the service on this machine: the Serve document, started on a local Ray."""

from __future__ import annotations

import logging
import os
import random
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from warmkv.config import Config, ConfigError, ModelConfig, parse
from warmkv.faults import UserError
from warmkv.platform.document import serve_document
from warmkv.platform.drain import wait_until_empty
from warmkv.platform.listening import check_listening
from warmkv.platform.operator_key import with_operator
from warmkv.platform.tenants import secret_of_environment
from warmkv.platform.tenants_file import Tenants
from warmkv.replicas.loading.adapters import check_adapter
from warmkv.replicas.loading.tokenizer import model_path

PORTS = range(20_000, 32_768)  # above those of Ray's workers, below those that Linux gives to whoever names none

NEEDED = {"gcs_server", "raylet"}  # processes without which Ray does not go on
ENDED_SECONDS = 0.5  # between two looks whether one of them has ended
SPARE_SECONDS = 10.0  # for Serve to see that parts which it has stopped, or killed, are gone


class StartError(UserError):
    """A service that cannot start on this machine or with these settings; the message says why."""


@dataclass(frozen=True, slots=True)
class Running:
    """A service that answers, and a key with which its operator endpoints may be called."""

    url: str
    port: int
    document: dict[str, Any]
    operator_key: str = field(repr=False)


def free_port(host: str) -> int:
    """Find a free port outside the ranges that Ray's workers and the system choose from.

    Raises OSError if there is none.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with suppress(OSError):
            check_port(host, port)
            return port
    raise OSError(f"no port of {host} from {PORTS[0]} to {PORTS[-1]} is free")


def check_port(host: str, port: int, named: str = "gateway.host, gateway.port") -> None:
    """Raise OSError if the address, which the settings `named` give, cannot be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(f"{host}:{port} ({named}): {error.strerror}; 0 takes a free port") from None


def check_metrics_port(port: int) -> None:
    """Raise OSError if Ray cannot show metrics at a port; Ray itself says after half a minute that it is late."""
    check_port("0.0.0.0", port, "--metrics-port")


def check_model(model: ModelConfig) -> None:
    """Raise FileNotFoundError for a path without a model and for a name that the hub does not have.

    Loading checks the rest. Raises AdapterError for a folder with an adapter.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import RemoteEntryNotFoundError
    from huggingface_hub.utils import HFValidationError, validate_repo_id  # type: ignore[attr-defined]

    path = Path(model.path)
    check_adapter(path)
    if (path.is_absolute() or path.exists() or model.path.startswith(".")) and not (path / "config.json").exists():
        raise FileNotFoundError(f"no config.json in {model.path} (model.path)")
    if not path.exists():
        try:
            validate_repo_id(model.path)
        except HFValidationError:
            raise FileNotFoundError(f"{model.path} is neither a folder nor a hub name (model.path)") from None
        cached = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
        if not (Path(model_path(model)).exists() or isinstance(cached, str)):
            try:  # here, since a replica would try for minutes
                hf_hub_download(model.path, "config.json", revision=model.revision)
            except RemoteEntryNotFoundError:  # it is there, and loading tells what it is instead of a model
                return
            except OSError as error:
                why = (str(error).splitlines() or [type(error).__name__])[0]
                raise FileNotFoundError(f"{model.path} (model.path) cannot be had from the hub: {why}") from None


def check_access_log(path: Path) -> None:
    """Raise OSError if lines cannot be appended to a file. It is made where it is missing, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("a").close()


def with_port(config: Config) -> Config:
    """Replace port 0 by a free one. Raises OSError where the port is taken."""
    gateway = config.gateway
    if gateway.port == 0:
        return config.model_copy(update={"gateway": gateway.model_copy(update={"port": free_port(gateway.host)})})
    check_port(gateway.host, gateway.port)
    return config


def start_ray(config: Config, metrics_port: int = 0) -> None:
    """Start a local Ray with room for the replicas, whatever the number of cores; it ends with this process.

    Prometheus finds metrics at the port, or at a free one where it is 0.

    Raises StartError where it does not start, or has fewer GPUs than are asked for.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # workers see GPUs as the machine shows them
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")  # one that hangs cannot drain
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # Ray's 5 are too few on a busy machine
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 leaves replicas the time that all others leave
    if "RAY_AUTH_MODE" not in os.environ and "ray" not in sys.modules:  # Ray reads these when it is imported
        # Nobody else on the machine may join or command this cluster.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    import ray

    clusters = [group.cluster for group in config.groups().values()]
    cpus = sum(cluster.most_replicas * cluster.cpus_per_replica for cluster in clusters)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address="local",
            namespace="serve",
            num_cpus=max(os.cpu_count() or 1, int(cpus) + 1),
            include_dashboard=False,
            logging_level=logging.WARNING,
            log_to_driver=False,
            _metrics_export_port=metrics_port or None,
        )
    except Exception as error:  # as Ray says it where a node is not there in time
        ray.shutdown()
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise StartError(
            f"Ray did not start: {why} On a busy machine try again; its logs are in {ray_logs()}"
        ) from error
    except SystemExit:  # by its own handler of SIGTERM
        ray.shutdown()
        raise KeyboardInterrupt from None
    finally:
        if (
            threading.current_thread() is threading.main_thread()
        ):  # only there Ray handles it, with a stack and an abort
            signal.signal(signal.SIGTERM, on_sigterm)
    wanted = sum(cluster.replicas * cluster.gpus_per_replica for cluster in clusters)
    found = ray.cluster_resources().get("GPU", 0)
    if wanted > found:
        ray.shutdown()
        raise StartError(f"{wanted:g} GPUs are asked for (cluster.gpus_per_replica), this machine has {found:g}")


def ray_logs() -> Path:
    """Return the folder of the logs of this machine's latest Ray."""
    return Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "session_latest" / "logs"


def metrics_addresses() -> list[str]:
    """Return where the nodes of the cluster that this process belongs to show their metrics to Prometheus."""
    import ray

    return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]


def start_document(document: dict[str, Any]) -> None:
    """Start every application of a Serve document on the Ray this process is connected to, and wait until it answers.

    Raises StartError if an application cannot be deployed, ConfigError if it would be open to other machines.
    """
    from ray import serve

    for application in document["applications"]:
        check_listening(parse(application.get("args", {})).gateway, document["http_options"]["host"])

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location=document["proxy_location"], http_options=document["http_options"])
    for application in document["applications"]:
        module, _, builder = application["import_path"].partition(":")
        build = getattr(import_module(module), builder)
        name = application["name"]
        try:
            serve.run(build(application.get("args", {})), name=name, route_prefix=application["route_prefix"])
        except RuntimeError as error:
            status = serve.status().applications.get(name)
            reasons = [one.message for one in status.deployments.values() if one.message] if status else []
            raise StartError(told_start(str(error), reasons)) from None


def told_start(failure: str, reasons: Sequence[str]) -> str:
    """Return why Serve could not start an application, without tracebacks where users can mend it."""
    mendable = [why for reason in reasons if (why := _user_error(reason))]
    if reasons and len(mendable) == len(reasons):
        return "a replica cannot start: " + "; ".join(dict.fromkeys(mendable))
    return "\n".join([failure, *reasons])


def _user_error(reason: str) -> str:
    """Return the message of a UserError at the end of a traceback; empty for anything else."""
    found = re.fullmatch(r"(warmkv[\w.]*)\.(\w+): (.+)", (reason.strip().splitlines() or [""])[-1])
    if found is None:
        return ""
    module, name, message = found.groups()
    try:
        raised = getattr(import_module(module), name, None)
    except ImportError:  # a class within a class
        return ""
    return message if isinstance(raised, type) and issubclass(raised, UserError) else ""


def memory_plans(config: Config, seconds: float) -> list[str]:
    """Return a line for the memory plan of every replica that serves, as they report them.

    Waits `seconds` for the first report of all of them, then takes those that came. Ray must have been started.
    """
    import ray

    from warmkv.platform.named_actors import NAMESPACE
    from warmkv.platform.prefix_directory import directory_name

    until = time.monotonic() + seconds
    while True:
        plans: list[str] = []
        with suppress(ValueError, ray.exceptions.RayError):  # the directory restarts, or is busy
            directory = ray.get_actor(directory_name(config.cluster.application), namespace=NAMESPACE)
            replicas = ray.get(directory.status.remote(), timeout=1)["replicas"].values()
            plans = [known["memory"]["summary"] for known in replicas if "memory" in known]
        if len(plans) >= config.first_replicas or time.monotonic() > until:
            return plans
        time.sleep(0.05)


def live_config_fault(config: Config) -> str:
    """Return why the kept version of the live configuration is not in force; `` where it is. Ray must be started."""
    import ray

    from warmkv.platform.control import control_name
    from warmkv.platform.live_config import in_force
    from warmkv.platform.named_actors import NAMESPACE

    with suppress(ValueError, ray.exceptions.RayError):  # it restarts, or is busy
        control = ray.get_actor(control_name(config.cluster.application), namespace=NAMESPACE)
        status = ray.get(control.status.remote(), timeout=5)
        try:
            in_force(config, status["current"])
        except ConfigError as error:
            return str(error)
        return str(status["fault"] or "")
    return ""


@contextmanager
def watching(config: Config, say: Callable[[str], None]) -> Iterator[None]:
    """Tell `say` meanwhile what the replicas do until they serve. Ray must have been started."""
    ended = threading.Event()

    def watch() -> None:
        import ray

        from warmkv.platform.named_actors import NAMESPACE
        from warmkv.platform.prefix_directory import directory_name

        while not ended.wait(0.5):
            with suppress(ValueError, ray.exceptions.RayError):  # the directory has not begun yet, or is busy
                directory = ray.get_actor(directory_name(config.cluster.application), namespace=NAMESPACE)
                replicas = ray.get(directory.status.remote(), timeout=1)["replicas"]
                phases = Counter(replica["phase"] for replica in replicas.values() if "phase" in replica)
                if phases:
                    say(", ".join(f"{count} replica(s) {phase}" for phase, count in phases.items()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def running(
    config: Config, say: Callable[[str], None] = lambda what: None, *, metrics_port: int = 0
) -> Iterator[Running]:
    """Run the service on a local Ray of its own and stop it at the end. `say` is told how the start goes on.

    Raises OSError where a port is taken, the model folder missing or the log not writable, ConfigError where it
    would be open to other machines or the tenants file cannot be taken, PackError for a pack that cannot be used,
    StartError where a replica cannot start.
    """
    check_listening(config.gateway)
    Tenants(config.gateway, b"", lambda outcome: None)  # whose faults would come from a gateway otherwise, much later
    check_model(config.model)
    for group in config.groups().values():
        if group.prefix_cache.enabled and group.prefix_cache.packs:
            from warmkv.platform.packs import check_packs

            check_packs(group.prefix_cache.packs, group, secret_of_environment())
    if config.gateway.access_log:
        check_access_log(config.gateway.access_log)
    config = with_port(config)
    check_metrics_port(metrics_port)
    operator_key = secrets.token_urlsafe(32)
    gateway = with_operator(config.gateway, operator_key)
    document = serve_document(config.model_copy(update={"gateway": gateway}))
    document["proxy_location"] = "Disabled"  # on one machine, gateways listen by themselves
    start_ray(config, metrics_port)
    import ray

    try:
        with watching(config, say):
            start_document(document)
        host = "127.0.0.1" if gateway.host == "0.0.0.0" else gateway.host
        url = f"http://{host}:{gateway.port}{gateway.route_prefix.rstrip('/')}"
        yield Running(url, gateway.port, document, operator_key)
    finally:
        deleting = threading.Thread(target=delete, args=(config,), daemon=True)
        deleting.start()
        try:
            while deleting.is_alive() and ended_part() is None:  # Serve waits for a Ray that is gone
                deleting.join(ENDED_SECONDS)
        finally:  # also where a second signal interrupts it
            ray.shutdown()


def delete(config: Config) -> None:
    """Have Serve stop the application, and wait until it has, for as long as its parts may take."""
    from ray import serve

    name, seconds = config.cluster.application, config.cluster.stop_seconds + SPARE_SECONDS
    with suppress(Exception):  # it may never have been deployed
        serve.delete(name, _blocking=False)  # Serve itself would wait for a minute, whatever the settings are
        wait_until_empty(
            lambda: [one for one in serve.status().applications if one == name], seconds, time.monotonic, time.sleep
        )


def ended_part() -> str | None:
    """Return the name of a process that this machine's Ray needs and that has ended by itself; None if all run."""
    from ray._private import worker

    node = worker._global_node
    ended = {name for name, _ in node.dead_processes()} & NEEDED if node else set()
    return min(ended, default=None)
