"""A tokenizer of single characters for the random models of these tests, and constraints compiled for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.tokenizers import of_characters
from tests.unit.replicas.conftest import VOCABULARY, replace_eos
from warmkv.replicas.constraints.compiler import Compiler
from warmkv.replicas.loading.load import LoadedModel

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
EOS = len(CHARACTERS)
assert len(CHARACTERS) == VOCABULARY - 1
TOKENIZER = of_characters(CHARACTERS, ["<end>"])


@pytest.fixture(scope="session")
def compiler() -> Compiler:
    return Compiler(SimpleNamespace(backend_tokenizer=TOKENIZER), VOCABULARY, [EOS])


@pytest.fixture(scope="session")
def ending(models: dict[str, LoadedModel]) -> Any:
    """A random model that may end its answers."""
    return replace_eos(models["llama"], EOS)


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def text(tokens: list[int]) -> str:
    return "".join(CHARACTERS[token] for token in tokens if token != EOS)
