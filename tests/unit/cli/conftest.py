"""The small random model of the measuring tests."""

from tests.unit.measuring.conftest import folder  # noqa: F401
