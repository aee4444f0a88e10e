"""Points of a sweep on an existing Ray cluster. The only file of the simulator that imports Ray."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray
from ray.util import ActorPool

from warmkv.faults import UserError
from warmkv.simulator.studies.sweeps.figures import Figures
from warmkv.simulator.studies.sweeps.replays import Replays
from warmkv.simulator.studies.sweeps.sweep import Runner, SweepTask
from warmkv.simulator.studies.sweeps.sweep_folder import SweepError
from warmkv.simulator.workload.requests import Requests

PATIENCE = 10.0  # seconds that a CPU may take to become free: that of an actor that just ended does not at once


class Worker:
    """Holds the requests, so that they are sent to it once."""

    def __init__(self, requests: Requests) -> None:
        self._replays = Replays(requests)

    def run(self, number: int, task: SweepTask) -> tuple[int, Figures]:
        return number, self._replays.figures(task)


@contextmanager
def on_ray(requests: Requests, workers: int) -> Iterator[Runner]:
    """Run in actors of one CPU each: `workers`, or fewer if the cluster has fewer free CPUs.

    The cluster is the one that `RAY_ADDRESS` names or that runs on this machine. Raises SweepError if there is none.
    """
    if not ray.is_initialized():
        try:
            ray.init("auto", log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise SweepError(f"--ray: no Ray cluster to connect to: {str(error).splitlines()[0]}") from None
    free = _free_cpus()
    shared = ray.put(requests)
    actor = ray.remote(num_cpus=1)(Worker)
    actors = [actor.remote(shared) for _ in range(min(workers, free))]

    def run(tasks: Sequence[SweepTask]) -> Iterator[tuple[SweepTask, Figures]]:
        try:
            submit = lambda one, item: one.run.remote(*item)  # noqa: E731
            for number, result in ActorPool(actors).map_unordered(submit, list(enumerate(tasks))):
                yield tasks[number], result
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, UserError):
                raise
            raise SweepError(str(error.cause)) from None
        except ray.exceptions.RayError as error:
            raise SweepError(f"--ray: {str(error).splitlines()[0]}") from None

    try:
        yield run
    finally:
        for one in actors:
            ray.kill(one)


def _free_cpus() -> int:
    """Wait for a free CPU of the cluster. Raises SweepError if none comes free in time."""
    until = time.monotonic() + PATIENCE
    while not (free := int(ray.available_resources().get("CPU", 0))):
        if time.monotonic() > until:
            raise SweepError("--ray: the cluster has no free CPU")
        time.sleep(0.1)
    return free
