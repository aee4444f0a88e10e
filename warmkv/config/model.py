"""The model that is served."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from warmkv.config.base import Section


class ModelConfig(Section):
    path: str = Field("tiny", description="folder or hub name of a causal LM; 'tiny' is the model in the package")
    served_name: str | None = Field(None, description="name in the APIs; the last part of the path if absent")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto is bfloat16 on a GPU and float32 on a CPU"
    )

    @property
    def name(self) -> str:
        """Return the name under which the APIs serve the model."""
        return self.served_name or self.path.rstrip("/").rsplit("/", 1)[-1]
