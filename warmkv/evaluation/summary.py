"""Results in short: per policy and share the mean score, what is left of the full cache's, and the bytes it took.

A mean over tasks weighs every task alike, however many samples it has. What is left (`relative`) compares the same
samples, so that a share which a policy only reaches on long prompts is not compared with the full cache on all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from warmkv.evaluation.plan import FULL

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """A policy at a share, on one task or on all of them."""

    policy: str
    share: float | None  # None: whatever it takes
    score: float  # 0 to 1
    relative: float | None  # score over the full cache's on the same samples; None where that is 0
    nll: float  # nats per token of the answers
    bytes: float  # mean, in use at most
    bytes_share: float  # mean, of the full cache's
    most_bytes_share: float  # the largest of any sample
    kept_tokens: float  # mean, per KV head and layer
    samples: int
    reached: float  # share of the samples on which it could be that small

    def to_json(self) -> Row:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """A policy at a share: all tasks, and each of them."""

    all: Cell
    tasks: dict[str, Cell]


def summarise(rows: Sequence[Row]) -> list[SummaryRow]:
    """Summarise every policy and share that was reached anywhere, in the order of the rows."""
    full = {_sample(row): row["score"] for row in rows if row["policy"] == FULL}
    wanted = Counter(sample[0] for sample in full)
    groups: dict[tuple[str, float | None], dict[str, list[Row]]] = {}
    for row in rows:
        groups.setdefault((row["policy"], row["share"]), {}).setdefault(row["task"], []).append(row)
    return [_entry(of_task, full, wanted) for of_task in groups.values()]


def _sample(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("task", "variant", "length", "depth", "sample"))


def _entry(of_task: dict[str, list[Row]], full: dict[tuple[Any, ...], float], wanted: Counter[str]) -> SummaryRow:
    bases = {task: mean(full[_sample(row)] for row in rows) for task, rows in of_task.items()}
    cells = {task: _cell(rows, bases[task], wanted[task]) for task, rows in of_task.items()}
    first = next(iter(cells.values()))
    score, base = mean(cell.score for cell in cells.values()), mean(bases.values())
    samples = sum(cell.samples for cell in cells.values())
    overall = Cell(
        policy=first.policy,
        share=first.share,
        score=score,
        relative=score / base if base else None,
        nll=mean(cell.nll for cell in cells.values()),
        bytes=mean(cell.bytes for cell in cells.values()),
        bytes_share=mean(cell.bytes_share for cell in cells.values()),
        most_bytes_share=max(cell.most_bytes_share for cell in cells.values()),
        kept_tokens=mean(cell.kept_tokens for cell in cells.values()),
        samples=samples,
        reached=samples / wanted.total(),
    )
    return SummaryRow(overall, cells)


def _cell(rows: Sequence[Row], base: float, wanted: int) -> Cell:
    score, shares = mean(row["score"] for row in rows), [row["bytes"] / row["full_bytes"] for row in rows]
    return Cell(
        policy=rows[0]["policy"],
        share=rows[0]["share"],
        score=score,
        relative=score / base if base else None,
        nll=mean(row["nll"] for row in rows),
        bytes=mean(row["bytes"] for row in rows),
        bytes_share=mean(shares),
        most_bytes_share=max(shares),
        kept_tokens=mean(row["kept_tokens"] for row in rows),
        samples=len(rows),
        reached=len(rows) / wanted,
    )


def pareto(cells: Iterable[Cell]) -> list[Cell]:
    """Return those that no other beats in bytes and score at once, the smallest first.

    Bytes are compared to a percent of the full cache's: budgets are whole tokens, so no two policies match to the byte.
    """
    front: list[Cell] = []
    for cell in sorted(cells, key=lambda cell: (round(cell.bytes_share, 2), -cell.score)):
        if not front or cell.score > front[-1].score:
            front.append(cell)
    return front


def stream_summary(rows: Sequence[Row]) -> list[Row]:
    """Return per policy the perplexity over the whole stream and over its last quarter."""
    out = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        of = [row for row in rows if row["policy"] == policy]
        last = of[-max(1, len(of) // 4) :]
        out.append(
            {
                "policy": policy,
                "perplexity": _perplexity(of),
                "perplexity_last_quarter": _perplexity(last),
                "bytes": of[0]["bytes"],
                "cache_tokens": of[0]["cache_tokens"],
            }
        )
    return out


def document(meta: Row, entries: Sequence[SummaryRow], stream: Sequence[Row]) -> Row:
    """Build `summary.json`: what the simulator reads as the measured quality of a policy at a budget."""
    return {
        "meta": meta,
        "policies": [
            {**entry.all.to_json(), "tasks": {task: cell.to_json() for task, cell in entry.tasks.items()}}
            for entry in entries
        ],
        "stream": stream_summary(stream),
    }


def _perplexity(rows: Sequence[Row]) -> float:
    return math.exp(sum(row["nll"] * row["tokens"] for row in rows) / sum(row["tokens"] for row in rows))


def mean(values: Iterable[float]) -> float:
    """Return the mean of at least one value."""
    values = list(values)
    return math.fsum(values) / len(values)
