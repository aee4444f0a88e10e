"""Usage to money, and the break-even of a cached prefix. Prices are configuration; none stands here."""

from __future__ import annotations

from dataclasses import dataclass

from warmkv.config import PricingConfig
from warmkv.prefixes.usage import Usage


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars of one answer, by part."""

    input: float
    read: float
    write: float
    output: float

    @property
    def total(self) -> float:
        return self.input + self.read + self.write + self.output


def price(usage: Usage, prices: PricingConfig) -> Price:
    """What an answer costs. A TTL without a multiplier is a KeyError: the configuration refuses it earlier."""
    per_token = prices.input / 1e6
    return Price(
        input=usage.input * per_token,
        read=usage.read * per_token * prices.read,
        write=sum(tokens * per_token * prices.write[ttl] for ttl, tokens in usage.written.items() if tokens),
        output=usage.output * prices.output / 1e6,
    )


def break_even_uses(write: float, read: float) -> float:
    """Uses of a prefix, the writing one included, from which caching is cheaper: (w - r) / (1 - r).

    Without caching n uses cost n; with it they cost w + (n - 1) r. Infinite if reads are no cheaper than input.
    """
    return (write - read) / (1 - read) if read < 1 else float("inf")
