"""What a hosted API should have read, written and billed for the requests of a log, against what it reported.

An API's cache is taken to have room for everything, so what leaves it has outlived its TTL. Its rules are those of the
contract: a TTL runs from a request's start, a read or another write starts it anew, an entry is readable once an answer
of its writers has begun, and writes happen at breakpoints; in OpenAI's APIs every full block is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from warmkv.config import Config
from warmkv.faults import UserError
from warmkv.policies.prefix_cache import Lifetimes
from warmkv.policies.pricing import price
from warmkv.prefixes.breakpoints import bill
from warmkv.prefixes.record import RequestRecord
from warmkv.prefixes.usage import Usage
from warmkv.simulator.studies.replays.variants import VariantError

LEAST_EQUAL_READS = 0.95  # share of the judged requests
MOST_READ_ERROR = MOST_BILL_ERROR = 0.05  # relative, in total
TOLERANCE = 0.02  # of a prompt, where its tokens are counted by its text
EXAMPLES = 3  # request ids of each kind that are named

Finding = Literal["equal", "before", "gone", "unforeseen"]
FINDINGS: Mapping[Finding, str] = {
    "equal": "read as predicted",
    "before": "read what was written before the log begins; not judged",
    "gone": "read less than predicted: evicted early, or the prompt's beginning had changed",
    "unforeseen": "read more than predicted: shared with a prompt that the log does not tell of",
}


class HostedError(UserError):
    """A log with which nothing can be compared."""


@dataclass(slots=True)
class _Entry:
    ttl: float
    expires: float
    readable: float  # when the answer of a writer began first


@dataclass(frozen=True, slots=True)
class Comparison:
    """Usage and dollars of all judged requests, as reported and as predicted; `findings` count requests."""

    requests: int
    reported: Usage
    predicted: Usage
    reported_dollars: float
    predicted_dollars: float
    findings: Mapping[str, int]
    examples: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def judged(self) -> int:
        return self.requests - self.findings.get("before", 0)

    @property
    def equal_reads(self) -> float:
        """Return the share of the judged requests that read as predicted."""
        return self.findings.get("equal", 0) / self.judged if self.judged else 1.0

    @property
    def read_error(self) -> float:
        return _error(self.predicted.read, self.reported.read)

    @property
    def bill_error(self) -> float:
        return _error(self.predicted_dollars, self.reported_dollars)

    @property
    def misses(self) -> list[str]:
        """List in words what is farther off than a prediction should be."""
        found = []
        if self.equal_reads < LEAST_EQUAL_READS:
            found.append(f"reads are as predicted for {self.equal_reads:.1%} of the requests")
        if abs(self.read_error) > MOST_READ_ERROR:
            found.append(f"predicted reads are {self.read_error:+.1%} in total")
        if abs(self.bill_error) > MOST_BILL_ERROR:
            found.append(f"the predicted bill is {self.bill_error:+.1%}")
        return found


def compare(records: Sequence[RequestRecord], config: Config) -> Comparison:
    """Predict the usage of records in the order of arrival, and compare it with what they report.

    TTLs, the shortest prefix that is cached and prices are those of the configuration. Raises HostedError if no record
    reports its usage, and VariantError if one names a TTL that the configuration does not know.
    """
    reporting = [record for record in records if record.usage.prompt]
    if not reporting:
        raise HostedError("no request of the log reports its usage, so there is nothing to compare with")
    for record in reporting:
        _check_ttls(record, config.prefix_cache.ttls)
    cache = _ApiCache(config)
    findings: Counter[str] = Counter()
    examples: dict[str, list[str]] = {}
    reported, predicted = list[Usage](), list[Usage]()
    dollars = predicted_dollars = 0.0
    prices = {model: config.prices_of(model) for model in {record.model for record in reporting}}
    for record in reporting:
        finding, usage = cache.process(record)
        findings[finding] += 1
        if finding != "equal" and len(named := examples.setdefault(finding, [])) < EXAMPLES:
            named.append(record.id)
        if finding != "before":
            reported.append(record.usage)
            predicted.append(usage)
            dollars += price(record.usage, prices[record.model]).total
            predicted_dollars += price(usage, prices[record.model]).total
    truth, guess = _total(reported), _total(predicted)
    return Comparison(len(reporting), truth, guess, dollars, predicted_dollars, dict(findings), examples)


def _check_ttls(record: RequestRecord, ttls: Mapping[str, float]) -> None:
    """Raise VariantError for a TTL of a record that has no length, and so no price."""
    named = [mark.ttl for mark in record.marks] + [ttl for ttl, tokens in record.usage.written.items() if tokens]
    if unknown := [ttl for ttl in named if ttl not in ttls]:
        raise VariantError(
            f"request {record.id}: TTL {unknown[0]!r} is not one of prefix_cache.ttls ({', '.join(ttls)})"
        )


class _ApiCache:
    """The prefix cache of an API, without a limit on its memory."""

    def __init__(self, config: Config) -> None:
        self._lifetimes, self._least = Lifetimes.of(config.prefix_cache), config.prefix_cache.min_tokens
        self._entries: dict[bytes, _Entry] = {}

    def process(self, record: RequestRecord) -> tuple[Finding, Usage]:
        """Predict the usage of a request, and leave the cache as it left it."""
        reported, tokens = record.usage, record.input_tokens
        factor = reported.prompt / tokens if tokens else 1.0  # from tokens of the record's text to reported ones
        near = max(record.block_size, TOLERANCE * reported.prompt) if record.bytes_per_token or factor != 1.0 else 0
        explicit = record.api == "messages"
        near = max(near, 0 if explicit else 2 * record.block_size)
        hit = self._marked_hit(record) if explicit else self._automatic_hit(record)
        error = round(hit * factor) - reported.read
        finding: Finding = "equal" if abs(error) <= near else "gone" if error > 0 else "unforeseen"
        if finding == "unforeseen" and self._is_new(record, round(reported.read / factor), explicit=explicit):
            finding, hit = "before", round(reported.read / factor)
        if explicit:
            usage = bill(
                tokens, [mark for mark in record.marks if mark.position >= self._least], hit, self._lifetimes.ttls
            )
            self._write(record, hit)
        else:
            usage = Usage(input=tokens - hit, read=hit)
            self._keep(record)
        return finding, _scaled(usage, reported, factor)

    def _marked_hit(self, record: RequestRecord) -> int:
        return next((read.position for read in record.reads if self._alive(read.key, record.arrival)), 0)

    def _automatic_hit(self, record: RequestRecord) -> int:
        blocks = next(
            (number for number, key in enumerate(record.hashes) if not self._alive(key, record.arrival)),
            len(record.hashes),
        )
        hit = blocks * record.block_size
        return min(hit, record.input_tokens) if hit >= self._least else 0

    def _alive(self, key: bytes, now: float) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.readable <= now <= entry.expires

    def _is_new(self, record: RequestRecord, position: int, *, explicit: bool) -> bool:
        """Tell if no request of the log has had the prefix that one read."""
        if explicit:
            reads = [read for read in record.reads if abs(read.position - position) <= record.block_size]
            return bool(reads) and all(read.key not in self._entries for read in reads)
        blocks = position // record.block_size
        return 0 < blocks <= len(record.hashes) and record.hashes[blocks - 1] not in self._entries

    def _write(self, record: RequestRecord, hit: int) -> None:
        for read in record.reads:
            if read.position == hit and (entry := self._entries.get(read.key)):
                entry.expires = record.arrival + entry.ttl
        for mark in record.marks:
            if mark.position < self._least:
                continue
            entry, readable = self._entries.get(mark.key), record.arrival + record.ttft
            ttl = self._lifetimes.ttls[mark.ttl]
            if entry is None or entry.expires < record.arrival:
                self._entries[mark.key] = _Entry(ttl, record.arrival + ttl, readable)
                continue
            if mark.position > hit:  # a second writer
                entry.ttl, entry.readable = max(entry.ttl, ttl), min(entry.readable, readable)
            entry.expires = record.arrival + entry.ttl

    def _keep(self, record: RequestRecord) -> None:
        ttl, now = self._lifetimes.default, record.arrival
        for key in record.hashes:
            entry = self._entries.get(key)
            if entry is None or entry.expires < now:
                self._entries[key] = _Entry(ttl, now + ttl, now + record.ttft)
            else:
                entry.expires = now + ttl


def _scaled(usage: Usage, reported: Usage, factor: float) -> Usage:
    """Return a usage in reported tokens, of which the prompt has as many as were reported."""
    read = min(round(usage.read * factor), reported.prompt)
    written, rest = {}, reported.prompt - read
    for ttl, tokens in usage.written.items():
        written[ttl] = min(round(tokens * factor), rest)
        rest -= written[ttl]
    return Usage(rest, read, written, reported.output)


def _total(usages: Sequence[Usage]) -> Usage:
    written: Counter[str] = Counter()
    for usage in usages:
        written.update({ttl: tokens for ttl, tokens in usage.written.items() if tokens})
    return Usage(
        sum(usage.input for usage in usages),
        sum(usage.read for usage in usages),
        dict(written),
        sum(usage.output for usage in usages),
    )


def _error(predicted: float, reported: float) -> float:
    return predicted / reported - 1 if reported else float(predicted > 0)
