"""The autopilot: one step at a time, measured and taken back where it is not as predicted, and never back and forth."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import clocks
from tests.unit.platform.whatif.test_service import Gauges, InMemory
from tests.unit.platform.whatif.traffic import OFFSET, evaluated
from tests.unit.simulator.conversations import config as simulated
from tests.unit.simulator.conversations import record, run, with_timings
from warmkv import recorders, telemetry
from warmkv.config import AutopilotConfig, Config, ConfigError, load
from warmkv.config.tenants import AUTOPILOT
from warmkv.platform.control import Report
from warmkv.platform.live_config import History, StaleVersionError, Version, change, roll_back, values
from warmkv.platform.whatif.autopilot import LOOK_SECONDS, Autopilot
from warmkv.platform.whatif.candidates import NOW
from warmkv.platform.whatif.decision import (
    LATELY,
    REQUESTS,
    STEPPED,
    Apply,
    Close,
    Decision,
    RollBack,
    Seen,
    Step,
    Wait,
    decide,
    gain,
)
from warmkv.platform.whatif.kept import Memory
from warmkv.platform.whatif.replays import Basis, Replayed, Round, replays
from warmkv.platform.whatif.service import WhatIf
from warmkv.platform.whatif.sizes import Held
from warmkv.platform.whatif.window import RequestWindow
from warmkv.policies.contents import Contents
from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.usage import Usage
from warmkv.simulator.steps.costs import PhaseCosts, StepCost, UniformCosts

REST = 100.0
START = load(flags=["control.whatif={}", f"control.autopilot={{settle_seconds: {REST}}}"], environ={})
assert START.control.autopilot is not None
SETTINGS: AutopilotConfig = START.control.autopilot
DOLLARS = "dollars_per_million_tokens"
DOUBLE = {"prefix_cache.ttls": {"5m": 600.0, "1h": 3600.0}}
FIGURES = {"hit_rate": 0.5, "in_slo": 1.0, DOLLARS: 2.0, "bytes": 10.0, "ttft_p99": 0.2}


class Versions:
    """The live configuration as the control actor keeps it, in virtual time."""

    def __init__(self, start: Config = START) -> None:
        self.start, self.now, self.kept = start, OFFSET, History()

    async def change(
        self, start: Config, changes: dict[str, Any], who: str, why: str, based_on: int | None
    ) -> dict[str, Any]:
        by = {"who": who, "why": why, "when": datetime.fromtimestamp(self.now, UTC)}
        self.kept = self.kept.with_next(change(start, self.kept, changes, based_on, **by), 100)
        return {}

    async def roll_back(
        self, start: Config, to: int | None, who: str, why: str, based_on: int | None
    ) -> dict[str, Any]:
        by = {"who": who, "why": why, "when": datetime.fromtimestamp(self.now, UTC)}
        self.kept = self.kept.with_next(roll_back(start, self.kept, to, based_on, **by), 100)
        return {}

    async def history(self) -> list[Version]:
        return list(reversed(self.kept.versions))

    async def follow(self, part: str, report: Report, seconds: float) -> Version:
        raise NotImplementedError

    async def status(self) -> dict[str, Any]:
        raise NotImplementedError


def row(
    name: str, rank: int | None, changes: Mapping[str, Any], restart: Sequence[str] = (), **difference: float
) -> dict[str, Any]:
    figures = {**FIGURES, "in_slo": FIGURES["in_slo"] + difference.get("in_slo", 0.0)}
    every = {**dict.fromkeys(FIGURES, 0.0), **difference}
    shown = {"candidate": name, "rank": rank, "changes": dict(changes), "restart": list(restart)}
    return {**shown, "requests": 90, "figures": figures, "difference": every}


def table(*rows: dict[str, Any], version: int = 0, **more: Any) -> dict[str, Any]:
    errors = dict.fromkeys(("hit_rate", "in_slo", DOLLARS, "resident_bytes_end", "ttft_p99"), 0.01)
    shown = {"state": "up to date", "version": version, "model_error": {"error": errors}}
    return {**shown, "candidates": [*rows, row(NOW, len(rows) + 1, {})], **more}


BETTER = row("ttl-double", 1, DOUBLE, hit_rate=0.3, **{DOLLARS: -0.4})


def seen(now: float = 1000.0, versions: Sequence[Version] = (), of: Any = None, **measured: float) -> Seen:
    figures, begun = {**FIGURES, **measured}, now - 2 * REST
    return Seen(now, versions, of or table(BETTER), figures, REQUESTS, begun, REQUESTS, 0.0, begun)


def version(number: int, age: float, who: str = "ann", **settings: Any) -> Version:
    when = datetime.fromtimestamp(1000.0 - age, UTC)
    return Version(number=number, settings=settings, who=who, why="test", when=when)


def step(at: float = 0.0, **more: Any) -> Step:
    own = {"version": 1, "base": 0, "candidate": "ttl-double", "at": at, "figure": DOLLARS, "gain": 0.4}
    return Step(**{**own, "predicted": BETTER["difference"], "before": dict(FIGURES), **more})


# --- one decision


def test_the_best_candidate_is_applied_with_its_reason():
    decision = decide(START, SETTINGS, None, seen())
    assert isinstance(decision, Apply)
    assert decision.changes == DOUBLE
    assert decision.why == (
        "what-if: ttl-double, dollars_per_million_tokens -40.0% predicted from 90 requests, model error 1.0%"
    )
    assert (decision.step.version, decision.step.base, decision.step.gain) == (1, 0, 0.4)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (seen(versions=[version(1, REST - 1)], of=table(BETTER, version=1)), "version 1 by ann is 99 s old"),
        (
            seen(versions=[version(1, 2 * REST - 1)], of=table(BETTER, version=1)),
            "version 1 by ann is 199 s old, 200 are needed: it settles, and is measured",
        ),
        (replace(seen(), asked_since=1000.0 - 2 * REST + 1), "first request was 199 s ago, 200 are needed"),
        (replace(seen(), begun=1000.0 - REST + 1), "requests are known for 99 s, 100 are needed"),
        (seen(of=table(BETTER, state="replaying")), "not up to date: replaying"),
        (seen(of=table(BETTER, version=3)), "table is of version 3, not 0"),
        (replace(seen(), requests=REQUESTS - 1), f"49 requests in the last {REST:g} s"),
        (seen(of=table({**BETTER, "requests": 27})), "was replayed with 27 requests, 50 are needed"),
        (seen(of=table(BETTER, model_error=None)), "error is not known yet"),
        (seen(of=table(BETTER, model_error={"error": {"hit_rate": 0.2, DOLLARS: 0.0}})), "error is 20.0%"),
        (seen(of=table(BETTER, model_error={"error": {"hit_rate": 0.0, DOLLARS: -0.2}})), "error is 20.0%"),
        (seen(of=table(BETTER, model_error={"error": {"hit_rate": 0.0, DOLLARS: None}})), "error is 100.0%"),
        (seen(of=table(row("a", 1, DOUBLE, **{DOLLARS: -0.04}))), "its gain of 4.0% is less than 5.0%"),
        (
            seen(
                of=table(
                    row("a", 1, DOUBLE, **{DOLLARS: -0.06}), model_error={"error": {"hit_rate": 0.0, DOLLARS: 0.07}}
                )
            ),
            "gain of 6.0% is less than 7.0%",
        ),
        (seen(of=table(row("a", 1, {"engine.max_slots": 3}, ["engine.max_slots"], **{DOLLARS: -0.5}))), "no candidate"),
        (seen(of=table(row("1", 1, {"pricing.input": 0.1}, **{DOLLARS: -0.5}))), "pricing.input is for operators"),
        (
            seen(of=table(row("1", 1, {"routing.allow_request_replica": False}, bytes=-0.5))),
            "routing.allow_request_replica is for operators",
        ),
        (seen(of=table(row("1", 1, {"prefix_cache.ttls": {"5m": 1.0}}, bytes=-0.5))), "takes a TTL away"),
        (seen(of=table(row("1", 1, {"prefix_cache.default_ttl": "9h"}, bytes=-0.5))), "does not fit any more"),
        (seen(of=table()), "no candidate is better"),
    ],
)
def test_it_stands_still_and_says_why(what: Seen, why: str):
    decision = decide(START, SETTINGS, None, what)
    assert isinstance(decision, Wait)
    assert why in decision.why


def test_the_gain_is_in_what_the_rank_goes_by():
    now = row(NOW, 9, {})
    assert gain(row("a", 1, {}, **{DOLLARS: -0.4}), now) == (DOLLARS, 0.4)
    assert gain(row("a", 1, {}, **{DOLLARS: -0.009, "bytes": -0.5}), now) == ("bytes", 0.5)  # dollars within 1%
    assert gain(row("a", 1, {}, ttft_p99=-0.3), now) == ("ttft_p99", 0.3)
    slow = row(NOW, 9, {}, in_slo=-0.2)
    figure, better = gain(row("a", 1, {}, **{DOLLARS: 0.5}), slow) or ("", 0.0)
    assert (figure, better) == ("in_slo", pytest.approx(0.19))  # more than 99% is not better
    assert gain(slow, now) is None
    assert gain(row("a", 1, {}, **{DOLLARS: 0.4}), now) is None
    assert gain(row("a", 1, {}), now) is None


def test_values_that_were_left_lately_are_not_taken_again():
    there = {"prefix_cache.ttls": {"5m": 600.0, "1h": 3600.0}}
    back = Version(number=2, who=AUTOPILOT, rolled_back_to=0, when=version(2, 2 * REST).when)
    versions = [back, version(1, 3 * REST, AUTOPILOT, **there)]
    decision = decide(START, SETTINGS, None, seen(versions=versions, of=table(BETTER, version=2)))
    assert "version 1 had this prefix_cache.ttls, and was left" in decision.why
    other = row("ttl-1h", 2, {"prefix_cache.default_ttl": "1h"}, **{DOLLARS: -0.3})
    second = decide(START, SETTINGS, None, seen(versions=versions, of=table(BETTER, other, version=2)))
    assert isinstance(second, Apply)  # the next one is free
    assert second.step.candidate == "ttl-1h"
    old = [replace_when(one, LATELY * REST) for one in versions]
    assert isinstance(decide(START, SETTINGS, None, seen(versions=old, of=table(BETTER, version=2))), Apply)
    by_hand = [version(1, 2 * REST, "ann", **{"prefix_cache.default_ttl": "1h"})]  # the start was left by an operator
    before = row("ttl-5m", 1, {"prefix_cache.default_ttl": "5m"}, **{DOLLARS: -0.3})
    assert (
        "version 0 had this" in decide(START, SETTINGS, None, seen(versions=by_hand, of=table(before, version=1))).why
    )


def test_a_setting_that_was_taken_back_is_not_taken_again_with_another():
    there = {"prefix_cache.ttls": {"5m": 600.0, "1h": 3600.0}}
    back = Version(number=2, who="ann", rolled_back_to=0, when=version(2, 3 * REST).when)
    versions = [back, version(1, 4 * REST, AUTOPILOT, **there)]
    both = row("best", 1, {**DOUBLE, "prefix_cache.default_ttl": "1h"}, **{DOLLARS: -0.5})
    one = row("ttl-1h", 2, {"prefix_cache.default_ttl": "1h"}, **{DOLLARS: -0.3})
    refused = decide(START, SETTINGS, None, seen(versions=versions, of=table(both, version=2)))
    assert "version 1 had this prefix_cache.ttls" in refused.why
    taken = decide(START, SETTINGS, None, seen(versions=versions, of=table(both, one, version=2)))
    assert isinstance(taken, Apply)
    assert taken.step.candidate == "ttl-1h"


def replace_when(one: Version, seconds: float) -> Version:
    assert one.when is not None
    return one.model_copy(update={"when": datetime.fromtimestamp(one.when.timestamp() - seconds, UTC)})


@pytest.mark.parametrize(
    ("kind", "at", "measured", "why"),
    [
        (Wait, 900.0, {}, "settles and is measured, 100 s more"),
        (
            Close,
            800.0,
            {DOLLARS: 1.3, "hit_rate": 0.8},
            "predicted effect: predicted dollars_per_million_tokens -40.0%",
        ),
        (Close, 800.0, {DOLLARS: 0.9, "hit_rate": 0.9}, "-55.0%"),  # better than predicted
        (
            RollBack,
            800.0,
            {DOLLARS: 1.7, "hit_rate": 0.8},
            "predicted dollars_per_million_tokens -40.0%, measured dolla",
        ),
        (RollBack, 800.0, {DOLLARS: 2.0}, "+0.0%"),
        (RollBack, 800.0, {DOLLARS: 1.3, "hit_rate": 0.69}, "worse than predicted: predicted hit_rate +30.0%"),
        (RollBack, 800.0, {DOLLARS: 1.3, "hit_rate": 0.8, "in_slo": 0.8}, "measured in_slo -20.0%"),
    ],
)
def test_a_step_is_kept_if_the_measured_effect_is_the_predicted_one(kind, at, measured, why):
    versions = [version(1, 1000.0 - at, AUTOPILOT)]
    decision = decide(START, SETTINGS, step(at), seen(versions=versions, **measured))
    assert isinstance(decision, kind)
    assert why in decision.why


def test_a_step_is_judged_by_enough_requests_and_only_while_it_is_in_force():
    few = replace(seen(versions=[version(1, 300, AUTOPILOT)]), requests=REQUESTS - 1)
    assert "49 of 50 requests" in decide(START, SETTINGS, step(700.0), few).why
    changed = decide(START, SETTINGS, step(700.0), seen(versions=[version(2, 10), version(1, 300, AUTOPILOT)]))
    assert isinstance(changed, Close)  # the operator's version stays
    assert "version 2 by ann came after version 1" in changed.why
    assert "was not made" in decide(START, SETTINGS, step(700.0), seen()).why
    theirs = decide(START, SETTINGS, step(700.0), seen(versions=[version(1, 300, "ann")], **{DOLLARS: 9.0}))
    assert isinstance(theirs, Close)  # the actor died before its step, and an operator made that version
    assert "version 1 is by ann" in theirs.why


def test_a_step_from_before_a_deployment_with_other_settings_is_not_judged():
    """Leave it, since its base may not even fit these: a rollback would fail again and again."""
    taken = decide(START, SETTINGS, None, seen(700.0))
    assert isinstance(taken, Apply)
    later = seen(versions=[version(1, 300, AUTOPILOT)], **{DOLLARS: 9.0})
    assert isinstance(decide(START, SETTINGS, taken.step, later), RollBack)
    decision = decide(load(flags=["control.whatif={}", "cluster.replicas=2"], environ={}), SETTINGS, taken.step, later)
    assert isinstance(decision, Close)
    assert "started with other settings since version 1" in decision.why


def test_a_step_under_which_requests_fail_is_rolled_back_at_once():
    at_once = seen(versions=[version(1, 1.0, AUTOPILOT)])
    failing = replace(at_once, requests=0, failed=1.0)
    decision = decide(START, SETTINGS, step(999.0), failing)
    assert isinstance(decision, RollBack)
    assert "100.0% of 50 requests fail, 0.0% did before" in decision.why
    for harmless in (replace(failing, ended=REQUESTS - 1), replace(failing, failed=SETTINGS.max_model_error)):
        assert isinstance(decide(START, SETTINGS, step(999.0), harmless), Wait)
    before = decide(START, SETTINGS, None, replace(seen(), failed=0.2))
    assert isinstance(before, Apply)
    assert before.step.failed == 0.2
    assert isinstance(decide(START, SETTINGS, step(999.0, failed=0.95), failing), Wait)  # so they did before


def test_what_it_may_change_are_live_settings_without_prices_and_rights():
    assert set(STEPPED) >= {
        "compression.policy",
        "prefix_cache.ttls",
        "prefix_cache.default_ttl",
        "routing.load_weight",
    }
    assert not [name for name in STEPPED if "pricing" in name or "allow" in name]


def test_the_settings_decide(monkeypatch: pytest.MonkeyPatch):
    def decided(**settings: float) -> Decision:
        text = ", ".join(f"{name}: {value}" for name, value in settings.items())
        control = load(flags=["control.whatif={}", f"control.autopilot={{{text}}}"], environ={}).control
        assert control.autopilot is not None
        return decide(START, control.autopilot, None, seen(versions=[version(1, 200.0)], of=table(BETTER, version=1)))

    assert isinstance(decided(settle_seconds=100), Apply)
    assert isinstance(decided(settle_seconds=300), Wait)
    assert isinstance(decided(settle_seconds=100, min_gain=0.41), Wait)
    assert isinstance(decided(settle_seconds=100, max_model_error=0.009), Wait)
    with pytest.raises(ConfigError, match=r"control.*autopilot goes by the what-if service"):
        load(flags=["control.autopilot={}"], environ={})


# --- never back and forth


@dataclass
class Scripted:
    """The autopilot's world as hypothesis makes it up: any table, any measurement, operators at any time."""

    versions: Versions = field(default_factory=Versions)
    step: Step | None = None
    applied: list[float] = field(default_factory=list)

    def act(self, rows: list[dict[str, Any]], errors: float, hit_rate: float, dollars: float) -> None:
        history = list(reversed(self.versions.kept.versions))
        number = self.versions.kept.current.number
        names = ("hit_rate", "in_slo", DOLLARS, "resident_bytes_end", "ttft_p99")
        shown = table(*rows, version=number, model_error={"error": dict.fromkeys(names, errors)})
        measured = {"hit_rate": hit_rate, DOLLARS: dollars}
        now = self.versions.now
        what = replace(seen(now, history, shown, **measured), asked_since=OFFSET - 2 * REST)
        decision = decide(START, SETTINGS, self.step, what)
        current = self.versions.kept.current
        if isinstance(decision, Apply):
            assert self.step is None  # one at a time
            assert (
                current.when is None or now - current.when.timestamp() >= 2 * REST
            )  # it has settled, and was measured
            assert errors <= SETTINGS.max_model_error
            assert decision.step.gain >= SETTINGS.min_gain
            assert not self.applied or now - self.applied[-1] >= 2 * REST  # the last one was measured
            self.applied.append(now)
            self.step = decision.step
            asyncio.run(self.versions.change(START, dict(decision.changes), AUTOPILOT, decision.why, number))
            self.check_not_left_lately()
        elif isinstance(decision, RollBack):
            assert current.who == AUTOPILOT  # never an operator's
            assert self.step is not None
            assert now - self.step.at >= 2 * REST
            asyncio.run(self.versions.roll_back(START, self.step.base, AUTOPILOT, decision.why, number))
            self.step = None
        elif isinstance(decision, Close):
            self.step = None

    def check_not_left_lately(self) -> None:
        """What is in force now was left by nobody within the last rests."""
        versions = [Version(), *self.versions.kept.versions]
        touched = set(versions[-1].changes)
        for one, later in itertools.pairwise(versions):
            assert later.when is not None
            if self.versions.now - later.when.timestamp() < LATELY * REST:
                for dotted in touched:
                    own, before, new = (
                        each.settings.get(dotted, values(START)[dotted]) for each in (one, *versions[-2:])
                    )
                    assert own != new or before == new, (one.number, versions[-1].number)


CHANGES: list[dict[str, Any]] = [
    {"prefix_cache.default_ttl": "1h"},
    {"prefix_cache.default_ttl": "5m"},
    DOUBLE,
    {"prefix_cache.ttls": {"5m": 300.0, "1h": 3600.0}},
    {**DOUBLE, "prefix_cache.default_ttl": "1h"},
]


@given(st.data())
def test_it_never_goes_back_and_forth_and_never_undoes_an_operator(data: st.DataObject):
    world = Scripted()
    for _ in range(data.draw(st.integers(1, 25))):
        world.versions.now += data.draw(st.sampled_from([20.0, 90.0, 210.0]))
        if data.draw(st.integers(0, 9)) == 0:
            changes = data.draw(st.sampled_from(CHANGES))
            asyncio.run(world.versions.change(START, changes, "ann", "by hand", None))
        drawn = data.draw(st.lists(st.sampled_from(CHANGES), max_size=3))
        gains = [data.draw(st.sampled_from([0.02, 0.1, 0.5])) for _ in drawn]
        rows = [
            row(f"{n}", n + 1, one, **{DOLLARS: -less}) for n, (one, less) in enumerate(zip(drawn, gains, strict=True))
        ]
        world.act(
            rows,
            data.draw(st.sampled_from([0.0, 0.05, 0.3])),
            data.draw(st.sampled_from([0.2, 0.5, 0.8])),
            data.draw(st.sampled_from([1.0, 2.0, 3.0])),
        )


# --- the loop, end to end: simulated traffic, the real what-if service, the real autopilot


AGAIN, TURNED = 400.0, 100.0  # seconds until a prompt comes again: at first, and when the traffic has turned
LOOP_REST = 800.0
TURN = 4 * LOOP_REST  # a step is taken after two, and judged after two more
END = (2 + LATELY) * LOOP_REST + AGAIN  # when the first TTL may be taken again


BUDGET = "snapkv@0.5"  # of which the evaluation says that it leaves the answers as they are; of less it does not
SLOW = UniformCosts(PhaseCosts(StepCost(0.005, 1e-3, 1e-6), StepCost(0.08, 4e-4, 1e-6)))  # slots are held for seconds


def traffic(policy: str) -> list[RequestRecord]:
    """A document every 20 s that comes again, each followed by one that never does; of either the question is new."""
    found = []
    for number in range(int(END / 20)):
        at = number * 20.0
        known = number % int((AGAIN if at < TURN else TURNED) / 20)
        for token, shared, arrival in ((known if at < TURN else 500 + known, 32, at), (1000 + number, 8, at + 10)):
            tokens = [token] * shared + [2000 + number] * (256 - shared)
            asked = record(arrival, tokens, 100, [shared], ["5m"], policy, name=f"{arrival}")
            found.append(replace(asked, max_tokens=100))
    return found


def billed(line: RequestRecord) -> RequestRecord:
    """The record with its bill: what is before the mark is read, or written where it was not there."""
    shared, read = line.marks[0].position, line.cached_tokens
    written = {} if read else {"5m": shared}
    usage = Usage(input=line.input_tokens - shared, read=read, written=written, output=line.output_tokens)
    return replace(line, status="ok", usage=usage)


InForce = tuple[float, str]  # default TTL and policy


class Cluster:
    """What a simulated cluster does with the traffic, by what is in force."""

    def __init__(self, folder: Path) -> None:
        self._flags = ["prefix_cache.block_size=4", "prefix_cache.memory_bytes=1GiB", "prefix_cache.automatic=false"]
        self._flags += ["pricing.output=0", f"control.whatif={{quality: {evaluated(folder)}}}"]
        self.start = simulated(*self._flags, f"control.autopilot={{settle_seconds: {LOOP_REST}}}")
        self._known: dict[InForce, tuple[list[RequestRecord], Any]] = {}

    def under(self, settings: InForce) -> tuple[list[RequestRecord], Any]:
        """The log of all of the traffic, and the level of what is stored."""
        if settings not in self._known:
            ttl, policy = settings
            own = simulated(*self._flags, f"prefix_cache.ttls={{5m: {ttl}, 1h: 3600}}", f"compression.policy={policy}")
            jobs, outcome = run(traffic(policy), own, cost=SLOW)
            log = [billed(line) for line in with_timings(jobs, OFFSET, outside=0.01)]
            self._known[settings] = log, outcome.stored
        return self._known[settings]


def test_the_cluster_gets_to_the_best_ttl_and_budget_by_itself_and_turns_with_the_traffic(tmp_path):
    asyncio.run(loop_scenario(tmp_path))


async def loop_scenario(folder: Path) -> None:
    cluster = Cluster(folder)
    versions, store, now = Versions(cluster.start), InMemory(), OFFSET

    def in_force() -> InForce:
        settings = versions.kept.current.settings
        ttls = settings.get("prefix_cache.ttls", {"5m": 300.0})
        return ttls["5m"], settings.get("compression.policy", "full")

    async def held() -> Held:
        return Held(replicas=1, stored_bytes=int(cluster.under(in_force())[1].at([now - OFFSET])[0]))

    async def nothing_held(most: int) -> list[Contents]:
        return [Contents(now, {})]

    async def replay(work: Round) -> AsyncGenerator[Basis | Replayed]:
        for one in replays(work):
            yield one

    control = cluster.start.control
    assert control.whatif is not None
    assert control.autopilot is not None
    memory = Memory(store, "warmkv", OFFSET)
    whatif = WhatIf(
        cluster.start,
        control.whatif,
        replay,
        versions.history,
        held,
        nothing_held,
        telemetry_of_nobody(),
        memory,
        clock=lambda: now,
        wall_clock=lambda: now,
    )
    pilot = Autopilot(
        cluster.start,
        control.autopilot,
        memory,
        versions,
        whatif.table,
        lambda: whatif.window,
        held,
        telemetry_of_nobody(),
        lambda: now,
    )
    seconds, hits = 0.0, {}
    predicted: Mapping[str, Any] = {}
    while seconds < END:
        come = [line for line in cluster.under(in_force())[0] if seconds <= line.arrival - OFFSET < seconds + AGAIN]
        seconds += AGAIN
        now = versions.now = OFFSET + seconds
        await whatif.take("gateway", come, 0)
        hits[seconds] = sum(line.cached_tokens for line in come) / sum(line.input_tokens for line in come)
        if seconds in (2 * LOOP_REST, END):  # rounds cost the test time
            await whatif.turn()
        before = versions.kept.current.number
        await pilot.turn()
        if (before, versions.kept.current.number) == (0, 1):
            predicted = next(one for one in (await whatif.table())["candidates"] if one["rank"] == 1)
    best, back = versions.kept.versions
    ttls = {"5m": 600.0, "1h": 3600.0}
    assert (best.who, best.changes) == (AUTOPILOT, {"prefix_cache.ttls": ttls, "compression.policy": BUDGET})
    assert (back.who, back.changes) == (AUTOPILOT, {"prefix_cache.ttls": {**ttls, "5m": 300.0}})
    assert "best, dollars_per_million_tokens -" in best.why
    assert "ttl-half, bytes -" in back.why  # the same hits for less, since documents come again sooner
    assert predicted["changes"] == best.changes
    assert predicted["figures"]["hit_rate"] == pytest.approx(hits[TURN], rel=0.1)
    assert hits[2 * LOOP_REST] == 0
    log, stored = cluster.under((600.0, BUDGET))
    assert predicted["figures"]["resident_bytes"] == pytest.approx(stored.at([TURN])[0], rel=0.1)
    settled = [line for line in log if TURN - LOOP_REST <= line.arrival - OFFSET < TURN]
    held = sum(line.resident_bytes * (line.e2e - line.ttft) for line in settled) / LOOP_REST
    assert predicted["figures"]["slot_bytes"] == pytest.approx(held, rel=0.1)


def telemetry_of_nobody() -> Any:
    class Nobody:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    assert hasattr(recorders.Recorder, "set")
    return Nobody()


def asked(now: float, count: int = 99) -> RequestWindow:
    """Return a window of requests of the last moment, and of one of long ago."""
    line = replace(record(now, [1] * 9, 3), status="ok", cached_tokens=4, usage=Usage(5, 4, {}, 3))
    window = RequestWindow()
    window.add([replace(line, arrival=now - 2 * REST), *[line] * count])
    return window


def pilot_of(
    versions: Versions, memory: Memory, window: RequestWindow, of: Any = None, age: float = 2 * REST
) -> Autopilot:
    """Return an autopilot that has run for `age` seconds, sees these requests, and by default a better candidate."""

    async def shown() -> dict[str, Any]:
        return of or table(BETTER)

    async def held() -> Held:
        return Held(1, 7)

    nobody, now = telemetry_of_nobody(), versions.now
    versions.now -= age
    pilot = Autopilot(START, SETTINGS, memory, versions, shown, lambda: window, held, nobody, lambda: versions.now)
    versions.now = now
    return pilot


def test_a_step_whose_outcome_is_not_known_is_judged_if_it_is_in_force():
    class Dying(Versions):
        async def change(self, *args: Any, **named: Any) -> dict[str, Any]:
            await super().change(*args, **named)
            raise ConnectionError("the control actor has died")

    async def scenario() -> None:
        versions, memory = Dying(), Memory(InMemory(), "warmkv", 0.0)
        pilot = pilot_of(versions, memory, asked(versions.now))
        with pytest.raises(ConnectionError):
            await pilot.turn()
        assert memory.kept.step is not None
        assert memory.kept.step.version == versions.kept.current.number == 1
        await pilot.turn()
        assert "version 1 settles and is measured" in pilot.status()["why"]

    asyncio.run(scenario())


def test_bytes_are_of_the_time_whose_requests_are_there():
    async def scenario() -> None:
        versions, memory, window = Versions(), Memory(InMemory(), "warmkv", 0.0), RequestWindow(requests=100)
        whole = replace(record(0.0, [1] * 9, 3), status="ok", usage=Usage(9, 0, {}, 3), resident_bytes=1000, e2e=1.0)
        times = [versions.now - 3 * REST + at / 2 for at in range(int(6 * REST))]  # two a second: the window has 50 s
        pilot = pilot_of(versions, memory, window)
        window.add(replace(whole, arrival=at) for at in times[:50])
        await pilot.turn()
        window.add(replace(whole, arrival=at) for at in times[50:])
        await pilot.turn()
        assert memory.kept.step is not None
        assert memory.kept.step.before["bytes"] == pytest.approx(7 + 2 * 1000, rel=0.05)

    asyncio.run(scenario())


def test_a_step_that_outlived_its_window_is_measured_anew_by_requests_that_are_all_there():
    async def scenario() -> None:
        versions, memory, window = Versions(), Memory(InMemory(), "warmkv", 0.0), RequestWindow()
        await versions.change(START, DOUBLE, AUTOPILOT, "test", None)
        bytes_before = 7 + 2 * 1000.0  # stored, and two requests a second that hold 1,000 for one
        memory.keep(step=step(versions.now, figure="bytes", before={**FIGURES, "bytes": bytes_before}))
        whole = replace(record(0.0, [1] * 9, 3), status="ok", usage=Usage(9, 0, {}, 3), resident_bytes=1000, e2e=1.0)
        versions.now += 3 * REST
        pilot = pilot_of(versions, memory, window, age=0.0)
        window.add(replace(whole, arrival=versions.now - at / 2) for at in range(REQUESTS, 0, -1))  # sent again
        await pilot.turn()
        assert "version 1 settles and is measured, 100 s more" in pilot.status()["why"]
        window.add(replace(whole, arrival=versions.now + at / 2) for at in range(int(2 * REST)))
        versions.now += REST
        await pilot.turn()
        assert versions.kept.current.rolled_back_to == 0  # nothing has become better
        assert "measured bytes +0.0%" in versions.kept.current.why

    asyncio.run(scenario())


def test_requests_that_fail_under_a_step_are_counted_since_it_is_in_force():
    async def scenario() -> None:
        versions, memory, window = Versions(), Memory(InMemory(), "warmkv", 0.0), asked(OFFSET - 1)
        pilot, broken = pilot_of(versions, memory, window), replace(record(0.0, [1] * 9, 3), status="error")
        theirs = [replace(broken, arrival=OFFSET - 1, error="invalid_request_error") for _ in range(99)]
        window.add([*theirs, *(replace(broken, arrival=OFFSET - 1, error="api_error") for _ in range(11))])
        await pilot.turn()
        assert memory.kept.step is not None
        assert memory.kept.step.failed == pytest.approx(0.1)
        versions.now += 1.0
        window.add(replace(broken, arrival=versions.now, error="timeout_error") for _ in range(REQUESTS))
        await pilot.turn()
        assert (memory.kept.step, versions.kept.current.rolled_back_to) == (None, 0)
        assert "of 50 requests fail, 10.0% did before" in versions.kept.current.why

    asyncio.run(scenario())


def test_failures_under_a_step_are_of_the_time_whose_answers_are_there():
    async def scenario() -> None:
        versions, memory, window = Versions(), Memory(InMemory(), "warmkv", 0.0), RequestWindow(requests=100)
        pilot = pilot_of(versions, memory, window)
        await versions.change(START, DOUBLE, AUTOPILOT, "test", None)
        memory.keep(step=step(versions.now, failed=0.02))
        answered = replace(record(0.0, [1] * 9, 3), status="ok", usage=Usage(9, 0, {}, 3))
        failed = replace(answered, status="error", error="api_error")
        for number in range(2000):  # 2% fail, as before
            versions.now += 0.01
            window.add([replace(failed if number % 50 == 0 else answered, arrival=versions.now)])
        assert (len(window), len(window.failed)) == (100, 40)
        await pilot.turn()
        assert "version 1 settles and is measured" in pilot.status()["why"]

    asyncio.run(scenario())


def test_a_step_that_somebody_else_prevents_is_no_step():
    async def scenario() -> None:
        versions, store = Versions(), InMemory()
        memory = Memory(store, "warmkv", 0.0)

        async def shown() -> dict[str, Any]:
            await versions.change(START, {"routing.overload": 3}, "ann", "faster", None)  # while it decides
            return table(BETTER)

        async def held() -> Held:
            return Held(1, 7)

        window = asked(versions.now + 2 * REST)
        pilot = Autopilot(
            START,
            SETTINGS,
            memory,
            versions,
            shown,
            lambda: window,
            held,
            telemetry_of_nobody(),
            lambda: versions.now,
        )
        versions.now += 2 * REST
        with pytest.raises(StaleVersionError):
            await pilot.turn()
        assert (memory.kept.step, versions.kept.current.who) == (None, "ann")
        assert pilot.status()["step"] is None

    asyncio.run(scenario())


def test_decisions_that_fail_in_a_row_are_counted_until_one_succeeds():
    class Restarting(Versions):
        up = False

        async def history(self) -> list[Version]:
            if not self.up:
                raise ConnectionError("the control actor is restarting")
            return await super().history()

    async def scenario() -> None:
        versions, metrics = Restarting(), Gauges()

        async def shown() -> dict[str, Any]:
            return table()

        async def held() -> Held:
            return Held(1, 7)

        memory = Memory(InMemory(), "warmkv", 0.0)
        pilot = Autopilot(START, SETTINGS, memory, versions, shown, RequestWindow, held, metrics, lambda: versions.now)
        running = asyncio.create_task(pilot.run())
        await asyncio.sleep(2.5 * LOOK_SECONDS)
        assert pilot.status()["state"] == "failed"
        versions.up = True
        await asyncio.sleep(LOOK_SECONDS)
        assert pilot.status()["state"] == "waiting"
        running.cancel()
        assert metrics.seen == [(telemetry.WHATIF_FAILED.name, value, {"loop": "autopilot"}) for value in (1, 2, 3, 0)]

    clocks.run(scenario())
