"""What travels between the gateway and a replica. Importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from warmkv.config import Needs
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.transfer import Fetch
from warmkv.policy_spec import PolicySpec
from warmkv.prefixes.record import Candidate, Mark
from warmkv.request_context import RequestContext

FinishReason = Literal["end", "length", "stop", "cancelled"]


ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be: only tokens that can still lead there are drawn (structured outputs in vLLM).

    `text` is a JSON schema as JSON, a regular expression, a JSON list of texts, or a grammar in Lark or GBNF; empty for
    any JSON object.
    """

    kind: ConstraintKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The most tokens that an answer may think: where they are used up, the token that closes thinking is drawn.

    A constraint has the character that is being written end first.
    """

    tokens: int
    opening: int  # token ids
    closing: int
    is_open: bool = False  # at the end of the prompt


MOST_TOP_K = (1 << 31) - 1  # fits into engines' numbers; more than any vocabulary, so it means all, as larger ones do


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn, as in vLLM. The defaults leave the model's distribution as it is; temperature 0 is greedy.

    Order: `logit_bias`, penalties and what may not be drawn change the logits; then come the temperature, min_p, top_k
    and top_p. Repetition is counted in prompt and answer, frequency and presence in the answer alone.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0  # of the most probable token's probability
    min_tokens: int = 0  # before which nothing ends the answer: no end of text, no stop token, no stop string
    stop_token_ids: tuple[int, ...] = ()  # which end the answer, and are left out of its text
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, and what is added to their logits
    logprobs: int | None = None  # of drawn tokens, and of so many of the most probable ones
    prompt_logprobs: int | None = None  # the same of the prompt's tokens, for which all of it is computed
    constraint: Constraint | None = None
    thinking: ThinkingBudget | None = None
    shown_ids: tuple[int, ...] = ()  # special tokens that are part of the text, as the delimiters of tool calls


@dataclass(frozen=True, slots=True)
class Terms:
    """What was in force for a request when it came, besides its compression policy, and stays so until it ends."""

    version: int  # of the policy
    lifetimes: Lifetimes


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """Where a gateway awaits the connections of replicas."""

    host: str
    port: int
    key: str = field(repr=False)  # shows that who connects was told of it by the gateway


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A tokenized prompt with everything that was computed about it once, at the gateway."""

    id: str
    token_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]  # of the prompt's full blocks
    sampling: SamplingParams
    policy: PolicySpec
    marks: tuple[Mark, ...] = ()
    reads: tuple[Candidate, ...] = ()  # highest position first
    replica: str | None = None  # id of the replica that the client prefers
    session: str = ""  # hash of the one that its client names, for routing; empty for none
    root: bytes = b""  # of the chain of the hashes
    other_from: int | None = None  # token from which on they are as of other tokens (`breakpoints.plan`)
    tenant: str = ""  # whose request it is, for fairness among those that wait
    terms: Terms | None = None  # those of the configuration if absent
    fetch: Fetch | None = None  # where its prefix is warm, as far as the router knows
    resume: tuple[int, ...] = ()  # tokens that another replica drew: taken again in place of drawn ones
    context: RequestContext | None = None  # what log lines about it name

    @property
    def lifetimes(self) -> Lifetimes | None:
        return self.terms.lifetimes if self.terms is not None else None

    @property
    def needs(self) -> Needs:
        """Return what the replica that computes it must be able to do."""
        sampling = self.sampling
        resumes = bool(self.resume)
        return Needs(
            self.policy,
            sampling.thinking is not None,
            sampling.prompt_logprobs is not None,
            resumed_constraint=resumes and sampling.constraint is not None,
            resumed_penalties=resumes and bool(sampling.frequency_penalty or sampling.presence_penalty),
        )


@dataclass(frozen=True, slots=True)
class Admitted:
    """The replica has queued the request; comes before Started."""

    ongoing: int = 1  # requests that it has, this one and those of other gateways included


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica does not take the request; nothing follows.

    `busy`: it has as many as it takes at a time, or is stopped, so another may take the request at once. The other
    reasons are those of the engine (QueueFullError, UnservableRequestError).
    """

    reason: Literal["busy", "full", "unservable"]
    message: str = ""
    waiting: int = 0
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is computed and the first token is drawn; comes before any text."""

    replica: str
    hit: int  # position of the highest breakpoint that was read; 0 if none
    written: int  # position of the highest breakpoint that is stored now; 0 if none
    cached_tokens: int  # prompt tokens whose KV was reused
    kept_tokens: int  # entries per KV head after the hand-off
    resident_bytes: int  # of the decode slot
    queue_seconds: float  # from arrival at the replica to the start of prefill
    prefill_seconds: float
    tiers: Mapping[str, int] = field(default_factory=dict)  # cached_tokens by the tier they came from
    ttl: float = 0.0  # seconds that what was reused lives after each read


LEAST_LOGPROB = -9999.0
"""Stands for log-probabilities below it and for minus infinity, which JSON lacks; as in vLLM."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a token under the model alone, before sampling parameters and constraint; and the highest."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # token ids with theirs, the highest first


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Those of a prompt's next tokens, from its second on: a chunk has been computed. Comes before Started."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(slots=True)  # not frozen, which would take thrice as long to make: there is one for every token
class Delta:
    """More text, how many tokens have been drawn so far, this text's included, and those since the last one.

    `logprobs` has an entry for each of `tokens` if the request wants them.
    """

    text: str
    output_tokens: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end. `output_tokens` counts every drawn token, an end-of-text token included.

    `logprobs` are those of the tokens behind the last text; that of an end of text only beside those of the prompt, so
    that there is one for every token.
    """

    reason: FinishReason
    output_tokens: int
    stop_sequence: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The replica could not go on with the request; nothing follows.

    What is the request's own fault would fail in any replica, and may fail others with it: it is not sent again. One
    that is `refused` was not begun: the client is told why, as where the replica does not take it (Refused).
    """

    message: str
    fault: Literal["replica", "request", "refused"] = "replica"


STOPPING = Failed("the replica is stopping")
"""Ends what is in flight when a replica stops: it goes on in another one."""


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing new for a while, but the replica's engine goes on."""


Event = Admitted | Refused | PromptLogprobs | Started | Delta | Finished | Failed | Alive


@dataclass(frozen=True, slots=True)
class ToReplica:
    """What one replica asks of another, by its name: the router sends it nowhere else."""

    replica: str


@dataclass(frozen=True, slots=True)
class BlocksWanted(ToReplica):
    """Blocks that a replica would rather fetch than compute."""

    identity: Mapping[str, Any]  # of the KV
    keys: tuple[bytes, ...]  # of full blocks from the start of a prompt
    first: int  # of these that is wanted
    tails: tuple[bytes, ...]  # behind them, at breakpoints that the request may read
    sums: bool  # whether they are of no use without column sums


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """A numbered report of a replica's full blocks: what came to a tier and what left the replica.

    Keys are packed (`prefixes/mask_table.py`). With `snapshot` nothing else is there, but for what later reports add.
    """

    sequence: int
    stored: bytes = b""
    evicted: bytes = b""
    snapshot: bool = False
    tier: str = "device"  # the fastest that has what is stored
    at: float | None = None  # wall clock of the replica


class EngineError(Exception):
    """Base of what a replica refuses; the gateway maps the classes to HTTP errors."""


class UnservableRequestError(EngineError):
    """The request can never be served by this replica: too large for it, or of a kind it cannot compute."""


class QueueFullError(EngineError):
    """Too many requests wait already; try again later.

    `waiting` is how many, `retry_after` an estimate of the seconds until there is room; None if there is none yet.
    """

    def __init__(self, message: str, waiting: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.waiting, self.retry_after = waiting, retry_after
