"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: more threads only wait for each other

settings.register_profile("default", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("default")
