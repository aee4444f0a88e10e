"""From a tokenized prompt to a started answer: what a request costs, where it may read, and what is written down."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from warmkv import recorders, telemetry
from warmkv.config import Config, Prices, refusal
from warmkv.platform.gateway.access.limits import Lease
from warmkv.platform.gateway.access.rights import check_options
from warmkv.platform.gateway.admission import SubmittedRequest
from warmkv.platform.gateway.apis.answer import Answer, Status
from warmkv.platform.gateway.apis.errors import invalid
from warmkv.platform.gateway.apis.schema import ParsedRequest
from warmkv.platform.gateway.apis.tokens import Prompt
from warmkv.platform.gateway.faults import ErrorLog
from warmkv.platform.gateway.intake.overload import Backlog
from warmkv.platform.gateway.live import RecentRequests
from warmkv.platform.gateway.resume import Send, Sink, resumed
from warmkv.platform.live_config import Version, described, in_force
from warmkv.policies import budgets, pricing
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.prefixes import breakpoints, hashing
from warmkv.prefixes.misses import Asked, Finding, Found, PromptHistory
from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.usage import Usage
from warmkv.prefixes.writers import Writers
from warmkv.replicas.protocol import GenerateRequest, Started, Terms
from warmkv.request_context import RequestContext


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """What is in force: the configuration under a version, and what follows from it for a request."""

    config: Config
    prices: Prices  # of the model that is served
    terms: Terms

    @classmethod
    def of(cls, start: Config, version: Version) -> LiveConfig:
        """Return the policy of a version. Raises ConfigError where it does not fit the configuration of the start."""
        config = in_force(start, version)
        terms = Terms(version.number, Lifetimes.of(config.prefix_cache))
        return cls(config, config.prices, terms)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Hold of a request that came in: its id, when by the service's clock and in Unix time, when it times out by that
    clock, what was in force then, whose limits it counts towards, and the session that its headers name.
    """

    context: RequestContext
    begun: float
    time: float
    deadline: float
    policy: LiveConfig
    lease: Lease
    session: str = ""

    @property
    def id(self) -> str:
        return self.context.id


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several answers to an HTTP request. `leader` answers the same prompt and has computed it."""

    number: int  # among all of them
    tokens: int = 0  # that count towards the tenant's limits with it: those of all answers, with the first one
    leader: Answer | None = None


class Service:
    """Hold everything that endpoints share.

    `send` makes an attempt at a request and streams the replica's events; `group_of` tells a replica's group.
    """

    def __init__(
        self,
        config: Config,
        send: Send,
        recorder: recorders.Recorder,
        *,
        write_log: Callable[[RequestRecord], None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        group_of: Callable[[str], str] = lambda replica: "",
    ) -> None:
        self._group_of = group_of
        self.config, self._send, self._recorder = config, send, recorder
        self.capabilities = tuple(config.capabilities.values())
        self._keeps_generated = any(group.keeps_generated for group in self.capabilities)
        self._write_log, self._clock, self._wall_clock = write_log, clock, wall_clock
        self._writers, self._tenant = Writers(), recorders.Bounded()
        self.history = PromptHistory(tells=config.cluster.gateways > 1)
        self.backlog = Backlog(clock)  # requests without a first token
        self.faults = ErrorLog(recorder, clock)
        self.recent = RecentRequests(clock)
        self.take(Version())

    @property
    def clock(self) -> Callable[[], float]:
        """Return the clock of monotonic seconds."""
        return self._clock

    @property
    def wall_clock(self) -> Callable[[], float]:
        """Return the clock of Unix time."""
        return self._wall_clock

    @property
    def recorder(self) -> recorders.Recorder:
        """Return where metrics go."""
        return self._recorder

    def take(self, version: Version) -> None:
        """Bring a version into force for requests that come from now on. Raises ConfigError; then nothing changes."""
        self.policy = LiveConfig.of(self.config, version)
        self._recorder.set(telemetry.LIVE_CONFIG_VERSION, version.number)
        self._recorder.forget(telemetry.LIVE_CONFIG_CHANGE)
        if version.number:
            self._recorder.set(telemetry.LIVE_CONFIG_CHANGE, 1, version=str(version.number), **described(version))

    def arrive(self, context: RequestContext, lease: Lease, session: str = "") -> Arrival:
        """Note when a request came in; what is in force then holds for it to its end."""
        now = self._clock()
        deadline = now + self.config.gateway.request_timeout_seconds
        return Arrival(context, now, self._wall_clock(), deadline, self.policy, lease, session)

    def later(self, arrival: Arrival) -> Arrival:
        """Return the arrival of a further answer to a request, which is made only now; its deadline is the same."""
        return replace(arrival, begun=self._clock(), time=self._wall_clock())

    async def start(
        self, api: str, arrival: Arrival, asked: ParsedRequest, choice: Choice | None = None
    ) -> SubmittedRequest:
        """Send a request and wait until a replica has queued it. Raises ApiError.

        The Messages API is billed by breakpoints; otherwise every reused token is a read. A prompt that has a leader
        is not billed again.
        """
        lease, explicit = arrival.lease, api == "messages"
        choice = choice or Choice(0, asked.tokens)
        if choice.tokens:
            lease.reserve(choice.tokens)
        leader, policy = choice.leader, arrival.policy
        request = self._request(arrival, asked)
        if choice.number:
            request = replace(request, id=f"{request.id}-{choice.number}")
        if leader is not None:
            request = replace(request, replica=request.replica or leader.started.replica)
        gateway = self.config.gateway
        deadline = asyncio.get_running_loop().time() + arrival.deadline - self._clock()
        sink = Sink()
        events = resumed(request, self._send, gateway, self._retried, deadline, policy.config.routing, sink)

        def began(started: Started) -> Answer:
            self._waits_no_more(served=True)
            usage = Usage()
            if leader is None:
                usage = self._usage(request, started, explicit, policy.terms.lifetimes.ttls)
            answer = Answer(
                id=request.id,
                model=self.config.model.name,
                api=api,
                tenant=request.tenant,
                arrival=arrival.time,
                request=request,
                started=started,
                prompt_usage=usage,
                finding=self._explained(arrival, asked.prompt, request, started, usage, explicit)
                if leader is None
                else leader.finding,
                price=lambda usage: pricing.price(usage, policy.prices),
                clock=self._clock,
                begun=arrival.begun,
                on_end=partial(self._ended, lease.tenant.name),
                events=events,
                sink=sink,
                places=asked.prompt.outline.places,
                context_management=asked.context_management,
                omit_thinking=asked.omit_thinking,
                first_token=self._clock() - arrival.begun,
                expected=asked.expected,
            )
            lease.answered(answer)
            return answer

        def gone(status: Status, error: str) -> None:
            self._waits_no_more(served=False)
            self._writers.left(request.id)
            self._unanswered(api, arrival, request, status, error)

        report = partial(self.faults.report, api=api)
        admission = SubmittedRequest(request.id, events, began, gone, report, deadline)
        self.backlog.joined()
        self._recorder.set(telemetry.GATEWAY_WAITING, self.backlog.waiting)
        if explicit:  # who is billed by breakpoints
            self._writers.arrived(request.id, self._clock())
        await admission.queued()
        return admission

    def _request(self, arrival: Arrival, asked: ParsedRequest) -> GenerateRequest:
        config, tenant, prompt = arrival.policy.config, arrival.lease.tenant, asked.prompt
        sampling, options = asked.sampling, asked.options
        cache = config.prefix_cache
        if not prompt.tokens:
            raise invalid("the prompt is empty")
        check_options(options, tenant, config, self.capabilities)
        other_from = None if asked.tool_choice == "auto" else prompt.head
        plan = breakpoints.plan(
            prompt.tokens,
            prompt.ends,
            breakpoints.breakpoints(prompt.ends, prompt.ttls, cache.min_tokens) if cache.enabled else (),
            prompt.root,
            block_size=cache.block_size,
            joined=prompt.outline.joined,
            other_from=other_from,
            other=asked.tool_choice,
            known=prompt.hashes,
        )
        request = GenerateRequest(
            id=arrival.id,
            token_ids=prompt.tokens,
            hashes=plan.hashes,
            sampling=sampling,
            policy=options.policy or config.compression.policy,
            marks=plan.marks,
            reads=plan.reads,
            replica=options.replica,
            session=_session(arrival.session or asked.session, tenant.salt),
            root=prompt.root,
            other_from=other_from,
            tenant=tenant.label,
            terms=arrival.policy.terms,
            context=arrival.context,
        )
        if fault := refusal(self.capabilities, request.needs):
            raise invalid(fault)
        return request

    def _waits_no_more(self, *, served: bool) -> None:
        self.backlog.left(served=served)
        self._recorder.set(telemetry.GATEWAY_WAITING, self.backlog.waiting)

    def _retried(self, when: str) -> None:
        self._recorder.add(telemetry.RETRIED, 1, when=when)

    def _usage(self, request: GenerateRequest, started: Started, explicit: bool, ttls: Mapping[str, float]) -> Usage:
        tokens = len(request.token_ids)
        if not explicit:
            return Usage(input=tokens - started.cached_tokens, read=started.cached_tokens)
        marks = [(mark.position, mark.key) for mark in request.marks]
        hit = self._writers.began(
            request.id, started.replica, request.reads, marks, started.hit, started.written, self._clock()
        )
        return breakpoints.billed(tokens, request.marks, started.hit, started.written, hit, ttls)

    def _explained(
        self, arrival: Arrival, prompt: Prompt, request: GenerateRequest, started: Started, usage: Usage, explicit: bool
    ) -> Finding:
        """Say why what was not read of a prompt was not, and count it."""
        cache, lifetimes, outline = arrival.policy.config.prefix_cache, arrival.policy.terms.lifetimes, prompt.outline
        tokens = len(prompt.tokens)
        asked = Asked(
            outline.contents,
            outline.names,
            prompt.ends,
            outline.thinking,
            sum(place[0] in ("tools", "system") for place in outline.places),
            tokens,
            tokens - min(tokens, budgets.recomputed_tokens(request.policy, tokens)),
            request.marks,
            request.reads,
            max((end for end, ttl in zip(prompt.ends, prompt.ttls, strict=True) if ttl is not None), default=0),
            cache.block_size,
            automatic=not explicit,
            enabled=cache.enabled and request.sampling.prompt_logprobs is None,
        )
        hit = started.hit if explicit else started.cached_tokens
        looked = self._clock() - started.prefill_seconds
        found = Found(started.replica, usage.read, hit, started.written, looked)
        finding = self.history.begun(prompt.root, asked, found, lifetimes.ttls, lifetimes.default)
        for reason, tokens in finding.missed.items():
            self._recorder.add(telemetry.MISSED_TOKENS, tokens, reason=reason, model=self.config.model.name)
        return finding

    def _unanswered(
        self, api: str, arrival: Arrival, request: GenerateRequest, status: Status, error: str = ""
    ) -> None:
        """Write down a request that was accepted and got no token."""
        labels = self._labels(request, arrival.lease.tenant.name)
        self._recorder.add(telemetry.REQUESTS, 1, api=api, status=status, **labels)
        self.recent.failed(status)
        outcome = {"status": status, "stop_reason": status, "error": error, "e2e": self._clock() - arrival.begun}
        self._write_log(self._record(api, arrival.time, request, **outcome))

    def _labels(self, request: GenerateRequest, tenant: str) -> dict[str, str]:
        return {"policy": request.policy.name, "model": self.config.model.name, "tenant": self._tenant(tenant)}

    def _ttl_name(self, seconds: float) -> str:
        """Return the name of a TTL in force; `other` for one that was changed since, or that of a pack."""
        ttls = self.policy.terms.lifetimes.ttls
        return next((name for name, lives in ttls.items() if lives == seconds), "other")

    def _ended(self, tenant: str, answer: Answer, status: Status) -> None:
        usage, started = answer.usage, answer.started
        # An answer with a leader has no prompt in its usage: the leader counts it, and what was read of it.
        cached, tiers = (started.cached_tokens, started.tiers) if usage.prompt else (0, {})
        add, observe = self._recorder.add, self._recorder.observe
        labels = self._labels(answer.request, tenant)
        add(telemetry.REQUESTS, 1, api=answer.api, status=status, **labels)
        for kind, tokens in (("input", usage.input), ("read", usage.read), ("output", usage.output)):
            add(telemetry.TOKENS, tokens, kind=kind, **labels)
        for ttl, tokens in usage.written.items():
            add(telemetry.TOKENS, tokens, kind=f"write_{ttl}", **labels)
        for tier, tokens in tiers.items():
            add(telemetry.CACHED_TOKENS, tokens, tier=tier, ttl=self._ttl_name(started.ttl), **labels)
        price = answer.price(usage)
        parts = {"input": price.input, "read": price.read, "write": price.total_write, "output": price.output}
        for part, dollars in parts.items():
            add(telemetry.DOLLARS, dollars, part=part, **labels)
        del labels["tenant"]  # a histogram has a series for each bucket
        observe(telemetry.QUEUE, started.queue_seconds, model=answer.model)
        warmth = "warm" if started.cached_tokens else "cold"
        observe(telemetry.TTFT, answer.first_token, cache=warmth, **labels)
        if status == "ok":
            observe(telemetry.E2E, answer.last_token, **labels)
            if usage.output > 1:
                per_token = (answer.last_token - answer.first_token) / (usage.output - 1)
                observe(telemetry.TPOT, per_token, **labels)
        times = answer.first_token, answer.last_token
        self.recent.ended(status, usage, cached, *times, lambda tokens: answer.price(tokens).total)
        self._write_log(self._answered(answer, status))

    def _answered(self, answer: Answer, status: Status) -> RequestRecord:
        started = answer.started
        return self._record(
            answer.api,
            answer.arrival,
            answer.request,
            output_tokens=answer.usage.output,
            usage=answer.usage,
            generated=self._generated(answer),
            replica=started.replica,
            group=self._group_of(started.replica),
            cached_tokens=started.cached_tokens,
            resident_bytes=started.resident_bytes,
            queue=started.queue_seconds,
            prefill=started.prefill_seconds,
            ttft=answer.first_token,
            e2e=answer.last_token,
            status=status,
            stop_reason=answer.end.reason if status == "ok" else status,
            error=answer.error,
        )

    def _generated(self, answer: Answer) -> tuple[bytes, ...]:
        """Return keys of the full blocks that end within an answer, if engines keep them: the last token has no KV.

        None do under the other names of a prompt with a tool choice, which events do not tell.
        """
        request, progress = answer.request, answer.sink.progress
        if not self._keeps_generated or progress is None or request.other_from is not None:
            return ()
        size, known = self.config.prefix_cache.block_size, request.hashes
        tokens = [*request.token_ids[len(known) * size :], *progress.output_ids[:-1]]
        return tuple(hashing.block_hashes(tokens, size, known[-1] if known else request.root))

    def _record(self, api: str, arrival: float, request: GenerateRequest, **outcome: Any) -> RequestRecord:
        context = request.context
        return RequestRecord(
            id=request.id,
            arrival=arrival,
            tenant=request.tenant,
            model=self.config.model.name,
            api=api,
            policy=request.policy.label,
            block_size=self.config.prefix_cache.block_size,
            input_tokens=len(request.token_ids),
            hashes=request.hashes,
            marks=request.marks,
            reads=request.reads,
            max_tokens=request.sampling.max_tokens,
            session=request.session,
            client_id=context.client_id if context is not None else "",
            trace_id=context.trace.trace_id if context is not None and context.trace is not None else "",
            **{"output_tokens": 0, **outcome},
        )


def _session(name: str, salt: bytes) -> str:
    """Return what routing and the log know a tenant's session by; empty for none."""
    return hashlib.blake2b(salt + name.encode(errors="surrogatepass"), digest_size=8).hexdigest() if name else ""
