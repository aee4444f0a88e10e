"""Limits of tenants: requests and tokens a minute, requests at a time, and a share of the queue. Pure.

Token buckets: a tenant may use a minute's worth at once, and gets it back evenly over a minute. Every gateway counts by
itself and grants its part of each limit, so that the sum holds however requests are spread over gateways.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from warmkv.config import LimitsConfig

MINUTE = 60.0
_RECENT = 0.2  # weight of the newest request in the average duration
_ROUNDING = 1e-6  # of a unit: who waited as long as told is not refused for the last bit
_LOOKED_AT = 8  # accounts that may be forgotten with each request, so that no request pays for many


class RateLimitError(Exception):
    """More than a limit grants; `setting` names it, `retry_after` is in seconds."""

    def __init__(self, setting: str, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.setting, self.message, self.retry_after = setting, message, retry_after


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit a minute, what is left of it, and the seconds until all of it is back."""

    limit: int
    remaining: int
    reset: float


@dataclass(slots=True)
class Bucket:
    """What was used of a limit and has not come back yet."""

    used: float = 0.0
    at: float = 0.0  # seconds

    def refill(self, per_minute: float, now: float) -> float:
        """Give back what the time since the last call brings, and return what is used then."""
        self.used = max(0.0, self.used - per_minute / MINUTE * max(0.0, now - self.at))
        self.at = max(self.at, now)
        return self.used


@dataclass(slots=True)
class Account:
    """What a tenant asks for in one gateway. Limits are per minute, the gateway's part of them; 0 is none."""

    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0
    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    running: int = 0
    waiting: int = 0  # for their first token
    seconds: float = 1.0  # that a request takes, averaged

    def is_new(self, now: float) -> bool:
        """Return whether a new account would say the same."""
        used = self.requests.refill(self.requests_per_minute, now) + self.tokens.refill(self.tokens_per_minute, now)
        return not self.running and used <= _ROUNDING


class RateLimiter:
    """Accounts of the tenants that have limits, in one of `gateways` gateways; `queue` requests may wait in it.

    An account that says nothing is forgotten. Over `most`, so is that of the tenant that asked longest ago, unless it
    has requests in flight.
    """

    def __init__(self, gateways: int, queue: int, most: int) -> None:
        self.gateways, self.queue, self._most = gateways, queue, most
        self._accounts: OrderedDict[str, Account] = OrderedDict()  # the one that asked last at the end

    def __len__(self) -> int:
        return len(self._accounts)

    def admission(self, tenant: str, limits: LimitsConfig, now: float) -> LimitedRequest:
        """Return the admission of a request that has not begun yet."""
        if limits == LimitsConfig():
            return LimitedRequest(limits, Account(), self.gateways, self.queue)  # unlimited: nothing to remember
        self._forget(tenant, now)
        account = self._accounts.setdefault(tenant, Account())
        self._accounts.move_to_end(tenant)
        account.requests_per_minute = limits.requests_per_minute / self.gateways
        account.tokens_per_minute = limits.tokens_per_minute / self.gateways
        return LimitedRequest(limits, account, self.gateways, self.queue)

    def _forget(self, coming: str, now: float) -> None:
        for _ in range(min(_LOOKED_AT, len(self._accounts))):
            tenant = next(iter(self._accounts))
            account = self._accounts[tenant]
            if account.running:
                self._accounts.move_to_end(tenant)
            elif account.is_new(now) or (len(self._accounts) >= self._most and coming not in self._accounts):
                del self._accounts[tenant]
            else:
                return


@dataclass(slots=True)
class LimitedRequest:
    """One request under its tenant's limits: `begin`, `reserve` tokens, `wait` for the first one, `end`.

    `begin`, `reserve` and `wait` raise RateLimitError and count nothing then. `end` may be called at any time, and
    more than once.
    """

    limits: LimitsConfig
    account: Account
    gateways: int
    queue: int
    begun: float | None = None
    reserved: int = 0
    waits: bool = False

    def begin(self, now: float) -> None:
        """Count the request, from its arrival on."""
        limits, account = self.limits, self.account
        most = math.ceil(limits.concurrent_requests / self.gateways)
        if limits.concurrent_requests and account.running >= most:
            raise RateLimitError(
                "concurrent_requests",
                f"{account.running} requests of this key are in flight, as many as may be",
                account.seconds / account.running,
            )
        self._check_tokens(1, now)  # none are left: it need not be read
        capacity = max(1.0, account.requests_per_minute)
        over = account.requests.refill(account.requests_per_minute, now) + 1 - capacity
        if limits.requests_per_minute and over > _ROUNDING:
            raise RateLimitError(
                "requests_per_minute",
                f"more than {limits.requests_per_minute} requests a minute",
                over * MINUTE / account.requests_per_minute,
            )
        account.requests.used += 1 if limits.requests_per_minute else 0
        account.running += 1
        self.begun = now

    def reserve(self, tokens: int, now: float) -> None:
        """Count the most tokens that the request can use; `end` gives back what it did not.

        More than the limit itself needs a full bucket, and leaves it owing: such a request is slow, not impossible.
        """
        self._check_tokens(tokens, now)
        if self.limits.tokens_per_minute:
            self.account.tokens.used += tokens
            self.reserved = tokens

    def _check_tokens(self, tokens: int, now: float) -> None:
        account, limit = self.account, self.limits.tokens_per_minute
        capacity = max(1.0, account.tokens_per_minute)
        over = account.tokens.refill(account.tokens_per_minute, now) + min(tokens, capacity) - capacity
        if limit and over > _ROUNDING:
            raise RateLimitError(
                "tokens_per_minute",
                f"more than {limit} tokens a minute",
                over * MINUTE / account.tokens_per_minute,
            )

    def wait(self) -> None:
        """Count the request among those that wait for their first token."""
        account, share = self.account, self.limits.queue_share
        most = max(1, math.floor(share * self.queue))
        if share < 1 and account.waiting >= most:
            raise RateLimitError(
                "queue_share",
                f"{account.waiting} requests of this key wait for their first token, as many as may",
                account.seconds / account.waiting,
            )
        account.waiting += 1
        self.waits = True

    def waited(self) -> None:
        """Count the request as answered from now on."""
        self.account.waiting -= self.waits
        self.waits = False

    def end(self, used_tokens: int, now: float) -> None:
        """Settle the request: tokens that were reserved and not used come back."""
        account = self.account
        self.waited()
        if self.begun is not None:
            account.running -= 1
            account.seconds += _RECENT * (now - self.begun - account.seconds)
            self.begun = None
        if self.reserved:
            used = account.tokens.refill(account.tokens_per_minute, now)
            account.tokens.used = max(0.0, used + used_tokens - self.reserved)
            self.reserved = 0

    def requests(self, now: float) -> Quota | None:
        """Return what is left of the requests a minute; None without such a limit."""
        return _quota(self.account.requests, self.account.requests_per_minute, now)

    def tokens(self, now: float) -> Quota | None:
        """Return what is left of the tokens a minute; None without such a limit."""
        return _quota(self.account.tokens, self.account.tokens_per_minute, now)


def _quota(bucket: Bucket, per_minute: float, now: float) -> Quota | None:
    if not per_minute:
        return None
    used, capacity = bucket.refill(per_minute, now), max(1.0, per_minute)
    left = max(0, math.floor(capacity - used + _ROUNDING))
    return Quota(math.floor(capacity), left, used * MINUTE / per_minute)
