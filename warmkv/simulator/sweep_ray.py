"""Points of a sweep on an existing Ray cluster. The only file of the simulator that imports Ray."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray
from ray.util import ActorPool

from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.figures import Figures
from warmkv.simulator.sweep import Runner, Task, run_task
from warmkv.simulator.sweep_folder import SweepError


class Worker:
    """Holds the requests, so that they are sent to it once."""

    def __init__(self, requests: Sequence[RequestRecord]) -> None:
        self._requests = requests

    def run(self, number: int, task: Task) -> tuple[int, Figures]:
        return number, run_task(self._requests, task)


@contextmanager
def on_ray(requests: Sequence[RequestRecord], workers: int) -> Iterator[Runner]:
    """In actors of one CPU each: `workers`, or fewer if the cluster has fewer free CPUs.

    The cluster is the one that `RAY_ADDRESS` names or that runs on this machine. Raises SweepError if there is none.
    """
    if not ray.is_initialized():
        try:
            ray.init("auto", log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise SweepError(f"--ray: no Ray cluster to connect to: {str(error).splitlines()[0]}") from None
    free = int(ray.available_resources().get("CPU", 0))
    if not free:
        raise SweepError("--ray: the cluster has no free CPU")
    shared = ray.put(tuple(requests))
    actor = ray.remote(num_cpus=1)(Worker)
    actors = [actor.remote(shared) for _ in range(min(workers, free))]

    def run(tasks: Sequence[Task]) -> Iterator[tuple[Task, Figures]]:
        try:
            submit = lambda one, item: one.run.remote(*item)  # noqa: E731
            for number, result in ActorPool(actors).map_unordered(submit, list(enumerate(tasks))):
                yield tasks[number], result
        except ray.exceptions.RayTaskError as error:
            raise SweepError(str(error.cause)) from None
        except ray.exceptions.RayError as error:
            raise SweepError(f"--ray: {str(error).splitlines()[0]}") from None

    try:
        yield run
    finally:
        for one in actors:
            ray.kill(one)
