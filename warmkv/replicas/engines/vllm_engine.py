"""vLLM as the engine of a replica: its engine core in a process of its own, warmkv's contract around its cache."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llguidance import LLMatcher

from warmkv.config import Config, ConfigError, EngineConfig
from warmkv.policies import batching
from warmkv.policies.contents import Contents
from warmkv.policies.fair_queue import FairQueue
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.background import Background
from warmkv.replicas.block_store.presence import Publish
from warmkv.replicas.completions import Completions
from warmkv.replicas.engine.faults import FailureKind
from warmkv.replicas.engine.scheduler import Emit
from warmkv.replicas.engine.stats import EngineStats
from warmkv.replicas.engines.event_stream import EventStream
from warmkv.replicas.engines.interface import Parts, Place
from warmkv.replicas.engines.ledger import PrefixLedger
from warmkv.replicas.engines.orphans import children_end_with_this_process, settled
from warmkv.replicas.engines.vllm_requests import check, failure, generate
from warmkv.replicas.engines.vllm_start import TOPIC, Model, Steps, endpoint, plan_memory, read_model, start_llm
from warmkv.replicas.engines.zmq_events import batches, replayed
from warmkv.replicas.protocol import (
    LEAST_LOGPROB,
    STOPPING,
    BlocksWanted,
    Failed,
    Finished,
    GenerateRequest,
    SamplingParams,
    Started,
    TokenLogprobs,
)
from warmkv.replicas.refusals import check_queue
from warmkv.replicas.transfer import BlockPayloads, BlocksOffered

log = logging.getLogger(__name__)
T = TypeVar("T")

EXPIRE_SECONDS = 0.5  # between two looks at TTLs


def build(config: Config, tokenizer: Any, place: Place, publish: Publish, say: Callable[[str], None]) -> Parts:
    """Start vLLM's engine core with the model. Raises where it cannot start; `say` is told what is next."""
    model = read_model(config)
    cache, (plan, misfit) = config.prefix_cache, plan_memory(config, model, place.share)
    log.info(plan.summary)
    if misfit:
        log.warning(misfit)
    folder = Path(tempfile.mkdtemp(prefix="warmkv-kv-events-"))
    say("starting vLLM")
    steps, watcher = Steps(time.monotonic), children_end_with_this_process()
    try:
        llm = start_llm(config, model, plan, place.threads, folder, steps)
        limit = llm.vllm_config.cache_config.num_gpu_blocks * cache.block_size * model.token_bytes
        if cache.keep_warm > limit // 2:
            llm.shutdown()
            raise ConfigError(f"prefix_cache.keep_warm must not exceed half of vLLM's cache, which has {limit} bytes")
    except Exception:  # not for an exit: then this process ends
        watcher.kill()
        watcher.communicate()
        raise
    settled(watcher)
    lifetimes, clock = Lifetimes.of(cache), time.monotonic
    ledger = PrefixLedger(
        cache.block_size, model.token_bytes, limit, lifetimes, clock, publish, cache.keep_warm, enabled=cache.enabled
    )
    engine = VllmEngine(llm, config.engine, model, ledger, steps, folder, place.replica, clock, watcher)
    return Parts(engine, plan.to_json(), None, lambda terms, ask, recorder: Alone())


class VllmEngine:
    """Serve the engine interface by vLLM's AsyncLLM. For the thread of the event loop, but for `stop`."""

    def __init__(
        self,
        llm: Any,
        config: EngineConfig,
        model: Model,
        ledger: PrefixLedger,
        steps: Steps,
        folder: Path,
        name: str,
        clock: Callable[[], float],
        watcher: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._llm, self._config, self._model, self.store = llm, config, model, ledger
        self._steps, self._folder, self._name, self._clock = steps, folder, name, clock
        self._step_tokens = config.tokens_per_step(on_gpu=model.device.type == "cuda")
        self.flush: Callable[[], None] = lambda: None
        self._flushing = False
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._waiting: FairQueue[GenerateRequest] = FairQueue()  # those without a token, as vLLM's own queue has them
        self._beside = Background()
        self.stream: EventStream | None = None  # once it is followed
        self._told = asyncio.Event()  # of blocks that came to vLLM's cache, or left it
        self._watcher = watcher  # which kills vLLM's processes if this one ends
        self._completions = Completions()
        self._failures: dict[FailureKind, int] = {"request": 0, "device": 0}
        self._touched = 0
        self._stopping = False

    @property
    def turns(self) -> int:
        """Return how many steps there were."""
        return self._steps.turns

    def start(self) -> None:
        """Begin to follow the events of vLLM's cache."""
        self._beside.start("following KV events", self._follow())
        self._beside.start("expiring prefixes", self._expire())
        self._beside.start("touching prefixes", self._keep_warm())

    def submit(self, request: GenerateRequest, emit: Emit, matcher: LLMatcher | None = None) -> None:
        """Queue a request; `emit` is called with Started, drawn tokens, and an end. Raises EngineError."""
        check(
            request,
            self._config.capabilities(self._model.storage),
            self._model.max_context,
            self._model.sizes.vocabulary,
        )
        waiting, now = len(self._tasks) - self._config.max_slots, self._clock()
        check_queue(request, waiting, self._config.max_queue, self._completions, now)
        if not self._tasks:
            self._completions.begin(now)
            self._steps.turned = now
        work = len(request.token_ids) + request.sampling.max_tokens
        delay = 0 if request.resume else batching.delay(self.store.lacking_tokens(request), self._step_tokens)
        (tag, _) = self._waiting.push(request, request.tenant, work, delay=delay)
        self._tasks[request.id] = task = asyncio.create_task(self._answer(request, emit, int(tag)))
        task.add_done_callback(partial(self._ended, request))

    def cancel(self, request_id: str) -> None:
        """Stop a request; nothing happens if it has ended already."""
        if task := self._tasks.get(request_id):
            task.cancel()

    def call(self, action: Callable[[], None]) -> None:
        """Run an action now: events are published in this thread, too."""
        action()

    def check_turning(self, limit: float) -> None:
        """Raise RuntimeError where vLLM or a task beside it has ended, or vLLM tells of no step for `limit` seconds."""
        if self._llm.errored:
            raise RuntimeError("vLLM's engine core has ended: see the replica's log")
        self._beside.check()
        if self._tasks and (still := self._clock() - self._steps.turned) > limit:
            raise RuntimeError(f"the engine has been in one step for {still:.0f} s")

    def drop_prefixes(self, tenant: str) -> Future[int]:
        """Forget what is stored of a tenant. vLLM evicts it in time: nobody finds it under its new salt."""
        return _known(self.store.drop(tenant))

    def contents(self, most: int) -> Future[Contents]:
        """Look up at most `most` of the blocks that may be read, with their lives."""
        return _known(self.store.contents(most))

    def stats(self) -> EngineStats:
        """Return the numbers as of the last step."""
        tiers, limit = self.store.tier_bytes, self.store.tier_limits["device"]
        used = round(self._steps.usage * limit)
        stored = min(tiers["device"], limit - used)  # one pool: blocks that running requests use are in `used`
        return EngineStats(
            waiting=max(0, len(self._tasks) - self._steps.running),
            decoding=self._steps.running,
            preempted=self._steps.preempted,
            preempted_for="memory",
            slots=self._steps.running,
            weight_bytes=self._model.sizes.weights,
            slot_bytes=used,
            workspace_bytes=0,
            store_bytes=stored,
            store_blocks=len(self.store),
            pinned_bytes=0,
            store_tiers=tiers,
            evicted=sum(count for (_, why), count in self.store.left.items() if why != "expired"),
            expired=sum(count for (_, why), count in self.store.left.items() if why == "expired"),
            failures=dict(self._failures),
            slot_limit=limit,
            compressed={},
            touched=self._touched,
        )

    def stop(self, spill_seconds: float = 0.0) -> None:
        """End vLLM; what is in flight fails. Blocks until its processes have ended, for some seconds."""
        self._loop.call_soon_threadsafe(self._cancel_all)
        self._llm.shutdown()
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.communicate()
        with contextlib.suppress(OSError):
            for socket in self._folder.iterdir():
                socket.unlink()
            self._folder.rmdir()

    def _cancel_all(self) -> None:
        self._stopping = True
        self._beside.cancel()
        for task in self._tasks.values():
            task.cancel()

    # --- an answer

    async def _answer(self, request: GenerateRequest, emit: Emit, priority: int) -> None:
        arrived, sampling = self._clock(), request.sampling
        drawn, started = 0, False
        try:
            salt, eos_ids = self.store.salt(request), self._model.eos_ids
            async for output in generate(self._llm, request, salt, eos_ids, priority):
                if not started:
                    started = True
                    self._waiting.take(request)
                    emit(self._started(request, output, arrived))
                    for token in request.resume[: sampling.max_tokens]:  # its client has them: no more is told of them
                        drawn += 1
                        emit(TokenLogprobs(token, LEAST_LOGPROB) if sampling.logprobs is not None else token)
                (part,) = output.outputs
                for at, token in enumerate(part.token_ids):
                    if drawn >= sampling.max_tokens:
                        break
                    drawn += 1
                    if part.finish_reason == "stop" and at == len(part.token_ids) - 1:
                        break  # what ends the answer is counted, but not told
                    emit(token if sampling.logprobs is None else _logprobs(token, part.logprobs[at], sampling))
                if output.finished:
                    emit(self._end(request, part, drawn))
                self._flush_soon()
        except asyncio.CancelledError:
            if self._stopping:
                emit(STOPPING)
                self._flush_soon()
            raise
        except Exception as error:
            end = failure(error, engine_lives=not self._llm.errored)
            if end.fault != "refused":
                log.exception("vLLM failed with a request")
                self._failures["request" if end.fault == "request" else "device"] += 1
            emit(end)
            self._flush_soon()

    def _started(self, request: GenerateRequest, output: Any, arrived: float) -> Started:
        now, times = self._clock(), output.metrics
        prefill = max(0.0, times.first_token_ts - times.scheduled_ts) if times is not None else now - arrived
        reading = self.store.began(request, output.num_cached_tokens or 0, arrived)
        tokens = len(request.token_ids)
        return Started(
            replica=self._name,
            hit=reading.hit,
            written=reading.written,
            cached_tokens=reading.cached_tokens,
            kept_tokens=tokens,
            resident_bytes=tokens * self._model.token_bytes,
            queue_seconds=max(0.0, now - arrived - prefill),
            prefill_seconds=prefill,
            tiers={"device": reading.cached_tokens} if reading.cached_tokens else {},
            ttl=reading.ttl,
        )

    def _end(self, request: GenerateRequest, part: Any, drawn: int) -> Finished | Failed:
        sampling, reason = request.sampling, part.finish_reason
        if sampling.max_tokens == 0 or reason == "length":
            return Finished("length", drawn)
        if reason == "stop":
            ends = not sampling.ignore_eos and part.token_ids[-1] in self._model.eos_ids
            return Finished("end" if ends else "stop", drawn)
        if reason == "abort":
            return Finished("cancelled", drawn)
        return Failed(f"vLLM ended the answer by {reason!r}")

    def _ended(self, request: GenerateRequest, task: asyncio.Task[None]) -> None:
        del self._tasks[request.id]
        self._waiting.remove(request)
        self.store.ended(request.id)
        self._completions.ended(self._clock())

    def _flush_soon(self) -> None:
        """Hand over what was emitted, once for all answers of a step."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self.flush()

    # --- beside the answers

    async def _follow(self) -> None:
        import zmq
        import zmq.asyncio

        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.set_hwm(0)
            socket.connect(endpoint(self._folder, "events"))
            socket.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
            replay = partial(replayed, context, endpoint(self._folder, "replay"))
            self.stream = stream = EventStream(self.store.take, replay, self._reset)
            async for number, payload in batches(socket):
                try:
                    await stream.arrived(number, payload)
                    self._told.set()
                except Exception:
                    if self._llm.errored:  # of which the health check tells
                        return
                    log.exception("KV events could not be followed")

    async def _reset(self) -> None:
        await self._llm.reset_prefix_cache(reset_running_requests=True)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_SECONDS)
            self.store.expire()

    async def _keep_warm(self) -> None:
        numbers = itertools.count()
        while True:
            await self._told.wait()
            self._told.clear()
            while (due := self.store.to_touch(self._steps.usage)) is not None:
                prefix, salt = due
                request = GenerateRequest(
                    f"touch-{next(numbers)}", prefix.token_ids, (), SamplingParams(1, 0.0), PolicySpec()
                )
                (tag, _) = self._waiting.push(request, request.tenant, 0)
                try:
                    async for _ in generate(self._llm, request, salt, (), int(tag)):
                        pass
                    self._touched += 1
                except Exception:
                    if self._llm.errored:  # of which the health check tells
                        return
                    log.exception("a prefix could not be touched")
                    break
                finally:
                    self._waiting.remove(request)


class Alone:
    """Moves no blocks: vLLM lends none and takes none."""

    def helps(self, request: GenerateRequest) -> bool:
        """Return False."""
        return False

    async def prepare(self, request: GenerateRequest) -> None:
        """Do nothing."""

    def started(self, request: GenerateRequest, started: Started) -> None:
        """Do nothing."""

    async def lend(self, wanted: BlocksWanted) -> BlockPayloads:
        """Return no blocks."""
        return BlockPayloads()

    async def take_over(self, offered: BlocksOffered) -> int:
        """Take none."""
        return 0

    async def hand_over(
        self,
        peers: Sequence[str],
        holders: Callable[[Sequence[bytes]], Awaitable[Mapping[bytes, Sequence[str]]]],
        offer: Callable[[BlocksOffered], Awaitable[int]],
    ) -> int:
        """Give none."""
        return 0


def _known(value: T) -> Future[T]:
    result: Future[T] = Future()
    result.set_result(value)
    return result


def _logprobs(token: int, found: Mapping[int, Any], sampling: SamplingParams) -> TokenLogprobs:
    """Return log-probabilities of a drawn token as warmkv tells them."""
    best = sorted(((entry.rank, other, entry.logprob) for other, entry in found.items()))[: sampling.logprobs]
    top = tuple((other, max(logprob, LEAST_LOGPROB)) for _, other, logprob in best)
    return TokenLogprobs(token, max(found[token].logprob, LEAST_LOGPROB), top)
