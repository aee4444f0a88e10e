"""Who is billed as a writer, against the definition: a prefix is readable from the beginning of its first answer on."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from warmkv.prefixes.record import Candidate
from warmkv.prefixes.writers import Writers

PROMPTS = st.text("ab", min_size=1, max_size=4)  # a letter is a block, marked at its end


@dataclass
class Request:
    prompt: str
    replica: str
    arrival: float

    @property
    def reads(self) -> list[Candidate]:
        return [Candidate(at, self.prompt[:at].encode()) for at in range(len(self.prompt), 0, -1)]

    @property
    def marks(self) -> list[Candidate]:
        return self.reads[::-1]


@dataclass
class World:
    """Replicas that never forget, and when each of their prefixes became readable."""

    since: dict[tuple[str, bytes], float] = field(default_factory=dict)

    def highest(self, request: Request, before: float) -> int:
        times = [(read.position, self.since.get((request.replica, read.key))) for read in request.reads]
        return max((at for at, since in times if since is not None and since <= before), default=0)


@given(st.lists(st.tuples(st.booleans(), PROMPTS, st.sampled_from("xy"), st.integers(0, 9)), max_size=40))
def test_a_request_reads_what_was_readable_when_it_arrived(steps):
    """A step lets a request arrive, or one of those that wait begin or, rarely, leave."""
    writers, world, waiting, now = Writers(), World(), {}, 0.0
    for number, (arrives, prompt, replica, choice) in enumerate(steps):
        now += 1
        if arrives or not waiting:
            writers.arrived(str(number), now)
            waiting[str(number)] = Request(prompt, replica, now)
            continue
        name = sorted(waiting)[choice % len(waiting)]
        request = waiting.pop(name)
        if choice == 9:
            writers.left(name)
            continue
        hit = world.highest(request, now)
        written = len(request.prompt)
        billed = writers.began(name, request.replica, request.reads, request.marks, hit, written, now)
        assert billed == world.highest(request, request.arrival)
        for mark in request.marks:
            world.since.setdefault((request.replica, mark.key), now)
    for name in waiting:
        writers.left(name)
    assert len(writers) == 0


def test_what_memory_did_not_suffice_for_is_not_born():
    writers, first, second = Writers(), Request("ab", "x", 1), Request("ab", "x", 2)
    writers.arrived("1", 1)
    writers.arrived("2", 2)
    assert writers.began("1", "x", first.reads, first.marks, 0, 1, 3) == 0
    assert writers.began("2", "x", second.reads, second.marks, 1, 2, 4) == 0
    assert len(writers) == 0


def test_where_nothing_is_known_of_an_earlier_write_the_replica_is_believed():
    request = Request("ab", "x", 1)
    assert Writers().began("never arrived", "x", request.reads, request.marks, 2, 2, 1) == 2


def test_a_candidate_of_the_writer_that_the_reader_does_not_have_is_no_hit():
    writers, writer = Writers(), Request("abc", "x", 1)
    writers.arrived("early", 0)
    writers.arrived("writer", 1)
    assert writers.began("writer", "x", writer.reads, writer.marks, 2, 3, 2) == 2  # "ab" had long been there
    reads = [Candidate(3, b"abc"), Candidate(1, b"a")]
    assert writers.began("early", "x", reads, [Candidate(3, b"abc")], 3, 3, 3) == 0
