"""Alarms ring as SimPy's events would happen: by time, then by priority, then in the order they were set."""

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from warmkv.simulator.cluster.clock import FIRST, LATE, Alarm, Clock

ENTRIES = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.sampled_from([FIRST, LATE]), st.booleans()))


@given(ENTRIES)
def test_alarms_and_events_happen_in_one_order(entries):
    clock, happened = Clock(), []
    for number, (at, priority, is_alarm) in enumerate(entries):
        if is_alarm:
            clock.set(Alarm(lambda now, number=number: happened.append((now, number))), at, priority)
        else:
            event = clock.event()
            event._ok, event._value = True, None
            event.callbacks.append(lambda _, number=number: happened.append((clock.now, number)))
            clock.schedule(event, priority, at)
    clock.run()
    order = sorted(range(len(entries)), key=lambda number: entries[number][:2])
    assert happened == [(entries[number][0], number) for number in order]


def test_an_alarm_that_is_set_again_rings_once():
    clock, rung = Clock(), []
    alarm = Alarm(rung.append)
    clock.set(alarm, 1.0)
    clock.set(alarm, 3.0)
    clock.set(alarm, 2.0)
    clock.run()
    assert rung == [2.0]
    assert clock.now == 3.0  # when nothing was left


def test_an_alarm_can_be_set_while_it_rings():
    clock, rung = Clock(), []

    def ring(now):
        rung.append(now)
        if now < 3:
            clock.set(alarm, now + 1)

    alarm = Alarm(ring)
    clock.set(alarm, 1.0)
    clock.run()
    assert rung == [1.0, 2.0, 3.0]


def test_a_cancelled_alarm_does_not_ring():
    clock, rung = Clock(), []
    alarm = Alarm(rung.append)
    clock.set(alarm, 1.0)
    alarm.cancel()
    clock.run()
    assert not rung


def test_processes_run_beside_alarms():
    clock, seen = Clock(), []

    def process():
        yield clock.timeout(1.0)
        seen.append(clock.now)
        clock.set(Alarm(seen.append), clock.now + 1)
        yield clock.timeout(2.0)
        seen.append(clock.now)

    clock.process(process())
    clock.run()
    assert seen == [1.0, 2.0, 3.0]


def program(env, waits):
    """Processes that wait, share a resource, wait for each other and fail; a log of the times at which they go on."""
    room, seen = simpy.Resource(env, 2), []

    def waiter(number, seconds):
        with room.request() as place:
            yield place | env.timeout(1.5)
            seen.append((env.now, number, place.triggered))
            yield env.timeout(seconds)
            seen.append((env.now, number))
        return number

    def watcher(processes):
        seen.append((env.now, [*(yield env.all_of(processes)).values()]))
        try:
            yield env.event().fail(ValueError("told"))
        except ValueError as error:
            seen.append((env.now, str(error)))

    processes = [env.process(waiter(number, seconds)) for number, seconds in enumerate(waits)]
    env.process(watcher(processes))
    seen.append(env.peek())
    env.run()
    return [*seen, env.now, env.peek()]


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.5, 2.0, 0.1]), max_size=6))
def test_processes_run_as_under_plain_simpy_and_nothing_private_is_needed(waits):
    clock = Clock()
    for private in ("_queue", "_now", "_eid"):
        delattr(clock, private)
    assert program(clock, waits) == program(simpy.Environment(), waits)


def test_a_failure_that_nobody_catches_ends_the_run():
    clock = Clock()
    clock.event().fail(ValueError("untold"))
    with pytest.raises(ValueError, match="untold"):
        clock.run()
    with pytest.raises(simpy.core.EmptySchedule):
        clock.step()
