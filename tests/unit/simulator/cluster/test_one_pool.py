"""A replica over vLLM in a replay against the service's own ledger, told of every block of an obvious pool."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulator.conversations import BLOCK, EXACT, ROOT, config, record, run
from tests.unit.simulator.engine.test_block_pool import Lists
from warmkv.policies.contents import Contents
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.prefix_tree.held import HeldBlock
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.hashing import block_hashes
from warmkv.replicas.engines.kv_events import BlocksRemoved, BlocksStored
from warmkv.replicas.engines.ledger import PrefixLedger
from warmkv.replicas.protocol import GenerateRequest, SamplingParams
from warmkv.simulator.cluster.cluster import simulate
from warmkv.simulator.cluster.mixed_limits import mixed_limits
from warmkv.simulator.engine.limits import BatchingError
from warmkv.simulator.studies.replays.replay import prepare
from warmkv.simulator.studies.replays.variants import Variant

VLLM = "engine.kind=vllm"
LARGE = ("engine.kv_bytes=8KiB", "prefix_cache.memory_bytes=8KiB")
SMALL = ("engine.kv_bytes=88", "prefix_cache.memory_bytes=48")  # 16 blocks of 4 tokens of 2 bytes, beside one of vLLM's


@dataclass(eq=False)
class Asked:
    """A request, as the lists know it."""

    prompt: int
    said: tuple[int, ...]  # prompt and answer, but for the last token, which has no KV

    def names(self, size):
        return [self.said[: at * size] for at in range(1, len(self.said) // size + 1)]


class Live:
    """vLLM with the ledger over it. One request at a time."""

    def __init__(self, settings, limits):
        self.now, self.pool, self.touched = 0.0, Lists(limits), 0
        self.ledger = PrefixLedger(
            BLOCK, 2, limits.blocks * BLOCK * 2, Lifetimes.of(settings.prefix_cache), lambda: self.now,
            lambda *told: None, settings.prefix_cache.keep_warm,
        )  # fmt: skip
        self.held, self.blocks = set(), limits.blocks

    def tell(self):
        """Publish what came and went."""
        gone, held = set(self.pool.evicted), {name for name, blocks in self.pool.cached.items() if blocks}
        self.ledger.take([BlocksRemoved((repr(name).encode(),)) for name in self.pool.evicted])
        for name in sorted((held - self.held) | (held & gone), key=len):
            parent = repr(name[:-BLOCK]).encode() if len(name) > BLOCK else None
            tokens, salt = name[-BLOCK:], None if parent else ROOT.hex()
            self.ledger.take([BlocksStored((repr(name).encode(),), parent, tokens, BLOCK, salt)])
        self.held = held
        self.pool.evicted.clear()

    def answer(self, job, said):
        request = GenerateRequest(
            job.record.id, said[: job.prompt], job.record.hashes, SamplingParams(job.output), PolicySpec(),
            job.record.marks, job.record.reads, root=ROOT, tenant="t",
        )  # fmt: skip
        one, self.now = Asked(job.prompt, said), job.first
        self.ledger.salt(request)
        hits = self.pool.hits(one, 0)
        self.pool.touch(one, hits)
        assert self.pool.grab(one, job.prompt)
        self.tell()
        reading = self.ledger.began(request, len(hits) * BLOCK, job.submitted)
        if job.output > 1:
            self.touch()
        self.now = job.finished
        assert self.pool.grab(one, len(said))
        self.pool.release(one, len(said))
        self.tell()
        self.touch()
        return reading

    def touch(self):
        """Ask for what is due, as long as something is, as a replica does when it has heard of its cache."""
        while (due := self.ledger.to_touch(1 - len(self.pool.free) / self.blocks)) is not None:
            tokens = due[0].token_ids
            one = Asked(len(tokens), tokens)
            self.pool.touch(one, self.pool.hits(one, 0))
            assert self.pool.grab(one, len(tokens))
            self.pool.release(one, len(tokens))
            self.touched += 1
            self.tell()


@st.composite
def conversations(draw, aligned):
    """Requests that do not overlap, with what each said; many go on with what another said."""
    arrival, records, said = 0.0, [], []
    for number in range(draw(st.integers(1, 12))):
        arrival += draw(st.sampled_from([20.0, 20.0, 100.0, 295.0, 310.0, 3700.0]))
        tokens = list(draw(st.sampled_from(said))) if said and draw(st.booleans()) else []
        tokens = [*tokens, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=18))][:40]
        answer = [9 + number] * draw(st.integers(1, 12))
        whole = (*tokens, *answer[:-1])
        ends = sorted(draw(st.sets(st.integers(1, len(tokens)), max_size=3)))
        ends = sorted({end // BLOCK * BLOCK for end in ends} - {0}) if aligned else ends
        ttls = ["1h" if at < draw(st.integers(0, 1)) else "5m" for at in range(len(ends))]
        one = record(arrival, tokens, len(answer), ends, ttls, name=f"r{number}")
        records.append(replace(one, generated=tuple(block_hashes(whole, BLOCK, ROOT)[len(one.hashes) :])))
        said.append(whole)
    return records, said


@pytest.mark.parametrize("kept", [0, 32, 64])
@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@given(st.data())
def test_a_replay_reads_and_writes_what_the_service_does(sizes, automatic, kept, data):
    """Tails, which are not vLLM's, outlive their blocks in the ledger alone: where some are evicted none are marked."""
    flags = (f"prefix_cache.automatic={str(automatic).lower()}", f"prefix_cache.keep_warm={kept}")
    settings = config(VLLM, *flags, *sizes)
    records, said = data.draw(conversations(aligned=sizes is SMALL))
    jobs, _ = run(records, settings)
    if kept:
        stepped, _ = run(records, settings, fast_forward=False)
        assert [(job.finished, job.reused) for job in stepped] == [(job.finished, job.reused) for job in jobs]
    live = Live(settings, mixed_limits(jobs, settings, 2))
    for job, whole in zip(jobs, said, strict=True):
        reading = live.answer(job, whole)
        assert (job.hit, job.written, job.reused) == (reading.hit, reading.written, reading.cached_tokens)


def test_a_mark_that_is_kept_warm_is_read_after_others_have_filled_the_cache():
    marked = [7] * 8
    others = [record(10.0 * at, [at] * 24, 1) for at in range(1, 12)]
    records = [record(0.0, marked, 4, [8], ["1h"]), *others, record(200.0, [*marked, 5], 1, [8], ["1h"])]
    reused = {}
    for kept in (0, 16):
        jobs, _ = run(records, config(VLLM, f"prefix_cache.keep_warm={kept}", *SMALL))
        reused[kept] = (jobs[-1].reused, jobs[-1].hit)
    assert reused == {0: (0, 0), 16: (8, 8)}
    with pytest.raises(BatchingError, match="must not exceed half of vLLM's cache, which has 136 bytes"):
        run(records, config(VLLM, "prefix_cache.keep_warm=69", *SMALL))


def test_touches_end_with_their_replica():
    marked = [record(0.0, [7] * 8, 4, [8], ["1h"]), *(record(10.0 * at, [at] * 24, 300) for at in range(1, 6))]
    failing = "simulator.failures=[{at: 10.5, replica: 0}, {at: 11.0, replica: 1}]"
    settings = config(VLLM, "prefix_cache.keep_warm=16", "cluster.replicas=2", failing, *LARGE)
    jobs, _ = run(marked, settings)
    assert all(job.replica for job in jobs)


def test_a_replay_of_a_running_service_begins_with_its_blocks_in_their_order():
    """The pool holds 16 blocks: of 18 the last two of the second prompt do not fit, and one more gives way
    to the first prompt, whose last block is computed anew.
    """
    tokens = [list(range(1, 37)), list(range(51, 87))]
    records = [record(1.7e9 + at, one, 1) for at, one in enumerate(tokens)]
    held = [
        HeldBlock(key, before, 8, BLOCK, BLOCK * at, "t", 300.0, 1.7e9 + 300, 0.0, 0.0, 0, 1.7e9, 1.7e9)
        for one in records
        for at, (key, before) in enumerate(zip(one.hashes, (b"", *one.hashes), strict=False), 1)
    ]
    settings = config(VLLM, *SMALL)
    jobs, lifetimes = prepare(records, settings, Variant())
    contents = Contents(1.7e9, {"device": held})
    simulate(jobs, settings, lifetimes, 2, EXACT, held=[contents], begun=1.7e9)
    assert [job.reused for job in jobs] == [32, 24]
