from hypothesis import given
from hypothesis import strategies as st

from warmkv.policies.fair_queue import FairQueue

WORK = st.integers(1, 100)


@given(st.lists(WORK))
def test_one_tenant_is_served_in_the_order_of_arrival(works):
    queue: FairQueue[int] = FairQueue()
    for number, work in enumerate(works):
        queue.push(number, "only", work)
    assert list(queue) == list(range(len(works))) == [queue.pop() for _ in works]


@given(st.lists(st.tuples(st.sampled_from("abc"), WORK), max_size=60))
def test_backlogged_tenants_get_equal_work_up_to_one_request(requests):
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for tenant, work in requests:
        queue.push((tenant, work), tenant, work)
    served = dict.fromkeys("abc", 0)
    largest = max((work for _, work in requests), default=0)
    left = {tenant: sum(1 for name, _ in requests if name == tenant) for tenant in "abc"}
    while queue:
        waiting = [tenant for tenant in "abc" if left[tenant]]
        assert max(served[t] for t in waiting) - min(served[t] for t in waiting) <= 2 * largest
        tenant, work = queue.pop()
        served[tenant] += work
        left[tenant] -= 1


def test_a_newcomer_waits_for_nobodys_backlog_and_brings_no_credit():
    queue: FairQueue[str] = FairQueue()
    for number in range(20):
        queue.push(f"big {number}", "big", 100)
    for _ in range(5):
        queue.pop()
    queue.push("small 0", "small", 100)
    queue.push("small 1", "small", 100)
    taken = [queue.pop() for _ in range(6)]
    assert taken.index("small 0") <= 1
    assert taken.index("small 1") <= 4
    assert sum(name.startswith("big") for name in taken) == 4


@given(st.lists(st.tuples(st.sampled_from("ab"), WORK), min_size=1), st.data())
def test_what_is_removed_is_never_served(requests, data):
    queue: FairQueue[int] = FairQueue()
    for number, (tenant, work) in enumerate(requests):
        queue.push(number, tenant, work)
    gone = data.draw(st.sampled_from(range(len(requests))))
    assert queue.remove(gone)
    assert not queue.remove(gone)
    assert sorted(queue) == sorted(set(range(len(requests))) - {gone})


def test_tenants_that_come_and_go_leave_nothing_behind():
    queue: FairQueue[int] = FairQueue()
    for number in range(10_000):
        queue.push(number, f"tenant {number}", 5)
        queue.pop()
    assert not queue._finish


@given(st.lists(st.tuples(st.sampled_from("abc"), WORK, st.booleans()), max_size=60))
def test_tags_tell_the_order_and_never_fall_behind_what_was_taken(steps):
    queue: FairQueue[int] = FairQueue()
    tags, taken = {}, (0.0, 0)
    for number, (tenant, work, takes) in enumerate(steps):
        tags[number] = queue.push(number, tenant, work)
        assert tags[number] > taken
        assert list(queue) == sorted(queue, key=tags.__getitem__)
        if takes:
            taken = tags[queue.pop()]


@given(st.integers(0, 500), st.lists(st.tuples(st.sampled_from("abc"), WORK, st.integers(0, 500)), max_size=60))
def test_less_work_of_each_tenant_than_its_delay_and_one_request_passes_a_request(delay, later):
    queue: FairQueue[int] = FairQueue()
    queue.push(-1, "a", 10, delay=delay)
    for number, (tenant, work, its_delay) in enumerate(later):
        queue.push(number, tenant, work, delay=its_delay)
    passed = dict.fromkeys("abc", 0)
    while (number := queue.pop()) >= 0:
        tenant, work, _ = later[number]
        passed[tenant] += work
    assert max(passed.values()) <= delay + max((work for _, work, _ in later), default=0)


@given(st.lists(st.tuples(st.sampled_from("abc"), WORK, st.integers(0, 300)), min_size=1), st.integers(0, 99))
def test_what_tenants_are_charged_does_not_depend_on_delays(requests, takes):
    queue, same = FairQueue[int](), FairQueue[int]()
    for number, (tenant, work, delay) in enumerate(requests):
        queue.push(number, tenant, work, delay=delay)
        same.push(number, tenant, work)
    assert queue._finish == same._finish
    for _ in range(min(takes, len(requests) - 1)):
        same.take(queue.pop())
    assert queue._finish == same._finish


@given(st.lists(st.tuples(st.sampled_from("abc"), WORK), min_size=1), st.data())
def test_who_is_put_back_is_where_it_was_and_not_charged_twice(requests, data):
    queue: FairQueue[int] = FairQueue()
    tags = [queue.push(number, tenant, work) for number, (tenant, work) in enumerate(requests)]
    taken = [queue.pop() for _ in range(data.draw(st.integers(1, len(requests))))]
    rest = list(queue)
    for number in data.draw(st.permutations(taken)):
        queue.put_back(number, requests[number][0], tags[number])
    assert list(queue) == taken + rest
    assert queue.remove(taken[0])
    late = queue.push(-1, "d", 1)
    assert late > tags[taken[-1]]


@given(st.lists(st.tuples(st.sampled_from("abc"), WORK), min_size=1), st.data())
def test_who_passes_others_is_charged_and_changes_nothing_for_them(requests, data):
    queue: FairQueue[int] = FairQueue()
    for number, (tenant, work) in enumerate(requests):
        queue.push(number, tenant, work)
    order = list(queue)
    taken = data.draw(st.sampled_from(order))
    queue.take(taken)
    order.remove(taken)
    assert list(queue) == order
    queue.push(-1, requests[taken][0], 1)  # comes after all that its tenant was given
    mine = [number for number in queue if number < 0 or requests[number][0] == requests[taken][0]]
    assert mine[-1] == -1
