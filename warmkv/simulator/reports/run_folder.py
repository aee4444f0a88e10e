"""A run as a folder: its input, every request's outcome, the cluster over time, and the totals.

`meta.json` (trace, settings, step times), `requests.parquet`, `timeseries.parquet`, `summary.json` (flat, see
`summary.py`) and `report.html`. The same replay writes the same files. Needs pyarrow and matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from warmkv.config import Prices
from warmkv.faults import UserError
from warmkv.policies.pricing import price
from warmkv.simulator.reports import run_page
from warmkv.simulator.studies.replays.replay import Run
from warmkv.simulator.studies.replays.summary import figures
from warmkv.terminal import json_text

POINTS = 500  # of the time series, evenly over the run

REQUESTS = pa.schema(
    [
        ("id", pa.string()),
        ("tenant", pa.string()),
        ("replica", pa.string()),  # null if it was refused, like all that follows from being served
        ("arrival", pa.float64()),  # seconds from the first arrival, like all times
        ("started", pa.float64()),
        ("first_token", pa.float64()),
        ("finished", pa.float64()),
        ("input_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("reused_tokens", pa.int64()),  # prompt tokens that were not computed
        ("blocks", pa.int64()),  # full blocks of the prompt
        ("blocks_found", pa.int64()),
        ("slot_bytes", pa.int64()),
        ("retries", pa.int64()),  # how often its replica failed before its first token
        ("resumptions", pa.int64()),  # and after it
        ("dollars", pa.float64()),  # billed
    ]
)
"""One row for every request, in the order of the trace."""


class RunFolderError(UserError):
    """A folder that a run cannot be written to; the message says why."""


def check(folder: Path) -> None:
    """Check that the folder is empty. Raises RunFolderError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{folder} is there and not empty; choose another --out")


def write(folder: Path, run: Run, meta: Mapping[str, Any], prices_of: Callable[[str], Prices]) -> None:
    """Write a run, into a new folder or an empty one. Raises RunFolderError, and OSError as the disk does."""
    check(folder)
    folder.mkdir(parents=True, exist_ok=True)
    series = timeseries(run)
    pq.write_table(_requests(run, prices_of), folder / "requests.parquet")
    pq.write_table(pa.table(series), folder / "timeseries.parquet")
    for name, document in (("meta.json", meta), ("summary.json", figures(run.result))):
        (folder / name).write_text(json_text(document) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(run_page.render(run, series, meta), encoding="utf-8")


def timeseries(run: Run) -> dict[str, Any]:
    """Return columns over time.

    Requests `waiting` and `running`, replicas, bytes by place; the others count up from 0.
    """
    jobs, served = run.jobs, run.jobs.served()
    times = np.linspace(0.0, run.result.seconds, POINTS + 1)

    def until(moments: Any, amounts: Any = None) -> Any:
        """Count the moments up to each time, or sum their amounts."""
        order = np.argsort(moments, kind="stable")
        total = np.arange(len(moments) + 1)
        if amounts is not None:
            total = np.concatenate([[0], np.cumsum(amounts[order], dtype=np.int64)])
        return total[np.searchsorted(moments[order], times, side="right")]

    arrived, started = until(jobs.column("arrival")[served]), until(jobs.column("started")[served])
    finished, firsts = until(jobs.column("finished")[served]), jobs.column("first")[served]
    return {
        "seconds": times,
        "arrived": until(jobs.column("arrival")),
        "served": finished,
        "waiting": arrived - started,
        "running": started - finished,
        "prompt_tokens": until(firsts, jobs.records.input_tokens[served]),
        "reused_tokens": until(firsts, jobs.column("reused")[served]),
        "replicas": run.outcome.alive.at(times),
        "slot_bytes": run.outcome.slots.at(times),
        **{f"{tier}_bytes": level.at(times) for tier, level in run.outcome.tiers.items()},
    }


def _requests(run: Run, prices_of: Callable[[str], Prices]) -> Any:
    jobs, records = run.jobs, run.jobs.records
    is_served = jobs.column("replica") > 0
    dollars = np.zeros(len(jobs))
    models = [model for model, served in zip(records.values("model"), is_served.tolist(), strict=True) if served]
    prices = {model: prices_of(model) for model in set(models)}
    dollars[is_served] = [price(usage, prices[model]).total for usage, model in zip(run.usages, models, strict=True)]
    plain = {
        "id": pa.array(records.id[number] for number in range(len(jobs))),
        "tenant": records.values("tenant"),
        "arrival": jobs.column("arrival"),
        "input_tokens": records.input_tokens,
        "output_tokens": records.output_tokens,
        "blocks": records.hashes.counts,
    }
    of_served = {
        "replica": np.array(jobs.replicas, dtype=object)[jobs.column("replica")],
        "started": jobs.column("started"),
        "first_token": jobs.column("first"),
        "finished": jobs.column("finished"),
        "reused_tokens": jobs.column("reused"),
        "blocks_found": jobs.column("blocks_found"),
        "slot_bytes": jobs.slot_bytes,
        "retries": jobs.column("retries"),
        "resumptions": jobs.column("resumptions"),
        "dollars": dollars,
    }
    columns = plain | {name: pa.array(values, mask=~is_served) for name, values in of_served.items()}
    return pa.table([pa.array(columns[field.name]).cast(field.type) for field in REQUESTS], schema=REQUESTS)
