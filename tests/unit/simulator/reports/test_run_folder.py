"""What `warmkv replay --out` writes."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("matplotlib")

from tests.unit.simulator.conversations import EXACT, config, record  # noqa: E402
from warmkv.config import load  # noqa: E402
from warmkv.policies.pricing import price  # noqa: E402
from warmkv.simulator.reports import run_folder  # noqa: E402
from warmkv.simulator.studies.replays.replay import run  # noqa: E402
from warmkv.simulator.studies.replays.summary import figures  # noqa: E402
from warmkv.simulator.studies.replays.variants import Variant  # noqa: E402

SETTINGS = config("engine.max_context=64", "cluster.replicas=2", "prefix_cache.host.memory_bytes=1MB")


def records():
    asked = [record(n, [n % 3] * 40, 5 + n, ends=[40], ttls=["5m"], name=f"r{n}") for n in range(20)]
    return [*asked, record(19.0, [9] * 65, name="too long")]


def meta(settings):
    about = {"file": "log <1>.jsonl"}
    return {"trace": about, "step_times": {"source": "made up"}, "config": settings.model_dump(mode="json")}


@pytest.fixture(scope="module")
def done():
    return run(records(), SETTINGS, Variant(), EXACT)


@pytest.fixture(scope="module")
def folder(done, tmp_path_factory):
    path = tmp_path_factory.mktemp("written") / "run"
    run_folder.write(path, done, meta(SETTINGS), SETTINGS.prices_of)
    return path


def test_every_request_has_a_row(folder, done):
    rows = pq.read_table(folder / "requests.parquet").to_pylist()
    assert [row["id"] for row in rows] == [job.record.id for job in done.jobs]
    assert rows[-1]["replica"] is rows[-1]["finished"] is rows[-1]["dollars"] is None
    served = rows[:-1]
    assert sum(row["reused_tokens"] for row in served) == done.result.reused_tokens
    assert sum(row["dollars"] for row in served) == pytest.approx(done.result.dollars)
    assert max(row["finished"] for row in served) == done.result.seconds
    assert all(row["arrival"] <= row["started"] < row["first_token"] <= row["finished"] for row in served)


def test_the_series_ends_where_the_figures_are(folder, done):
    series = pq.read_table(folder / "timeseries.parquet").to_pydict()
    assert {len(column) for column in series.values()} == {run_folder.POINTS + 1}
    last = {name: column[-1] for name, column in series.items()}
    assert last["seconds"] == done.result.seconds
    assert (last["arrived"], last["served"], last["waiting"], last["running"]) == (21, 20, 0, 0)
    assert last["prompt_tokens"] == done.result.prompt_tokens
    assert last["reused_tokens"] == done.result.reused_tokens
    assert last["slot_bytes"] == 0
    assert 0 < max(series["slot_bytes"]) <= done.result.slots.peak
    assert 0 < max(series["device_bytes"]) <= done.result.tiers["device"].peak
    assert set(series["host_bytes"]) == {0}
    for at in (100, 250, 400):
        moment = series["seconds"][at]
        running = sum(job.started <= moment < job.finished for job in done.jobs if job.replica)
        assert series["running"][at] == running


def test_the_summary_is_flat_and_agrees_with_the_result(folder, done):
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == json.loads(json.dumps(figures(done.result)))
    assert all(isinstance(value, int | float) for value in summary.values())
    result = done.result
    assert summary["refused"] == 1
    assert summary["hit_rate_tokens"] == result.reused_tokens / result.prompt_tokens
    assert summary["ttft_p50"] <= summary["ttft_p90"] <= summary["ttft_p95"] <= summary["ttft_p99"]
    assert summary["resident_bytes_device_max"] >= summary["resident_bytes_device_mean"] > 0
    assert summary["resident_bytes_host_max"] == 0
    assert summary["gpu_hours"] == pytest.approx(2 * result.seconds / 3600)
    assert summary["gpu_dollars"] == pytest.approx(summary["gpu_hours"] * SETTINGS.simulator.gpu.dollars)
    tokens = summary["prompt_tokens"] + summary["output_tokens"]
    for kind in ("", "gpu_"):
        assert summary[f"{kind}dollars_per_million_tokens"] == pytest.approx(summary[f"{kind}dollars"] / tokens * 1e6)
    assert summary["saving"] == pytest.approx(1 - summary["dollars"] / summary["dollars_uncached"])


def test_the_slo_is_counted_as_it_is_set(done):
    served = [job for job in done.jobs if job.replica]
    ttfts = sorted(job.first - job.arrival for job in served)
    flags = [f"simulator.slo.ttft={ttfts[9]!r}", "simulator.slo.tpot=1000"]
    strict = run(records(), config("engine.max_context=64", "cluster.replicas=2", *flags), Variant(), EXACT)
    in_time = sum(ttft <= ttfts[9] for ttft in ttfts)
    assert strict.result.in_slo == in_time < done.result.in_slo
    assert strict.result.goodput == in_time / strict.result.seconds


def test_bills_add_up_and_gpus_are_priced(done):
    assert sum(done.result.bills.values()) == pytest.approx(done.result.dollars)
    assert done.result.dollars == pytest.approx(sum(price(u, SETTINGS.prices).total for u in done.usages))
    dear = run(records(), config("simulator.gpu.dollars=7", "cluster.gpus_per_replica=4"), Variant(), EXACT)
    assert dear.result.gpu_hours == pytest.approx(4 * dear.result.seconds / 3600)
    assert dear.result.gpu_dollars == pytest.approx(7 * dear.result.gpu_hours)


def test_the_report_shows_replicas_only_where_they_change(done, tmp_path):
    failing = config("cluster.replicas=2", "simulator.failures=[{at: 18.1}]")
    for number, (finished, shown) in enumerate(((done, False), (run(records(), failing, Variant(), EXACT), True))):
        folder = tmp_path / str(number)
        run_folder.write(folder, finished, meta(SETTINGS), SETTINGS.prices_of)
        page = (folder / "report.html").read_text()
        assert ("replicas on average, at most" in page) == shown
        assert ("sent again before" in page) == (finished.result.retries + finished.result.resumptions > 0)
        rows = pq.read_table(folder / "requests.parquet").to_pydict()
        assert sum(filter(None, rows["retries"])) == finished.result.retries == 0
        assert sum(filter(None, rows["resumptions"])) == finished.result.resumptions == shown
        series = pq.read_table(folder / "timeseries.parquet").to_pydict()
        assert (set(series["replicas"]) == {1, 2}) == shown


class Page(HTMLParser):
    """Tags that are open, and all text."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.ids = [], [], []

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_report_is_one_page_with_the_figures(folder, done):
    text = (folder / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert not page.open
    assert len(set(page.ids)) == len(page.ids)
    words = " ".join(page.text)
    assert "Replay of log <1>.jsonl" in words
    assert f"{done.result.token_hit_rate:.1%}" in words
    assert "cluster.replicas = 2" in words
    assert "nan" not in words.split()
    assert not re.search(r"(src|href)=\"(?!#)", text)  # nothing from elsewhere


def test_the_cost_of_groups_with_gpus_of_their_own_names_no_price(tmp_path):
    for number, (tree, says) in enumerate(
        [
            ("simulator: {gpu: L4}", "GPU cost of all groups"),
            ("cluster: {replicas: 2}", "GPU cost at $3 an hour (H100-SXM"),
        ]
    ):
        settings = load(flags=[f"cluster.groups={{b: {{{tree}}}}}"], environ={})
        run_folder.write(
            tmp_path / str(number), run([], settings, Variant(), EXACT), meta(settings), settings.prices_of
        )
        assert says in (tmp_path / str(number) / "report.html").read_text()


def test_the_same_run_writes_the_same_files(folder, tmp_path):
    other = run(records(), SETTINGS, Variant(), EXACT)
    run_folder.write(tmp_path / "other", other, meta(SETTINGS), SETTINGS.prices_of)
    for name in ("meta.json", "summary.json", "report.html", "requests.parquet", "timeseries.parquet"):
        assert (folder / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_an_empty_run_is_written_too(tmp_path):
    settings = load(environ={})
    empty = run([], settings, Variant(), EXACT)
    run_folder.write(tmp_path, empty, meta(settings), settings.prices_of)
    assert json.loads((tmp_path / "summary.json").read_text())["requests"] == 0
    assert np.all(np.array(pq.read_table(tmp_path / "timeseries.parquet")["arrived"]) == 0)


def test_nothing_is_overwritten(folder, done):
    before = (folder / "summary.json").read_bytes()
    with pytest.raises(run_folder.RunFolderError, match="not empty; choose another --out"):
        run_folder.write(folder, done, meta(SETTINGS), SETTINGS.prices_of)
    assert (folder / "summary.json").read_bytes() == before
