"""CPU time that a request takes in a gateway besides its tokens, part by part; cold, and as a conversation's next turn.

See README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # started as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

if TYPE_CHECKING:
    from benchmarks.report import Figure

LENGTHS = (1_024, 8_192, 32_768)  # tokens
MESSAGE_TOKENS = 512
TARGETS = {1_024: 1_500.0, 32_768: 8_000.0}  # microseconds: what it was before anything was kept
REPLICAS = 16


class Parts:
    """CPU microseconds of this process by part; what is spent in a part within another one counts there alone."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def of(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed as a part."""

        def timed(*arguments: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            start = time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                whole = time.process_time() - start
                self.spent[part] += 1e6 * (whole - self._inner.pop())
                self._inner[-1] += whole

        return timed


class Gateway:
    """A gateway's way from a body to the end of its answer, over replicas that answer at once, without HTTP."""

    def __init__(self, tokenizer: str | None) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in a gateway
        from warmkv import recorders, telemetry
        from warmkv.config import load
        from warmkv.platform.gateway.apis import tokens
        from warmkv.platform.gateway.intake import parsing, prompts
        from warmkv.platform.gateway.service import Service
        from warmkv.policies.dispatcher import Dispatcher
        from warmkv.prefixes import breakpoints
        from warmkv.replicas.frames import encode_order
        from warmkv.replicas.loading.tokenizer import load_tokenizer

        config = load(flags=["gateway.max_body_bytes=64MiB"])
        self.parts, self.config = Parts(), config
        self.tokenizer = load_tokenizer(config.model.model_copy(update={"path": tokenizer or config.model.path}))
        of = self.parts.of
        recorder: Any = recorders.RayRecorder(*telemetry.GATEWAY, application="request_cost")
        for name in ("add", "set", "observe"):
            setattr(recorder, name, of("metrics", getattr(recorder, name)))
        for module, name, part in (
            (parsing, "parse", "json"),
            (prompts, "render", "template"),
            (prompts, "tokenize", "lookup"),
            (tokens, "_encode", "tokens"),
            (tokens, "block_hashes", "hashes"),
            (breakpoints, "plan", "breakpoints"),
        ):
            setattr(module, name, of(part, getattr(module, name)))
        self.service = Service(
            config,
            self._answer,
            recorder,
            write_log=of("log", lambda record: record.to_json()),
            clock=time.monotonic,
            wall_clock=time.time,
        )
        self.parsing = parsing.Parsing(self.service, self.tokenizer, 1 << 20)
        self._dispatcher = Dispatcher(config.routing, config.engine.max_slots, random.Random(0), clock=time.monotonic)
        self._names = [f"replica{number}" for number in range(REPLICAS)]
        self._choose, self._encode = of("routing", self._route), of("order", encode_order)

    def _route(self, request: Any) -> str:
        choice = self._dispatcher.choose(request.id, request.hashes, self._names, leaves=len(request.hashes))
        name: str = choice.order[0]
        self._dispatcher.mend(choice, request.hashes)
        self._dispatcher.in_flight.began(request.id)
        self._dispatcher.in_flight.release(request.id, name)
        return name

    async def _answer(self, attempt: Any) -> AsyncGenerator[Any]:
        from warmkv.replicas.protocol import Admitted, Finished, Started

        name = self._choose(attempt.request)
        self._encode(0, attempt.request)
        self._computed = name, attempt.request.hashes
        yield Admitted()
        yield Started(name, 0, 0, 0, 1, 1, 0.0, 0.0)
        yield Finished("length", 1)

    async def ask(self, body: bytes, salt: bytes, number: int) -> dict[str, float]:
        """Answer a request of /v1/messages; CPU microseconds by part, with the rest and the whole."""
        from starlette.requests import Request

        from warmkv.config import LimitsConfig
        from warmkv.platform.gateway.access.limits import TenantLimiter
        from warmkv.platform.tenants import Tenant
        from warmkv.prefixes.mask_table import pack
        from warmkv.request_context import RequestContext

        limiter = TenantLimiter(self.config, time.monotonic, time.time)
        tenant = Tenant("", salt, frozenset(), LimitsConfig())
        self.parts.spent.clear()
        start = time.process_time()
        lease = limiter.begin(Request({"type": "http"}), tenant)
        arrival = self.service.arrive(RequestContext(f"req_{number}"), lease)
        asked = self.parsing.message(arrival, body, self.tokenizer)
        answer = await (await self.service.start("messages", arrival, asked)).begin()
        while await answer.more() is not None:
            pass
        lease.end()
        whole = 1e6 * (time.process_time() - start)
        computed_by, hashes = self._computed
        self._dispatcher.index.add(computed_by, pack(hashes))
        return {**self.parts.spent, "rest": whole - sum(self.parts.spent.values()), "whole": whole}

    def bodies(self, length: int, seed: int) -> list[bytes]:
        """Return two turns of a conversation of new text: the second one has about so many tokens of prompt."""
        draw, ids = random.Random(seed), self.tokenizer.get_vocab().values()
        count = len(ids)
        said = []
        for at in range(max(1, length // MESSAGE_TOKENS) // 2 * 2 + 1):
            text = self.tokenizer.decode([draw.randrange(300, count) for _ in range(MESSAGE_TOKENS)]).strip()
            said.append({"role": "assistant" if at % 2 else "user", "content": [{"type": "text", "text": text}]})
        bodies = []
        for turn in ([], [("assistant", "That is so."), ("user", "Why is that?")]):
            said += [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turn]
            marked = json.loads(json.dumps(said))
            marked[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
            bodies.append({"model": self.config.model.name, "max_tokens": 16, "messages": marked})
        return [json.dumps(body).encode() for body in bodies]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 if a warm request takes longer than what a request took before anything was kept, 0 with --quick."""
    parser = argparse.ArgumentParser(prog="request_cost", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="short prompts once: whether it runs, not how fast")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="conversations of each length (15)")
    parser.add_argument("--tokenizer", metavar="PATH", help="of another model; by default the shipped one's")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (0)")
    options = parser.parse_args(arguments)

    import torch

    from benchmarks import report
    from warmkv.measuring import machine

    lengths, repeats = (LENGTHS[:1], 2) if options.quick else (LENGTHS, options.repeats)
    gateway = Gateway(options.tokenizer)
    measured: dict[tuple[int, str], list[dict[str, float]]] = defaultdict(list)
    asyncio.run(_measure(gateway, lengths, repeats, options.seed, measured))
    figures = _figures(measured)
    notes = ["microseconds of CPU; `lookup` finds what is kept of a prompt, and puts tokens and hashes together"]
    if options.json is not None:
        commit = os.environ.get("WARMKV_COMMIT") or machine.commit()
        settings = {"lengths": lengths, "repeats": repeats, "seed": options.seed, "tokenizer": options.tokenizer}
        identity = machine.identity(torch.device("cpu"))
        report.write(options.json, report.document(identity, machine.versions(), commit, settings, figures, notes))
    report.show("CPU of a request in the gateway", figures, notes)
    return 1 if not options.quick and any(each.met is False for each in figures) else 0


async def _measure(
    gateway: Gateway,
    lengths: Sequence[int],
    repeats: int,
    seed: int,
    measured: dict[tuple[int, str], list[dict[str, float]]],
) -> None:
    number = 0
    for length in lengths:
        for repeat in range(-1, repeats):  # the first one is not counted: what is made once is made there
            number += 1
            bodies = gateway.bodies(length, seed + number)
            gc.collect()
            for state, body in zip(("cold", "warm"), bodies, strict=True):
                parts = await gateway.ask(body, f"{number}".encode(), 2 * number + (state == "warm"))
                if repeat >= 0:
                    measured[length, state].append(parts)


def _figures(measured: dict[tuple[int, str], list[dict[str, float]]]) -> list[Figure]:
    from benchmarks.report import figure

    found = []
    for (length, state), requests in measured.items():
        parts = sorted(requests[0], key=lambda part: -statistics.median(each.get(part, 0.0) for each in requests))
        for part in parts:
            target = TARGETS.get(length) if (part, state) == ("whole", "warm") else None
            values = [each.get(part, 0.0) for each in requests]
            found.append(figure(f"{part}_{state}_{length}", values, target, "lower"))
    return found


if __name__ == "__main__":
    sys.exit(main())
