"""Compute token masks of a batch's constraints in a thread beside the model's step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from torch import Tensor

from warmkv.replicas.current_device import make_current


class Masks:
    """Computes masks in a thread of its own, which begins with the first constraint."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary, self._device = vocabulary, device
        self._pool = ThreadPoolExecutor(1, "masks", make_current, (device,))
        self._executor: LLExecutor | None = None
        self._stream: Any = None  # of CUDA

    def begin(self, matchers: Sequence[LLMatcher]) -> Future[Tensor]:
        """Begin to compute the tokens that are masked out: bool [matchers, vocabulary] on the device.

        No matcher may take a token meanwhile. A matcher that exceeds its limits is left in an error.
        """
        return self._pool.submit(self._fill, list(matchers))

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def _fill(self, matchers: list[LLMatcher]) -> Tensor:
        if self._executor is None:
            self._executor = LLExecutor(num_threads=torch.get_num_threads())
            if self._device.type == "cuda":
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        allowed = allocate_token_bitmask(len(matchers), self._vocabulary)
        fill_next_token_bitmask_par(self._executor, [(matcher, row) for row, matcher in enumerate(matchers)], allowed)
        banned = np.unpackbits(np.invert(allowed).view(np.uint8), axis=1, count=self._vocabulary, bitorder="little")
        with torch.cuda.stream(self._stream):  # a copy does not wait for the step
            return torch.from_numpy(banned.view(np.bool_)).to(self._device)
