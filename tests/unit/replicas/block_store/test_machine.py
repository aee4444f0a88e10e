"""The store under any order of events: a stateful test, and one long seeded run of it."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.replicas.block_store.harness import Harness, Prompt
from warmkv.replicas.block_store import spill

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=30)
TENANTS = st.sampled_from(["a", "b"])
ORDERS = ["lru", "lfu", "length", "cost"]


def positions(tokens, share):
    return max(1, round(share * len(tokens)))


class StoreMachine(RuleBasedStateMachine):
    """Requests, time, threads and faults in any order."""

    @initialize(
        order=st.sampled_from(ORDERS),
        share=st.sampled_from([0.0, 0.4]),
        automatic=st.booleans(),
        moving=st.sampled_from([0, 1024, 1 << 20]),
    )
    def start(self, order, share, automatic, moving):
        self.folder = Path(tempfile.mkdtemp())
        self.harness = Harness(
            self.folder, eviction=order, tenant_share=share, automatic=automatic, moving_bytes=moving
        )

    def teardown(self):
        if hasattr(self, "harness"):
            self.harness.check_at_rest()
            self.harness.store.close()
            shutil.rmtree(self.folder)

    @rule(seconds=st.sampled_from([0.0, 1.0, 20.0, 40.0, 300.0]))
    def wait(self, seconds):
        self.harness.wait(seconds)

    @rule(tenant=TENANTS, tokens=TOKENS, share=st.floats(0, 1), ttl=st.sampled_from(["5m", "1h", None]))
    def store(self, tenant, tokens, share, ttl):
        self.harness.write(Prompt(tenant, tokens), {positions(tokens, share): ttl} if ttl else {})

    @rule(tenant=TENANTS, tokens=TOKENS, share=st.floats(0, 1))
    def look_up(self, tenant, tokens, share):
        if len(self.harness.held) < 4:
            self.harness.look_up(Prompt(tenant, tokens), [positions(tokens, share)])

    @precondition(lambda self: self.harness.held)
    @rule(at=st.integers(0, 3), store=st.booleans())
    def finish(self, at, store):
        self.harness.finish(at % len(self.harness.held), store)

    @rule(lane=st.sampled_from(["write", "read"]), most=st.sampled_from([1, 3, 100]))
    def run_threads(self, lane, most):
        self.harness.run(lane, most)

    @rule(tenant=TENANTS)
    def drop(self, tenant):
        self.harness.drop(tenant)

    @rule(number=st.integers(0, 10_000), how=st.sampled_from(["flip", "header", "cut"]))
    def damage(self, number, how):
        self.harness.damage(number, how)

    @rule(crash=st.booleans(), spills=st.booleans(), blocks=st.integers(0, 30))
    def restart(self, crash, spills, blocks):
        if spills:
            self.spill(blocks)
        self.harness.restart(crash)

    def spill(self, blocks):
        """Time is over when so many blocks were written."""
        harness = self.harness
        clock, written = harness.store.clock, 0

        def write(seconds):
            nonlocal written
            written += 1
            harness.lanes.run("write", 1)

        harness.store.clock = lambda: clock() + (1e9 if written >= blocks else 0)
        with patch.object(spill, "AT_ONCE", 2):
            spill.spill(harness.store, clock() + 1e8, write)
        harness.store.clock = clock
        harness.check()

    @invariant()
    def all_agrees(self):
        if hasattr(self, "harness"):
            self.harness.check()


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStore = StoreMachine.TestCase


@pytest.mark.parametrize(
    ("order", "steps"),
    [*((order, 1_000) for order in ORDERS), pytest.param("lru", 10_000, marks=pytest.mark.soak(least=0.5))],
)
def test_nothing_is_lost_or_left_over_in_a_long_run(tmp_path, order, steps):
    """Steps of all kinds; faults are rare, so that there is something to lose."""
    chance = random.Random(f"long {order}")
    harness = Harness(tmp_path, eviction=order, tenant_share=chance.choice([0.0, 0.3]))
    prompts = [
        Prompt(chance.choice("ab"), [chance.randint(0, 1) for _ in range(chance.randint(1, 30))]) for _ in range(60)
    ]
    for step in range(steps):
        prompt, draw = chance.choice(prompts[: chance.choice([6, 60])]), chance.random()
        share = positions(prompt.tokens, chance.random())
        if draw < 0.30:
            harness.write(prompt, {share: chance.choice(["5m", "1h"])} if chance.random() < 0.5 else {})
        elif draw < 0.55 and len(harness.held) < 4:
            harness.look_up(prompt, [share])
        elif draw < 0.75 and harness.held:
            harness.finish(chance.randrange(len(harness.held)), chance.random() < 0.5)
        elif draw < 0.90:
            harness.run(chance.choice(["write", "read"]), chance.choice([1, 5, 100]))
        elif draw < 0.97:
            harness.wait(chance.choice([0.5, 5.0, 10.0]))
        elif draw < 0.98:
            harness.drop(chance.choice("ab"))
        elif draw < 0.99:
            harness.damage(chance.randrange(10_000), chance.choice(["flip", "header", "cut"]))
        else:
            harness.restart(chance.random() < 0.5)
        harness.check()
        if step % 250 == 0:
            harness.check_at_rest()
    assert min(harness.attached[tier] for tier in ("device", "host", "disk")) > steps / 20
    harness.check_at_rest()
    harness.wait(1e6)
    harness.check_at_rest()
    assert (len(harness.store), harness.files()) == (0, {})
    harness.store.close()
