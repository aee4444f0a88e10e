"""Taking replicas that keep failing out of routing: a circuit breaker for each (Nygard, Release It!, 2007).

Failing is fast, so a replica that fails everything looks idle and would draw all requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Literal

RETRY_SECONDS = 0.5  # before the second retry of a request, twice as long before each further one
FAILURES = 3  # of a replica in a row after which its circuit opens
FIRST_SECONDS, LONGEST_SECONDS = 5.0, 60.0  # that a circuit is open; twice as long after each trial that fails

Outcome = Literal["ok", "failed", "none"]
"""Of an attempt: a whole answer; the replica's fault; or neither, as it was full, or its client left."""


@dataclass(slots=True)
class _Circuit:
    """A replica that has failed since its last success; open from `FAILURES` on."""

    failures: int = 0
    wait: float = 0.0  # seconds; 0 while it is closed
    until: float = 0.0  # then a trial may go there
    trial: Hashable | None = None  # the request that tries it


class Breaker:
    """The circuits of all replicas, as one router sees them. `clock` is in seconds.

    A circuit opens after several failures in a row, is half open after a while, when one request tries the replica,
    and then closes, or opens for twice as long. Without failures it holds nothing.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._circuits: dict[str, _Circuit] = {}

    def __len__(self) -> int:
        """Count the replicas that have failed since their last success."""
        return len(self._circuits)

    def shut(self) -> set[str]:
        """Return the replicas that take no request now."""
        now = self._clock()
        return {name for name, circuit in self._circuits.items() if circuit.wait and now < circuit.until}

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all replicas but these: others are gone, though attempts that were there may end after them."""
        self._circuits = {name: circuit for name, circuit in self._circuits.items() if name in replicas}

    def taking(self, replicas: Iterable[str]) -> list[str]:
        """Return those of the replicas that take requests now, or one as a trial. Any thread may ask."""
        circuits, now = self._circuits.copy(), self._clock()
        return [name for name in replicas if name not in circuits or now >= circuits[name].until]

    def sent(self, request: Hashable, replica: str) -> None:
        """Note where a request goes: of a circuit that is half open it is the trial.

        No other follows before it has ended, or for as long as the circuit was open: its end may never be told.
        """
        circuit = self._circuits.get(replica)
        if circuit is not None and circuit.wait and (now := self._clock()) >= circuit.until:
            circuit.trial, circuit.until = request, now + circuit.wait

    def ended(self, request: Hashable, replica: str | None, outcome: Outcome) -> None:
        """Take the end of an attempt into account; `replica` is where it was, None if it came to none."""
        for name, circuit in self._circuits.items():
            if circuit.trial == request and (name != replica or outcome == "none"):  # it tells nothing of that one
                circuit.trial, circuit.until = None, self._clock()
        if replica is None or outcome == "none":
            return
        if outcome == "ok":
            self._circuits.pop(replica, None)
            return
        circuit = self._circuits.setdefault(replica, _Circuit())
        circuit.failures += 1
        if circuit.wait:
            if circuit.trial == request:
                self._open(circuit, min(2 * circuit.wait, LONGEST_SECONDS))
        elif circuit.failures >= FAILURES:
            self._open(circuit, FIRST_SECONDS)

    def _open(self, circuit: _Circuit, seconds: float) -> None:
        circuit.wait, circuit.until, circuit.trial = seconds, self._clock() + seconds, None


def retry_pause(failures: int) -> float:
    """Return the seconds until a request is sent again: 0 after its first failure, for another replica may be well."""
    return RETRY_SECONDS * 2.0 ** (failures - 2) if failures > 1 else 0.0
