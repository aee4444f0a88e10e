"""A small random model, loaded and as a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.replicas.conftest import random_model
from warmkv.replicas.loading.load import LoadedModel, prepare


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return prepare(random_model("llama"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "random"
    random_model("llama").save_pretrained(path)
    return path
