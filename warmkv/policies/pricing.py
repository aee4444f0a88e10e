"""Usage to money, and the break-even of a cached prefix. Prices are configuration; none stands here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from warmkv.config import Prices
from warmkv.prefixes.usage import Usage


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars of one answer, by part; what was written, by TTL name."""

    input: float
    read: float
    write: Mapping[str, float]
    output: float

    @property
    def total_write(self) -> float:
        return sum(self.write.values())

    @property
    def total(self) -> float:
        return self.input + self.read + self.total_write + self.output


def price(usage: Usage, prices: Prices) -> Price:
    """Price an answer. A TTL without a multiplier is a KeyError: the configuration refuses it earlier."""
    per_token = prices.input / 1e6
    return Price(
        input=usage.input * per_token,
        read=usage.read * per_token * prices.read,
        write={ttl: tokens * per_token * prices.write[ttl] if tokens else 0.0 for ttl, tokens in usage.written.items()},
        output=usage.output * prices.output / 1e6,
    )


def break_even_uses(write: float, read: float) -> float:
    """Return the uses of a prefix, the writing one included, from which caching is cheaper: (w - r) / (1 - r).

    Without caching n uses cost n; with it they cost w + (n - 1) r. Infinite if reads are no cheaper than input.
    """
    return (write - read) / (1 - read) if read < 1 else math.inf


def hit_chance(per_hour: float, ttl: float) -> float:
    """Return chance that a request finds its prefix alive: that the one before it came within the TTL in seconds.

    For requests that come at random (Poisson); each use starts the TTL anew.
    """
    return -math.expm1(-per_hour * ttl / 3600)


def break_even_rate(write: float, read: float, ttl: float) -> float:
    """Return the requests per hour from which caching is cheaper, for Poisson arrivals without end.

    A request pays the read if it finds the prefix and else the write: caching pays from a chance of (w - 1) / (w - r).
    Infinite if reads are no cheaper than input.
    """
    if read >= 1:
        return math.inf
    return -math.log1p(-max(0.0, write - 1) / (write - read)) * 3600 / ttl if write > 1 else 0.0


@dataclass(frozen=True, slots=True)
class PrefixCost:
    """What a prefix of some TTL costs when it is cached; in dollars, for the prefix and what follows it."""

    ttl: str
    seconds: float
    write: float  # times the input price
    read: float
    break_even_uses: float
    break_even_per_hour: float
    first: float  # the request that writes the prefix
    later: float  # one that reads it
    uses: float  # all of them, each within the TTL of the one before
    saved: float  # share of what they cost without caching


def uncached(tokens: int, rest: int, prices: Prices) -> float:
    """Return dollars of a request with `tokens` of prefix and `rest` behind it, nothing cached."""
    return price(Usage(input=tokens + rest), prices).total


def prefix_costs(
    tokens: int, rest: int, uses: int, prices: Prices, ttls: Mapping[str, float]
) -> tuple[PrefixCost, ...]:
    """Return the cost of a prefix of `tokens` tokens that `uses` requests begin with, for every TTL, the shortest
    first.
    """
    found = []
    for ttl, seconds in sorted(ttls.items(), key=lambda item: item[1]):
        write, read = prices.write[ttl], prices.read
        first = price(Usage(input=rest, written={ttl: tokens}), prices).total
        later = price(Usage(input=rest, read=tokens), prices).total
        total, plain = first + (uses - 1) * later, uses * uncached(tokens, rest, prices)
        found.append(
            PrefixCost(
                ttl,
                seconds,
                write,
                read,
                break_even_uses(write, read),
                break_even_rate(write, read, seconds),
                first,
                later,
                total,
                1 - total / plain if plain else 0.0,
            )
        )
    return tuple(found)
