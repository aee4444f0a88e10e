"""The what-if service without Ray: its window, its rounds, the load that stops them, operators' candidates."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from tests import clocks, grafana
from tests.unit.platform.conftest import Counted
from tests.unit.platform.whatif.traffic import OFFSET, logged, prompts, settings
from warmkv import telemetry
from warmkv.config import ConfigError, load
from warmkv.platform.live_config import LIVE, Version
from warmkv.platform.live_config_store import StoreError
from warmkv.platform.whatif import in_force as in_force_module
from warmkv.platform.whatif import service as service_module
from warmkv.platform.whatif.candidates import (
    BEST,
    MOST_CANDIDATES,
    MOST_REPLICAS,
    NOW,
    RESTART,
    TooManyCandidatesError,
    UnknownCandidateError,
    WhatIfCandidate,
    check,
    proposals,
)
from warmkv.platform.whatif.feed import BATCH, KEPT, QUEUE, Feed
from warmkv.platform.whatif.kept import Memory
from warmkv.platform.whatif.replays import SEARCHED, Basis, Replayed, Round, replays
from warmkv.platform.whatif.service import WhatIf
from warmkv.platform.whatif.sizes import Held, with_sizes
from warmkv.platform.whatif.warm_start import BLOCKS, Snapshots
from warmkv.platform.whatif.window import BYTES, REQUESTS, RequestWindow, size_of
from warmkv.policies.contents import Contents
from warmkv.prefixes.record import RequestRecord
from warmkv.simulator.cluster import memory
from warmkv.simulator.studies.replays.whatif import Prediction

FIGURES = {"hit_rate": 0.5, "resident_bytes": 10.0, "bytes": 10.0, "ttft_p50": 0.1, "ttft_p99": 0.2, "in_slo": 1.0}
FIGURES |= {"dollars_per_million_tokens": 2.0, "gpu_dollars_per_million_tokens": 1.0}


@dataclass
class Gauges(Counted):
    """The gauges that a scrape would find."""

    held: dict[tuple[str, str], float] = field(default_factory=dict)

    def set(self, gauge: telemetry.Metric, value: float, **labels: str) -> None:
        super().set(gauge, value, **labels)
        self.held[gauge.name, "".join(labels.values())] = value

    def forget(self, gauge: telemetry.Metric, **labels: str) -> None:
        wanted = "".join(labels.values())
        self.held = {key: v for key, v in self.held.items() if key[0] != gauge.name or (wanted and key[1] != wanted)}


class InMemory:
    """A store of bytes; `full` is a disk that takes no more."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.full = False

    def read(self, name: str) -> bytes | None:
        return self.held.get(name)

    def write(self, name: str, data: bytes) -> None:
        if self.full:
            raise OSError("no space left")
        self.held[name] = data


class Bench:
    """A service whose replays are the test's: each candidate takes a second."""

    def __init__(self, *flags: str, store: InMemory | None = None) -> None:
        self.config = settings("control.whatif={}", *flags)
        assert self.config.control.whatif is not None
        self.rounds: list[Round] = []
        self.closed = 0
        self.fails = False
        self.endless: set[str] = set()  # candidates whose replays do not end
        self.versions: list[Version] = []
        self.held = Held(replicas=1, stored_bytes=7)
        self.contents: list[Contents] | None = None
        self.asked: list[int] = []
        self.metrics, self.store = Gauges(), store or InMemory()
        loop = asyncio.get_running_loop()
        self.whatif = WhatIf(
            self.config,
            self.config.control.whatif,
            self.replay,
            self._versions,
            self._held,
            self._contents,
            self.metrics,
            Memory(self.store, "warmkv", 0.0),
            clock=loop.time,
            wall_clock=lambda: OFFSET + loop.time(),
        )

    async def replay(self, work: Round) -> AsyncGenerator[Basis | Replayed]:
        self.rounds.append(work)
        try:
            yield Basis(len(work.records), 0, 1.0, "the test", None)
            if self.fails:
                raise RuntimeError("the replay's process was killed")
            present = Prediction("full", dict(FIGURES), 20)
            yield Replayed(WhatIfCandidate(NOW, {}), present, present, error={"hit_rate": 0.01}, judged=20)
            for candidate in work.candidates:
                await (asyncio.Event().wait() if candidate.name in self.endless else asyncio.sleep(1))
                found = Prediction("full", {**FIGURES, "hit_rate": 0.6}, 20)
                yield Replayed(candidate, found, present)
            if BEST in self.endless:
                await asyncio.Event().wait()
        finally:
            self.closed += 1

    async def _versions(self) -> list[Version]:
        return self.versions

    async def _held(self) -> Held:
        return self.held

    async def _contents(self, most: int) -> list[Contents]:
        self.asked.append(most)
        if self.contents is None:
            raise TimeoutError("a replica is starting")
        return self.contents

    async def come(self, count: int = 40, waiting: int = 0) -> None:
        await self.whatif.take("a", records(count), waiting)

    def rounds_counted(self) -> list[str]:
        return [labels["result"] for name, _, labels in self.metrics.seen if name == telemetry.WHATIF_ROUNDS.name]


def records(count: int) -> list[RequestRecord]:
    return [replace(line, status="ok") for line in prompts()[:count]]


def test_a_round_is_replayed_when_there_is_something_new():
    async def scenario() -> None:
        bench = Bench()
        await bench.come(10)
        await bench.whatif.turn()
        assert (bench.rounds, (await bench.whatif.table())["state"]) == ([], "waiting for 20 requests")
        await bench.come(100)
        await bench.whatif.turn()
        (first,) = bench.rounds
        assert [one.arrival for one in first.records] == sorted(one.arrival for one in first.records)
        assert (len(first.records), first.stored_bytes) == (110, 7)
        await bench.whatif.turn()
        await bench.come(4)
        await bench.whatif.turn()
        assert len(bench.rounds) == 1  # too little is new
        await bench.come(4)
        await bench.whatif.turn()
        assert len(bench.rounds) == 2
        await bench.whatif.add({"routing.load_weight": 1.0})
        await bench.whatif.turn()
        assert "1" in {one.name for one in bench.rounds[2].candidates}
        assert bench.rounds[2].candidates[0].name == "1"  # what was never replayed comes first
        bench.versions = [Version(number=4, settings={"prefix_cache.default_ttl": "1h"}, when=datetime.now(UTC))]
        await bench.whatif.turn()
        assert bench.rounds[3].now.prefix_cache.default_ttl == "1h"
        assert (await bench.whatif.table())["version"] == 4
        assert bench.rounds_counted() == ["done"] * 4

    clocks.run(scenario())


def test_turns_without_news_prepare_no_round(monkeypatch: pytest.MonkeyPatch):
    called: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            called[name] += 1
            return function(*arguments)

        monkeypatch.setattr(owner, name, counted)

    count(Snapshots, "start")
    count(in_force_module, "with_sizes")

    async def scenario() -> None:
        bench = Bench()
        await bench.come()
        for stored in range(11):
            bench.held = Held(replicas=1, stored_bytes=stored)
            await bench.whatif.turn()
        assert called == {"start": 1, "with_sizes": 1}
        bench.held = Held(replicas=1, limits={"": {"engine.kv_bytes": 1 << 20}})
        await bench.whatif.turn()
        assert called == {"start": 1, "with_sizes": 2}  # no candidate depends on this size
        bench.versions = [Version(number=4, settings={"prefix_cache.default_ttl": "1h"}, when=datetime.now(UTC))]
        await bench.whatif.turn()
        assert called == {"start": 2, "with_sizes": 3}

    clocks.run(scenario())


def test_rounds_begin_with_what_the_replicas_tell_once_they_do():
    async def scenario() -> None:
        bench = Bench()
        bench.held = Held(replicas=2)
        await bench.come()
        await bench.whatif.turn()
        assert (bench.rounds[0].start.held, bench.asked) == (None, [BLOCKS // 2])  # one was starting
        bench.contents = [Contents(OFFSET, {"device": []}) for _ in range(2)]
        await bench.come()
        await bench.whatif.turn()
        assert bench.rounds[1].start.held == bench.contents
        await bench.whatif.turn()
        assert len(bench.asked) == 2  # and not again before a quarter of the window is new

    clocks.run(scenario())


def test_load_stops_the_replay_and_its_end_lets_it_go_on():
    async def scenario() -> None:
        bench = Bench()
        await bench.come()
        turning = asyncio.create_task(bench.whatif.turn())
        await asyncio.sleep(2.5)
        assert bench.closed == 0
        await bench.come(1, waiting=service_module.WAITING_PER_REPLICA)  # they are computed together: no load
        await asyncio.sleep(0)
        assert bench.closed == 0
        await bench.come(1, waiting=service_module.WAITING_PER_REPLICA + 1)
        await turning
        assert (bench.closed, bench.rounds_counted()) == (1, ["stopped"])
        table = await bench.whatif.table()
        assert table["state"].startswith("stopped")
        assert len([row for row in table["candidates"] if row["rank"]]) == 3  # now, and what was done before
        await bench.whatif.turn()
        assert len(bench.rounds) == 1
        await bench.whatif.take("a", [], 0)
        await bench.whatif.turn()
        assert len(bench.rounds) == 1  # load often comes again
        await asyncio.sleep(service_module.REST_SECONDS)
        await bench.whatif.turn()
        assert (len(bench.rounds), bench.closed) == (2, 2)
        assert bench.rounds[1].candidates[-1].name in {row["candidate"] for row in table["candidates"]}
        await bench.whatif.take("b", [], 9)  # and then that gateway dies
        assert bench.whatif.loaded
        await asyncio.sleep(service_module.SILENCE_SECONDS + 1)
        assert not bench.whatif.loaded

    clocks.run(scenario())


def test_a_round_ends_when_a_candidate_or_the_settings_that_it_is_of_are_no_more():
    async def scenario() -> None:
        bench = Bench()
        await bench.whatif.add({"engine.max_slots": 2})
        await bench.come()
        running = asyncio.create_task(bench.whatif.run())
        await asyncio.sleep(0.5)
        await bench.whatif.remove("1")
        await bench.whatif.add({"engine.max_slots": 3})
        await asyncio.sleep(2 * service_module.PAUSE_SECONDS)
        assert bench.rounds_counted() == ["stopped"]
        assert [one.changes for one in bench.rounds[1].candidates if not one.proposed] == [{"engine.max_slots": 3}]
        bench.versions = [Version(number=4, settings={"prefix_cache.default_ttl": "1h"}, when=datetime.now(UTC))]
        await asyncio.sleep(2 * service_module.PAUSE_SECONDS)
        assert bench.rounds_counted() == ["stopped"] * 2
        assert bench.rounds[2].now.prefix_cache.default_ttl == "1h"
        failing, bench.versions = bench.versions, None  # type: ignore[assignment]
        await asyncio.sleep(service_module.PAUSE_SECONDS)
        bench.versions = failing
        await asyncio.sleep(60)
        assert bench.rounds_counted() == ["stopped"] * 2 + ["done"]
        running.cancel()

    clocks.run(scenario())


def test_a_candidate_that_takes_too_long_is_left_out_and_has_the_reason():
    async def scenario() -> None:
        bench = Bench()
        await bench.whatif.add({"engine.max_slots": 2})
        bench.endless = {"1"}
        await bench.come()
        running = asyncio.create_task(bench.whatif.run())
        await asyncio.sleep(service_module.STEP_SECONDS + 60)
        assert bench.rounds_counted() == ["stopped", "done"]
        assert "1" not in {one.name for one in bench.rounds[1].candidates}
        (row,) = (row for row in (await bench.whatif.table())["candidates"] if row["candidate"] == "1")
        assert "was stopped after 600 s" in row["fault"]
        bench.endless = set()
        bench.versions = [Version(number=4, settings={"prefix_cache.default_ttl": "1h"}, when=datetime.now(UTC))]
        await asyncio.sleep(60)
        (row,) = (row for row in (await bench.whatif.table())["candidates"] if row["candidate"] == "1")
        assert (row["fault"], row["figures"]["hit_rate"]) == (None, 0.6)  # other settings, another try
        bench.endless = {"1"}
        await bench.come(400)
        await asyncio.sleep(service_module.STEP_SECONDS + 60)
        await bench.whatif.remove("1")
        assert "1" not in {row["candidate"] for row in (await bench.whatif.table())["candidates"]}
        bench.endless = {BEST}
        await bench.whatif.add({"engine.max_slots": 2})  # the same again, another try
        done = bench.rounds_counted().count("done")
        await asyncio.sleep(service_module.STEP_SECONDS * SEARCHED + 60)
        assert bench.rounds_counted().count("done") == done + 1  # without what the search might have found
        (row,) = (row for row in (await bench.whatif.table())["candidates"] if row["candidate"] == "1")
        assert row["figures"]["hit_rate"] == 0.6
        running.cancel()

    clocks.run(scenario())


def test_the_loop_goes_on_after_a_fault_and_shows_it():
    async def scenario() -> None:
        bench = Bench()
        await bench.come()
        bench.held = None  # type: ignore[assignment]
        running = asyncio.create_task(bench.whatif.run())
        await asyncio.sleep(1)
        assert "AttributeError" in (await bench.whatif.table())["fault"]
        bench.held = Held()
        await asyncio.sleep(60)
        assert (await bench.whatif.table())["fault"] is None
        assert bench.rounds_counted() == ["failed", "done"]
        running.cancel()

    clocks.run(scenario())


def test_rounds_that_fail_in_a_row_are_counted_through_load_until_one_succeeds():
    async def scenario() -> None:
        bench = Bench()

        def failed() -> float:
            return bench.metrics.held[telemetry.WHATIF_FAILED.name, "replays"]

        bench.fails = True
        await bench.come()
        running = asyncio.create_task(bench.whatif.run())
        await asyncio.sleep(1 + service_module.PAUSE_SECONDS)
        assert failed() == 2
        await bench.come(waiting=service_module.WAITING_PER_REPLICA + 1)
        await asyncio.sleep(service_module.PAUSE_SECONDS)
        assert ((await bench.whatif.table())["fault"], failed()) == (None, 2)
        await bench.come()
        await asyncio.sleep(service_module.REST_SECONDS + service_module.PAUSE_SECONDS)
        assert failed() >= 3
        bench.fails = False
        await asyncio.sleep(60)
        assert ((await bench.whatif.table())["state"], failed()) == ("up to date", 0)
        running.cancel()

    clocks.run(scenario())


def test_the_table_and_the_metrics_show_each_candidate_and_forget_it():
    async def scenario() -> None:
        bench = Bench()
        await bench.come()
        added = await bench.whatif.add({"engine.max_slots": 2})
        assert added == {
            "candidate": "1",
            "proposed": False,
            "changes": {"engine.max_slots": 2},
            "restart": ["engine.max_slots"],
        }
        before = {row["candidate"]: row for row in (await bench.whatif.table())["candidates"]}
        assert (before["1"]["rank"], before["1"]["figures"]) == (None, None)
        await bench.whatif.turn()
        table = await bench.whatif.table()
        rows = {row["candidate"]: row for row in table["candidates"]}
        assert [row["rank"] for row in table["candidates"]] == list(range(1, len(rows) + 1))
        assert table["candidates"][0]["candidate"] == NOW  # a draw is no reason to change anything
        assert rows["1"]["difference"]["hit_rate"] == pytest.approx(0.1)
        drawn = grafana.rows(grafana.tables()["What other settings would do"], table)
        assert [row["candidate"] for row in drawn] == [row["candidate"] for row in table["candidates"]]
        assert next(row for row in drawn if row["candidate"] == "1")["restart"]
        assert rows["1"]["pareto"]
        assert table["model_error"]["error"] == {"hit_rate": 0.01}
        assert table["window"]["replayed"]["requests"] == 40
        hit_rate = telemetry.WHATIF_HIT_RATE.name
        assert bench.metrics.held[hit_rate, "1"] == 0.6
        assert bench.metrics.held[hit_rate, NOW] == 0.5
        assert bench.metrics.held[telemetry.WHATIF_RANK.name, NOW] == 1
        assert bench.metrics.held[telemetry.WHATIF_ERROR.name, "hit_rate"] == 0.01
        await bench.whatif.remove("1")
        assert (hit_rate, "1") not in bench.metrics.held
        assert "1" not in {row["candidate"] for row in (await bench.whatif.table())["candidates"]}

    clocks.run(scenario())


def test_a_row_says_which_version_its_figures_and_changes_are_of():
    async def scenario() -> None:
        bench = Bench()
        await bench.come()
        await bench.whatif.turn()
        bench.versions = [
            Version(number=4, settings={"prefix_cache.ttls": {"5m": 9, "1h": 99}}, when=datetime.now(UTC))
        ]
        turning = asyncio.create_task(bench.whatif.turn())
        await asyncio.sleep(1.5)  # the first candidate has been replayed again
        table = await bench.whatif.table()
        versions = {row["candidate"]: row["version"] for row in table["candidates"]}
        assert (table["version"], versions[NOW], versions[bench.rounds[1].candidates[0].name]) == (4, 4, 4)
        assert versions[bench.rounds[1].candidates[-1].name] == 0  # and its changes would undo version 4
        await bench.whatif.add({"routing.load_weight": 1.0})
        drawn = grafana.rows(grafana.tables()["What other settings would do"], await bench.whatif.table())
        assert {row["candidate"]: row["version"] for row in drawn} == {**versions, "1": 4}
        await turning
        assert {row["version"] for row in (await bench.whatif.table())["candidates"]} == {4, None}

    clocks.run(scenario())


def test_candidates_are_refused_by_what_is_wrong_with_them():
    async def scenario() -> None:
        whatif = Bench().whatif
        for changes, reason in (
            ({"prefix_cache.memory_byte": 1}, "did you mean 'prefix_cache.memory_bytes'"),
            ({"gateway.port": 1}, "no choice that a replay can judge"),
            ({"prefix_cache.block_size": 16}, "no choice"),  # the hashes of the log are of its own blocks
            ({"prefix_cache.default_ttl": "2m"}, "not one of ttls"),
            ({"routing.load_weight": -1}, "routing.load_weight"),
            ({"routing.load_weight": float("nan")}, "finite"),
            ({"cluster.replicas": MOST_REPLICAS + 1}, f"cluster.replicas: a candidate has at most {MOST_REPLICAS}"),
            ({"cluster.gateways": MOST_REPLICAS + 1}, "cluster.gateways: a candidate has at most"),
        ):
            with pytest.raises(ConfigError, match=reason):
                await whatif.add(changes)
        for number in range(MOST_CANDIDATES):
            assert (await whatif.add({"engine.max_slots": 10 + number}))["candidate"] == str(number + 1)
        assert (await whatif.add({"engine.max_slots": 10}))["candidate"] == "1"  # it is there already
        with pytest.raises(TooManyCandidatesError, match=str(MOST_CANDIDATES)):
            await whatif.add({"engine.max_slots": 99})
        await whatif.remove("3")
        assert (await whatif.add({"engine.max_slots": 99}))["candidate"] == "3"
        for name in ("9", NOW, "ttl-half"):
            with pytest.raises(UnknownCandidateError, match="no candidate"):
                await whatif.remove(name)

    clocks.run(scenario())


def test_candidates_outlive_the_actor_and_what_cannot_be_kept_is_not_there():
    async def scenario() -> None:
        before = Bench()
        await before.whatif.add({"engine.max_slots": 10})
        await before.whatif.add({"engine.max_slots": 11})
        await before.whatif.remove("1")
        after = Bench(store=before.store).whatif
        kept = [(row["candidate"], row["changes"]) for row in (await after.table())["candidates"]]
        assert kept == [("2", {"engine.max_slots": 11})]
        before.store.full = True
        with pytest.raises(StoreError, match="no space left"):
            await after.add({"engine.max_slots": 12})
        with pytest.raises(StoreError, match="no space left"):
            await after.remove("2")
        assert [row["candidate"] for row in (await after.table())["candidates"]] == ["2"]
        before.store.full = False
        (name,) = before.store.held
        before.store.held[name] = b"{"
        damaged = Bench(store=before.store).whatif
        table = await damaged.table()
        assert table["candidates"] == []
        assert table["fault"].startswith(f"{name} cannot be read and was copied to {name}.damaged-0: ")
        before.store.full = True
        with pytest.raises(StoreError):
            await damaged.add({"engine.max_slots": 12})
        assert (await damaged.table())["fault"] == table["fault"]
        before.store.full = False
        await damaged.add({"engine.max_slots": 12})  # and is kept
        assert (await damaged.table())["fault"] is None
        assert before.store.held[f"{name}.damaged-0"] == b"{"

    clocks.run(scenario())


def test_default_policies_follow_the_versions():
    async def scenario() -> None:
        bench = Bench()
        await bench.come()
        at = datetime.fromtimestamp(OFFSET, UTC)
        bench.versions = [
            Version(number=2, settings={"nothing.known": 1}, when=at),  # which the gateways cannot take, either
            Version(number=1, settings={"compression.policy": "snapkv@0.2"}, when=at),
        ]
        await bench.whatif.turn()
        (work,) = bench.rounds
        assert [(default.since, default.policy) for default in work.defaults] == [(0.0, "full"), (OFFSET, "snapkv@0.2")]
        assert work.now.compression.policy.label == "snapkv@0.2"
        assert work.changed == OFFSET

    clocks.run(scenario())


def test_old_records_say_nothing_of_the_bytes_held_now():
    async def scenario() -> None:
        bench = Bench()
        await bench.come()
        await asyncio.sleep(service_module.SILENCE_SECONDS + 1)
        await bench.whatif.turn()
        assert bench.rounds[0].stored_bytes is None

    clocks.run(scenario())


def test_what_can_be_a_candidate_are_settings():
    for dotted in RESTART:
        section, field = dotted.split(".")
        assert field in getattr(settings(), section).__class__.model_fields, dotted
    assert not set(RESTART) & set(LIVE)


def test_proposals_are_neighbours_and_few():
    def names(*flags: str) -> set[str]:
        return {one.name for one in proposals(settings(*flags))}

    usual = names()
    assert {"ttl-double", "ttl-half", "ttl-1h", "memory-half", "order-lfu", "snapkv-0.5"} <= usual
    assert not {"ttl-5m", "order-lru", "load-half"} & usual  # as it is, or of no effect
    assert {"budget-half", "budget-double"} <= names("compression.policy=snapkv@0.4")
    assert "budget-double" not in names("compression.policy=snapkv@1.0")
    assert {"budget-half", "budget-double"} <= names("compression.policy=snapkv@64")
    assert {"load-half", "load-double"} <= names("cluster.replicas=2")
    assert not {name for name in names("prefix_cache.enabled=false") if name.startswith(("ttl", "memory", "order"))}
    now = settings()
    for one in proposals(now):
        assert check(now, one.changes) != now
        assert bool(one.restart) == one.name.startswith(("memory", "order"))
    assert len(proposals(settings("cluster.replicas=2"))) <= 16


def test_the_window_is_bounded_by_requests_and_by_bytes():
    window = RequestWindow(requests=100)
    window.add([*records(150), replace(records(1)[0], status="error")])
    assert (len(window), window.seen) == (100, 150)
    assert window.records()[0].arrival == records(51)[-1].arrival
    assert window.bytes == 100 * size_of(records(1)[0])
    small = RequestWindow(1000, most_bytes=10 * size_of(records(1)[0]))
    small.add(records(150))
    assert len(small) == 10
    assert REQUESTS * size_of(records(1)[0]) < 2 * BYTES  # with few blocks their number is what counts


def test_sizes_are_those_of_the_replicas_and_of_the_model():
    replica = {"memory": {"limits": {"engine.kv_bytes": {"bytes": 5}, "prefix_cache.memory_bytes": {"bytes": 9}}}}
    smaller = {"memory": {"limits": {"engine.kv_bytes": {"bytes": 4}, "prefix_cache.memory_bytes": {"bytes": 10}}}}
    loading = {"c": {"phase": "loading the model"}}
    status = {"replicas": {**loading, "a": {**replica, "store_tiers": {"device": 1, "host": 2}}, "b": {**smaller}}}
    held = Held.of(status)
    assert held == Held(2, 3, {"": {"engine.kv_bytes": 4, "prefix_cache.memory_bytes": 9}})
    sized = with_sizes(load(environ={}), held)
    assert (sized.engine.kv_limit, sized.prefix_cache.memory_limit) == (4, 9)
    assert (sized.simulator.model.layers, sized.simulator.model.dtype_bytes) == (6, 4)
    assert with_sizes(load(flags=["prefix_cache.memory_bytes=7"], environ={}), held).prefix_cache.memory_limit == 7
    on_gpu = Held.of({"replicas": {"a": {**replica, "allocator_bytes": 1}}})
    assert with_sizes(load(environ={}), on_gpu).simulator.model.dtype_bytes == 2
    for own in ("model.path=nobody/nothing", "model.path=tiny"):
        told = load(flags=[own, "simulator.model={layers: 3}"], environ={})
        assert with_sizes(told, Held()).simulator.model.layers == 3
    assert Held.of({"replicas": {}}) == Held()


def test_a_model_whose_shape_is_unknown_is_told(tmp_path, caplog):
    """Take the shape of `simulator.model` for replays then, and defaults for what files may leave out."""
    gemma = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240}
    file, own = tmp_path / "config.json", load(flags=[f"model.path={tmp_path}"], environ={})
    file.write_text(json.dumps({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": gemma}))
    shape = with_sizes(own, Held(on_gpu=True)).simulator.model
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.dtype_bytes) == (34, 4, 256, 2)
    assert not caplog.records
    file.write_text(json.dumps({"model_type": "mamba", "num_hidden_layers": 34}))
    assert with_sizes(own, Held()).simulator.model == load(environ={}).simulator.model
    assert "lacks 'num_attention_heads'" in caplog.text


def test_each_group_has_its_own_sizes():
    def replica(kv: int, stored: int, **group: str) -> dict[str, object]:
        limits = {"engine.kv_bytes": {"bytes": kv}, "prefix_cache.memory_bytes": {"bytes": stored}}
        return {"memory": {"limits": limits}, **group}

    of_vllm = {"b": replica(7, 8, group="vllm"), "c": replica(6, 9, group="vllm")}
    held = Held.of({"replicas": {"a": replica(50, 90), **of_vllm}})
    config = load(flags=["cluster.groups={vllm: {engine: {kind: vllm, step_tokens: 64}}, last: {}}"], environ={})
    sized = with_sizes(config, held)
    assert with_sizes(sized, Held()) == sized
    groups = sized.groups()
    assert {name: (one.engine.kv_limit, one.prefix_cache.memory_limit) for name, one in groups.items()} == {
        "": (50, 90), "vllm": (6, 8), "last": (memory.KV_BYTES, memory.STORED_BYTES),
    }  # fmt: skip
    assert [one.engine.step_tokens for one in groups.values()] == [1024, 64, 1024]
    assert {one.simulator.model.layers for one in groups.values()} == {6}


def test_a_feed_never_waits_and_counts_what_it_drops():
    async def scenario() -> None:
        sent: list[tuple[int, int]] = []
        gate = asyncio.Event()
        waiting = 0
        lost: list[int] = []

        async def send(batch: Sequence[RequestRecord], load: int) -> float:
            await gate.wait()
            sent.append((len(batch), load))
            return OFFSET

        feed = Feed(send, lambda: waiting, lost.append)
        (record,) = records(1)
        await feed.flush()
        assert sent == []  # nothing to tell
        for _ in range(QUEUE + 3):
            feed.write(record)
        assert sum(lost) == 3
        gate.set()
        await feed.flush()
        assert sent == [(BATCH, 0)] * (QUEUE // BATCH)
        waiting = 4
        await feed.flush()
        waiting = 0
        await feed.flush()
        await feed.flush()
        assert sent[QUEUE // BATCH :] == [(0, 4), (0, 0)]  # the end of a load is told once
        gate.clear()
        lost.clear()
        feed.write(record)
        await feed.flush()  # the service does not answer
        assert lost == [1]

    clocks.run(scenario())


def test_a_service_that_was_started_anew_gets_the_latest_requests_again():
    async def scenario() -> None:
        services = [Bench()]
        lost: list[int] = []

        async def send(batch: Sequence[RequestRecord], load: int) -> float:
            if batch and not services:
                raise ValueError("no actor has the name")
            return await services[-1].whatif.take("a", batch, load)

        feed, log = Feed(send, lambda: 0, lost.append), records(KEPT // 4)
        for number in range(5):  # more than it keeps
            for record in log:
                feed.write(replace(record, id=f"{number} {record.id}"))
            await feed.flush()
        first = [record.id for record in services[0].whatif.window]
        assert (len(first), lost) == (5 * len(log), [])
        dead, gone = services.pop(), replace(log[0], id="meanwhile")
        feed.write(gone)
        await feed.flush()
        assert lost == [1]
        await asyncio.sleep(1)
        services.append(Bench())
        feed.write(replace(log[0], id="last"))
        await feed.flush()
        again = [record.id for record in services[0].whatif.window]
        assert (again[0], set(again)) == ("last", {"last", "meanwhile", *first[-KEPT + 1 :]})
        assert len(again) == KEPT + 1
        await feed.flush()  # once
        assert len(services[0].whatif.window) == KEPT + 1
        assert len(dead.whatif.window) == len(first)

    clocks.run(scenario())


def test_a_whole_round_of_real_replays_through_the_service():
    async def scenario() -> None:
        bench = Bench()

        async def replay(work: Round) -> AsyncGenerator[Basis | Replayed]:
            for step in replays(work):
                yield step

        bench.whatif._replay = replay
        await bench.whatif.take("a", logged(prompts()[:200], bench.config), 0)
        await bench.whatif.turn()
        table: Any = await bench.whatif.table()
        assert table["candidates"][0]["candidate"] == "ttl-double"
        assert abs(table["model_error"]["error"]["ttft_p99"]) < 0.05

    clocks.run(scenario())
