"""One pool of blocks against vLLM's rules stepped token by token, with lists and nothing else."""

import dataclasses
import math
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import EXACT
from warmkv.simulator.engine.block_pool import BlockPool
from warmkv.simulator.engine.formation import NEVER
from warmkv.simulator.engine.limits import Limits
from warmkv.simulator.engine.mixed import MixedBudget
from warmkv.simulator.latency.server import ServedRequest, Server
from warmkv.simulator.steps.costs import PhaseCosts

LIMITS = [
    Limits(4, 16, kv_tokens=80, kv_block=4),
    Limits(6, 7, kv_tokens=72, kv_block=1),
    Limits(3, 64, kv_tokens=64, kv_block=8),
    Limits(8, 32, kv_tokens=400, kv_block=4),
]


@dataclasses.dataclass(slots=True, eq=False)
class Asked(ServedRequest):
    """A request whose first tokens are those of a conversation; `continues` tells whether its answer is, too."""

    conversation: int = 0
    shared: int = 0  # of the prompt
    continues: bool = False

    def names(self, size):
        known = self.prompt + self.output if self.continues and self.shared == self.prompt else self.shared
        own = range(known // size, self.prompt // size)
        return [*((self.conversation, at) for at in range(known // size)), *((id(self), at) for at in own)]


requests = st.lists(
    st.builds(
        lambda gap, conversation, prompt, output, private, continues, tenant: (gap, (prompt + private, output), {
            "conversation": conversation, "shared": prompt, "continues": continues, "tenant": tenant,
        }),
        st.sampled_from([0.0, 0.0, 2**-7, 2**-5, 0.25, 4.0]),
        st.integers(0, 2),
        st.integers(1, 24),
        st.integers(1, 30),
        st.sampled_from([0, 0, 5]),
        st.booleans(),
        st.sampled_from("aaab"),
    ),
    min_size=1,
    max_size=14,
)  # fmt: skip


def asked(rows):
    arrival, made = 0.0, []
    for gap, lengths, content in rows:
        arrival += gap
        made.append(Asked(arrival, *lengths, **content))
    return made


class Pooled(Server):
    """A server that finds prefixes in its pool."""

    def __init__(self, limits, fast_forward=True):
        super().__init__(EXACT, limits)
        self.evicted, self.found = [], []
        self.pool = BlockPool(
            limits.blocks, limits.kv_block, lambda one: one.names(limits.kv_block), self.evicted.append
        )
        self.engine = MixedBudget(
            self, self._waiting, self._wakes.append, fast_forward,
            limits=limits, costs=PhaseCosts(EXACT, EXACT), pool=self.pool,
        )  # fmt: skip

    def begin(self, request, now):
        if request.scheduled == NEVER:
            request.scheduled = now
        request.computed = self.pool.found(request)
        self.found.append((request, request.computed))
        return 0.0


def outcome(made, server):
    """Return times, what was found at each admission, and what was evicted in order, by numbers of requests."""
    numbers = {id(one): number for number, one in enumerate(made)}
    times = [(one.scheduled, one.first, one.finished, one.num_preemptions) for one in made]
    found = [(numbers[id(one)], tokens) for one, tokens in server.found]
    return times, found, [readable(name, numbers) for name in server.evicted]


def readable(name, numbers):
    whose = name[0] if isinstance(name[0], int) else id(name[0])
    return numbers.get(whose, f"conversation {whose}"), name[1]


def serve(rows, limits, fast_forward=True):
    made, server = asked(rows), Pooled(limits, fast_forward)
    server.serve(made)
    return outcome(made, server), server


class Priorities:
    """Whose request is next: where it begins if its tenant's follow one another, each as long as its tokens."""

    def __init__(self):
        self.begins, self.ends, self.passed = {}, {}, 0

    def arrive(self, one, waiting):
        self.begins[one] = max(self.passed, self.ends.get(one.tenant, 0))
        self.ends[one.tenant] = self.begins[one] + one.prompt + one.output
        waiting.append(one)

    def begin(self, one, waiting):
        waiting.remove(one)
        self.passed = max(self.passed, self.begins[one])
        if not waiting:
            self.passed, self.ends = max([self.passed, *self.ends.values()]), {}


class Lists:
    """vLLM's pool read aloud: a list of free blocks, each with the content that it had, taken from the front."""

    def __init__(self, limits):
        self.size = limits.kv_block
        self.free = list(range(limits.blocks))
        self.content, self.users = dict.fromkeys(self.free), dict.fromkeys(self.free, 0)
        self.cached = defaultdict(list)  # blocks by content, the first one is found
        self.tables, self.evicted = defaultdict(list), []
        self.to_compute = {}  # tokens of a request that was admitted again: its prompt, and what it had drawn before

    def hits(self, one, drawn):
        names, found = [*one.names(self.size)], []
        names += [(one, at) for at in range(len(names), math.ceil((one.prompt + drawn) / self.size))]
        for name in names[: (one.prompt + drawn - 1) // self.size]:
            if not self.cached[name]:
                break
            found.append(self.cached[name][0])
        return found

    def touch(self, one, blocks):
        for block in blocks:
            if not self.users[block]:
                self.free.remove(block)
            self.users[block] += 1
        self.tables[one] = list(blocks)

    def grab(self, one, tokens):
        more = math.ceil(tokens / self.size) - len(self.tables[one])
        if more > len(self.free):
            return False
        for _ in range(more):
            block = self.free.pop(0)
            if self.content[block] is not None:
                name, self.content[block] = self.content[block], None
                self.cached[name].remove(block)
                if not self.cached[name]:
                    self.evicted.append(name)
            self.users[block] = 1
            self.tables[one].append(block)
        self.name(one, min(tokens, self.to_compute.get(one, one.prompt)))
        return True

    def name(self, one, tokens):
        """Name what is full. Of what is drawn that is done when it ends: nobody asks for it before."""
        names = one.names(self.size)
        for at, block in enumerate(self.tables[one][: tokens // self.size]):
            if self.content[block] is None:
                self.content[block] = names[at] if at < len(names) else (one, at)
                self.cached[self.content[block]].append(block)

    def release(self, one, computed):
        self.name(one, computed)
        for block in reversed(self.tables.pop(one)):
            self.users[block] -= 1
            if not self.users[block] and self.content[block] is None:
                self.free.insert(0, block)
            elif not self.users[block]:
                self.free.append(block)


def obvious(made, limits):
    coming, waiting, running, now = list(made), [], [], 0.0
    pool, computed, drawn, found = Lists(limits), defaultdict(int), defaultdict(int), []
    queue, order = Priorities(), {one: number for number, one in enumerate(made)}
    times = {one: [NEVER, NEVER, NEVER, 0] for one in made}
    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, coming[0].arrival)
        while coming and coming[0].arrival <= now:
            queue.arrive(coming.pop(0), waiting)
        budget, work, preempted = limits.max_batched_tokens, {}, False
        for one in list(running):
            if one not in running:
                continue
            chunk = min(budget, one.prompt + drawn[one] - computed[one])
            while not pool.grab(one, computed[one] + chunk):
                victim = running.pop()
                pool.release(victim, computed[victim])
                computed[victim] = 0
                times[victim][3] += 1
                waiting.append(victim)
                preempted = True
                if victim is one:
                    break
            if one in running:
                work[one], budget = chunk, budget - chunk
        while waiting and not preempted and budget and len(running) < limits.max_num_seqs:
            one = min(waiting, key=lambda one: (queue.begins[one], order[one]))
            target, hits = one.prompt + drawn[one], pool.hits(one, drawn[one])
            evictable = sum(not pool.users[block] for block in hits)
            if math.ceil(target / pool.size) - len(hits) + evictable > len(pool.free):
                break
            queue.begin(one, waiting)
            running.append(one)
            if times[one][0] == NEVER:
                times[one][0] = now
            pool.touch(one, hits)
            pool.to_compute[one] = target
            computed[one] = len(hits) * pool.size
            found.append((one, computed[one]))
            chunk = min(budget, target - computed[one])
            assert pool.grab(one, computed[one] + chunk)
            work[one], budget = chunk, budget - chunk
        for one, chunk in work.items():
            computed[one] += chunk
        now += EXACT.seconds(sum(work.values()), sum(computed[one] for one in work))
        for one in work:
            if computed[one] == one.prompt + drawn[one]:
                drawn[one] += 1
                if times[one][1] == NEVER:
                    times[one][1] = now
                if drawn[one] == one.output:
                    times[one][2] = now
                    running.remove(one)
                    pool.release(one, computed[one])
    numbers = {id(one): number for number, one in enumerate(made)}
    return (
        [tuple(times[one]) for one in made],
        [(numbers[id(one)], tokens) for one, tokens in found],
        [readable(name, numbers) for name in pool.evicted],
    )


@given(requests, st.sampled_from(LIMITS))
def test_the_pool_equals_an_obvious_one(rows, limits):
    assert serve(rows, limits)[0] == obvious(asked(rows), limits)


@given(requests, st.sampled_from(LIMITS))
def test_fast_forward_equals_stepping_and_nothing_is_left(rows, limits):
    fast, server = serve(rows, limits)
    assert fast == serve(rows, limits, fast_forward=False)[0]
    pool = server.pool
    assert pool.free == limits.blocks == pool._empty + len(pool._released)
    assert pool._tables == {}
    assert sum(map(len, pool._copies.values())) == len(pool._released)


def test_what_a_prompt_may_find_by_hand():
    """Of 9 tokens both full blocks of 4, of 8 only the first, since the last token is computed."""
    limits = Limits(1, 64, kv_tokens=80, kv_block=4)
    for prompt, found in ((9, 8), (8, 4), (4, 0)):
        rows = [(4.0, (prompt, 1), {"shared": prompt})] * 2
        assert serve(rows, limits)[0][1] == [(0, 0), (1, found)]


def test_an_answer_is_found_where_the_next_prompt_goes_on_with_it():
    """6 tokens and an answer of 7, of which the last has no KV: three full blocks."""
    limits = Limits(1, 64, kv_tokens=80, kv_block=4)
    turns = [(4.0, (6, 7), {"shared": 6, "continues": True}), (4.0, (20, 1), {"shared": 20})]
    assert serve(turns, limits)[0][1] == [(0, 0), (1, 12)]


def test_a_running_batch_takes_the_blocks_that_were_released_first_the_last_of_each_first():
    """5 blocks of 4: a prompt of 8 leaves two contents; the next one finds the first and evicts the other."""
    limits = Limits(1, 64, kv_tokens=20, kv_block=4)
    rows = [(4.0, (8, 1), {"shared": 8}), (4.0, (16, 4), {"shared": 6}), (4.0, (8, 1), {"shared": 8})]
    (_, found, evicted), _ = serve(rows, limits)
    assert found == [(0, 0), (1, 4), (2, 4)]
    assert evicted[0] == ("conversation 0", 1)


def test_what_is_filled_is_found_and_what_does_not_fit_is_evicted():
    limits = Limits(1, 64, kv_tokens=12, kv_block=4)
    server = Pooled(limits)
    server.pool.fill([(0, 3), (0, 2), (0, 1), (0, 0)])
    server.serve(asked([(4.0, (12, 1), {"shared": 12})]))
    assert [tokens for _, tokens in server.found] == [8]
    assert server.evicted[0] == (0, 3)
