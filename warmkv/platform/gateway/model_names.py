"""Names of the model: its own, and others of `gateway.models`, which may be patterns of names."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from warmkv.config import Config
from warmkv.platform.gateway.apis.errors import ApiError, clipped

WILDCARD = re.compile(r"[*?\[]")


def model_names(config: Config) -> list[str]:
    """Return the names of the model. A pattern is none."""
    return [config.model.name, *(name for name in config.gateway.models if not WILDCARD.search(name))]


def check_model(name: str, config: Config) -> None:
    """Raise ApiError (404) where a name is none of the model's, and fits none of their patterns."""
    own, others = config.model.name, config.gateway.models
    if name == own or (not WILDCARD.search(name) and any(fnmatchcase(name, other) for other in others)):
        return
    here = f"this server has {', '.join((own, *others))}"
    raise ApiError(
        "not_found_error",
        f"model: {name} ({here})",
        code="model_not_found",
        param="model",
        openai=f"The model {clipped(name, 200)!r} does not exist; {here}.",
    )
