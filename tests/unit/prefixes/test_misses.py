"""Why a prompt was not read: requests over time of a made-up cache, and what is said of each."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from warmkv.prefixes import breakpoints
from warmkv.prefixes.misses import Asked, Finding, Found, PromptHistory, content_hash, names_of

TTLS = {"5m": 300.0, "1h": 3600.0}


@dataclass
class Cache:
    """Replicas that keep what is written, and a history that is told what they find. Each block has 10 tokens."""

    history: PromptHistory = field(default_factory=PromptHistory)
    now: float = 0.0
    shift: float = 0.0  # of the history's clock
    replica: str = "a"
    stored: dict[tuple[str, bytes], float] = field(default_factory=dict)  # until when

    def ask(
        self,
        said: str,
        marks: str = "",
        *,
        head: int = 0,
        thinking: tuple[int, ...] = (),
        choice: bytes = b"",
        minimum: int = 0,
        automatic: bool = False,
        tenant: bytes = b"t",
    ) -> Finding:
        """Ask with a letter for each block; `marks` are letters of marked ones. Prefixes are keyed by what is shown."""
        ends = [10 * (at + 1) for at in range(len(said))]
        ttls = ["5m" if letter in marks else None for letter in said]
        given = breakpoints.breakpoints(ends, ttls, minimum)
        shown = "".join(letter + "!" * (at in thinking) for at, letter in enumerate(said)).encode()
        keys = {end: shown[: shown.index(said[at].encode()) + 1] + choice for at, end in enumerate(ends)}
        reads = [breakpoints.Candidate(at, keys[at]) for at in breakpoints.read_candidates(ends, given)]
        counted = [breakpoints.Mark(mark.position, mark.ttl, keys[mark.position]) for mark in given]
        warm = [read.position for read in reads if self.stored.get((self.replica, read.key), 0.0) > self.now]
        if automatic:
            warm = [end for end in ends if self.stored.get((self.replica, keys[end]), 0.0) > self.now]
        hit = max(warm, default=0)
        contents = [ord(letter) for letter in said]
        marked = max((end for end, ttl in zip(ends, ttls, strict=True) if ttl), default=0)
        total = 10 * len(said)
        asked = Asked(
            contents, names_of(contents), ends, thinking, head, total + 5, total, counted, reads, marked, 10, automatic
        )
        written = max((mark.position for mark in counted), default=0)
        for key in keys.values() if automatic else (mark.key for mark in counted):
            self.stored[self.replica, key] = self.now + TTLS["5m"]
        found = Found(self.replica, hit, hit, written, self.now + self.shift)
        return self.history.begun(tenant, asked, found, TTLS, TTLS["5m"])


def said(finding: Finding) -> tuple[int, dict[str, int], int | None]:
    return finding.read, dict(finding.missed), finding.block


def test_a_conversation_that_goes_on_misses_what_is_new_alone():
    cache = Cache()
    assert said(cache.ask("abc", "c")) == (0, {"never_written": 30}, 0)
    assert said(cache.ask("abcde", "ce")) == (30, {"never_written": 20}, 3)
    assert said(cache.ask("abcde", "ce")) == (50, {}, None)
    assert cache.ask("abcde", "ce").found_block == 4


def test_what_was_written_and_is_gone():
    cache = Cache()
    cache.ask("abc", "ac")
    cache.now = 301.0
    assert said(cache.ask("abcd", "acd")) == (0, {"expired": 30, "never_written": 10}, 0)
    cache.stored.clear()
    assert said(cache.ask("abcd", "acd")) == (0, {"evicted": 40}, 0)
    cache.replica = "b"
    assert said(cache.ask("abcd", "acd")) == (0, {"other_replica": 40}, 0)
    del cache.stored["b", b"abcd"]
    assert said(cache.ask("abcd", "ad")) == (30, {"evicted": 10}, 3)


def test_a_read_prolongs_what_it_reads():
    cache = Cache()
    cache.ask("abc", "c")
    for now in (200.0, 400.0):
        cache.now = now
        assert said(cache.ask("abc", "c")) == (30, {}, None)
    cache.stored.clear()
    cache.now = 650.0
    assert cache.ask("abc", "c").reason == "evicted"


def test_what_is_changed_is_named():
    cache = Cache()
    cache.ask("TUSabc", "Sc", head=3)
    assert said(cache.ask("TVSabc", "Sc", head=3)) == (0, {"changed": 60}, 1)
    assert said(cache.ask("TVRabc", "Rc", head=3)) == (0, {"changed": 60}, 2)
    assert said(cache.ask("TVRaxc", "Rc", head=3)) == (30, {"changed": 30}, 4)
    assert said(cache.ask("TVRz", "Rz", head=3)) == (30, {"never_written": 10}, 3)
    assert said(cache.ask("XVRaxc", "Rc", head=3)) == (0, {"changed": 60}, 0)
    assert said(cache.ask("TWdef", "Wf", head=2)) == (0, {"changed": 50}, 1)
    assert said(cache.ask("nothing", "g")) == (0, {"never_written": 70}, 0)


def test_marks_that_do_not_count_and_none():
    cache = Cache()
    assert said(cache.ask("abc", "b", minimum=25)) == (0, {"below_minimum": 20}, 1)
    assert said(cache.ask("abc")) == (0, {"unmarked": 35}, 0)


def test_a_write_too_far_before_the_mark():
    cache = Cache()
    text = "abcdefghijklmnopqrstuvwxyz"
    cache.ask("ab", "b")
    assert said(cache.ask(text, "z")) == (0, {"lookback": 20, "never_written": 240}, 0)
    cache = Cache()
    cache.ask("ab", "b")
    assert said(cache.ask(text[:21], "u")) == (20, {"never_written": 190}, 2)


def test_thinking_that_the_template_drops_later_and_another_choice():
    cache = Cache()
    cache.ask("abc", "c", thinking=(1,))
    assert said(cache.ask("abcd", "cd")) == (0, {"thinking": 30, "never_written": 10}, 0)
    assert said(cache.ask("abcd", "cd", choice=b"none")) == (0, {"template": 40}, 0)


def test_prompts_without_marks():
    cache = Cache()
    assert said(cache.ask("abc", automatic=True)) == (0, {"never_written": 30}, 0)
    assert said(cache.ask("abxy", automatic=True)) == (20, {"never_written": 20}, 2)
    cache.replica = "b"
    assert said(cache.ask("abc", automatic=True)) == (0, {"other_replica": 30}, 0)
    cache.now = 1000.0
    assert said(cache.ask("abcd", automatic=True)) == (0, {"expired": 30, "never_written": 10}, 0)


def test_tenants_are_apart_and_can_be_forgotten():
    cache = Cache()
    cache.ask("abc", "c")
    cache.stored.clear()
    assert cache.ask("abc", "c", tenant=b"other").reason == "never_written"
    cache.history.forget(b"t")
    cache.stored.clear()
    assert cache.ask("abc", "c").reason == "never_written"
    for tenant in (b"t", b"other"):
        cache.history.forget(tenant)
    assert cache.history.nbytes == 0


@given(
    st.lists(st.tuples(st.text("abc", min_size=1, max_size=8), st.sampled_from([b"t", b"u"])), max_size=30),
    st.sampled_from([0, 3000, 10**6]),
    st.integers(1, 4),
)
def test_memory_is_bounded_and_tokens_add_up(requests, capacity, conversations):
    cache = Cache(PromptHistory(capacity, conversations))
    for text, tenant in requests:
        finding = cache.ask(text, text[-1], tenant=tenant)
        last = 10 * (text.rindex(text[-1]) + 1)
        assert finding.read + sum(finding.missed.values()) == last
        assert (finding.block is None) == (not finding.missed)
        held = cache.history._tenants.values()
        assert cache.history.nbytes == sum(item.nbytes for own in held for item in own.values()) <= capacity
        assert all(0 < len(own) <= conversations for own in held)


@given(st.lists(st.tuples(st.text("abc", min_size=1, max_size=6), st.booleans(), st.sampled_from("ab")), max_size=20))
def test_gateways_that_tell_each_other_say_what_one_would_say(requests):
    """Their clocks differ; whichever of the two a prompt comes to, and wherever it is computed."""
    one, two = Cache(), Cache()
    gateways, ahead = [PromptHistory(tells=True) for _ in range(2)], 1e6
    for at, (text, second, replica) in enumerate(requests):
        for cache in (one, two):
            cache.now, cache.replica = 100.0 * at, replica
        two.history = gateways[second]
        two.shift = ahead * second
        assert two.ask(text, text[-1]) == one.ask(text, text[-1])
        gateways[not second].learn(gateways[second].news(two.now + two.shift), two.now + ahead * (not second))
    assert gateways[0].nbytes == gateways[1].nbytes == one.history.nbytes


def test_what_was_forgotten_is_not_told():
    cache = Cache(PromptHistory(tells=True))
    for tenant in (b"t", b"u"):
        cache.ask("abc", "c", tenant=tenant)
    cache.history.forget(b"t")
    assert [told.tenant for told in cache.history.news(0.0)] == [b"u"]
    assert cache.history.news(0.0) == []


def test_what_waits_to_be_told_is_bounded(monkeypatch):
    monkeypatch.setattr("warmkv.prefixes.misses.NEWS", 3)
    cache = Cache(PromptHistory(tells=True))
    for text in ("a", "ab", "b", "c", "abc", "d"):
        cache.ask(text, text[-1])
    told = [array("q", news.contents).tolist() for news in cache.history.news(0.0)]
    assert told == [[ord(letter) for letter in text] for text in ("c", "abc", "d")]


@given(st.lists(st.text()), st.lists(st.text()))
def test_contents_are_told_apart(ours, theirs):
    assert (content_hash(*ours) == content_hash(*theirs)) == (ours == theirs)


def test_a_content_has_the_same_hash_in_every_process():
    assert content_hash("user", "", "\ud800 text") == -9072326626500807582
