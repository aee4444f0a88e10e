"""Requests of aiperf: `profile_export.jsonl`, and the prompts in `inputs.json` beside it.

A turn's prompt is what was sent in its conversation so far. The answers in it are not in the files: each stands for a
text of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from warmkv.prefixes.reported_usage import split
from warmkv.simulator.traces.calls import NOTE, ONE_SERVER, Call, Texts, check
from warmkv.simulator.traces.columns import RowError, TraceError
from warmkv.simulator.traces.rows import LONGEST, Format, Parse, Reading, field, has_keys, mapping, number, objects

KEYS = ("metadata", "metrics", "request_start_ns")
INPUTS = "inputs.json"
Payloads = Mapping[str, list[Mapping[str, Any]]]


def parser(reading: Reading) -> Parse:
    texts, payloads = Texts(reading), _payloads(reading.file)

    def parse(line: str) -> Iterable[Call | None]:
        row = mapping(line)
        metadata, metrics = (_object(row, name) for name in ("metadata", "metrics"))
        if row.get("error") or metadata.get("was_cancelled"):
            return (None,)
        if metadata.get("benchmark_phase", "profiling") != "profiling":
            return ()
        prompt = _metric(metrics, "usage_prompt_tokens") or _metric(metrics, "input_sequence_length")
        output = _metric(metrics, "usage_completion_tokens") or _metric(metrics, "output_sequence_length")
        start = number(metadata, "request_start_ns")
        try:
            usage = split(int(prompt), int(output), int(_metric(metrics, "usage_prompt_cache_read_tokens")), {})
        except ValueError as error:
            raise RowError(str(error)) from None
        session = str(metadata.get("x_correlation_id") or metadata.get("conversation_id") or "")
        call = Call(
            arrival=start / 1e9,
            usage=check(usage),
            session=session,
            ttft=_metric(metrics, "time_to_first_token") / 1e3,
            e2e=_metric(metrics, "request_latency") / 1e3,
            replica=ONE_SERVER,
        )
        turns, turn = payloads.get(str(metadata.get("conversation_id")), []), metadata.get("turn_index") or 0
        return (texts.named(call, _body(turns[: turn + 1], session) if turn < len(turns) else {}),)

    return parse


def _object(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(found := field(row, name), dict):
        raise RowError(f"{name} must be an object")
    return found


def _metric(metrics: Mapping[str, Any], name: str) -> float:
    metric = metrics.get(name)
    return number(metric, "value") if isinstance(metric, dict) else 0.0


def _payloads(file: Path | None) -> Payloads:
    """Read the payloads of conversations beside a file; none if they are not there. Raises TraceError."""
    path = file and file.with_name(INPUTS)
    if path is None or not path.is_file():
        return {}
    try:
        with path.open(encoding="utf-8", errors="replace") as opened:
            text = opened.read(LONGEST + 1)
        if len(text) > LONGEST:
            raise TraceError(f"{path}:1: more than {LONGEST:,} characters")
        found = {str(one["session_id"]): list(one["payloads"]) for one in json.loads(text)["data"]}
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TraceError(f"{path}:1: not the inputs of aiperf: {type(error).__name__}: {error}") from None
    return found


def _body(payloads: list[Mapping[str, Any]], session: str) -> Mapping[str, Any]:
    """Return the request of the last of a conversation's turns."""
    last = payloads[-1]
    messages = last.get("messages")
    if not isinstance(messages, list) or any(one.get("role") == "assistant" for one in messages):
        return last  # it has the conversation in it
    told: list[Any] = []
    for number_, payload in enumerate(payloads[:-1]):
        told += [*payload.get("messages", []), {"role": "assistant", "content": f"answer {number_} of {session}"}]
    return {**last, "messages": [*told, *messages]}


AIPERF = Format("aiperf", lambda line: has_keys(line, KEYS), parser, objects, NOTE, records=True)
