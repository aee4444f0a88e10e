"""The model that is served."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from warmkv.config.base import Section

ResponseTemplate = Literal[
    "gpt_oss",
    "glm4_moe",
    "qwen3_coder",
    "hermes",
    "function_gemma",
    "mistral",
    "llama3",
    "glm4",
    "gemma3",
    "think",
    "none",
]
"""Names of families by how their models write tool calls and thinking."""


class ModelConfig(Section):
    path: str = Field("tiny", description="folder or hub name of a causal LM; 'tiny' is the model in the package")
    served_name: str | None = Field(None, description="name in the APIs; the last part of the path if absent")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto is bfloat16 on a GPU and float32 on a CPU"
    )
    response_template: ResponseTemplate | None = Field(
        None,
        description="how the model writes tool calls and thinking; null: as its tokenizer says, or its chat template "
        "shows; none: answers are text alone",
    )

    @property
    def name(self) -> str:
        """Return the name under which the APIs serve the model."""
        return self.served_name or self.path.rstrip("/").rsplit("/", 1)[-1]
