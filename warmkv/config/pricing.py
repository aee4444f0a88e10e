"""Prices of tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from warmkv.config.base import Section

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Prices(Section):
    """Dollars per million tokens and the multipliers of the base input price. Hosted prices differ: set your own."""

    input: Price = Field(3.0, description="dollars per million tokens")
    output: Price = Field(15.0, description="dollars per million tokens")
    read: Price = Field(0.1, description="times input, for tokens read from the cache")
    write: dict[str, Price] = Field({"5m": 1.25, "1h": 2.0}, description="times input, for tokens written, by TTL")


class ModelPrices(Section):
    """What differs for one model."""

    input: Price | None = Field(None, description="dollars per million tokens")
    output: Price | None = Field(None, description="dollars per million tokens")
    read: Price | None = Field(None, description="times input")
    write: dict[str, Price] = Field({}, description="by TTL")


class PricingConfig(Prices):
    models: dict[str, ModelPrices] = Field({}, description="by the model's name in the APIs: prices of its own")

    def of(self, model: str) -> Prices:
        """Return the prices of a model: its own where it has any, else those of all models."""
        own = self.models.get(model, ModelPrices()).model_dump(exclude_none=True)
        return Prices.model_validate({**self.model_dump(exclude={"models"}), **own, "write": self.write | own["write"]})
