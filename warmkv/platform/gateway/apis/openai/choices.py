"""Several answers to one request: `n` to each of its prompts, which is computed once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from warmkv.platform.gateway.admission import SubmittedRequest
from warmkv.platform.gateway.apis.answer import Answer
from warmkv.platform.gateway.apis.errors import ApiError
from warmkv.platform.gateway.apis.schema import ParsedRequest
from warmkv.platform.gateway.service import Arrival, Choice, Service
from warmkv.replicas.protocol import TokenLogprobs

CONCURRENT = 16  # answers to one request that are made at a time

Take = Callable[[int, Answer, ParsedRequest], Awaitable[None]]  # of an answer, which has begun, and its index


class Choices:
    """The answers to a request in the order of their indices: n to the first prompt, n to the second.

    The first answer to a prompt is begun before the others, which are sent to the same replica and read its full
    blocks there. All together are billed for the prompt once. `decode` returns the text of a token.
    """

    def __init__(
        self,
        service: Service,
        api: str,
        arrival: Arrival,
        prompts: Sequence[ParsedRequest],
        decode: Callable[[int], str],
    ) -> None:
        self.id, self.arrival, self.prompts, self.chat = arrival.id, arrival, prompts, api == "chat"
        self.decode = decode
        self.answers: dict[int, Answer] = {}
        self._service, self._api = service, api
        self._first: SubmittedRequest | None = None
        self._free = asyncio.Semaphore(CONCURRENT)

    @property
    def model(self) -> str:
        """Return the name of the model that answers."""
        return self._service.config.model.name

    @property
    def deadline(self) -> float:
        """Return the time of the loop at which all answers must have ended; known once the first one is queued."""
        assert self._first is not None
        return self._first.deadline

    @property
    def asked(self) -> ParsedRequest:
        """Return the first prompt, with what holds for all of them."""
        return self.prompts[0]

    async def queued(self) -> None:
        """Wait until a replica has queued the first answer. Raises ApiError while an HTTP status can still be given."""
        choice = Choice(0, sum(asked.tokens for asked in self.prompts))
        self._first = await self._service.start(self._api, self.arrival, self.asked, choice)

    async def run(self, take: Take) -> None:
        """Hand every answer that has begun to `take`, many at a time. Raises the first error, gives up the others."""
        n = self.asked.n
        try:
            async with asyncio.TaskGroup() as group:

                async def follow(index: int, asked: ParsedRequest, leader: Answer) -> None:
                    seed = (asked.sampling.seed + index % n) % 2**63
                    sampling = replace(asked.sampling, seed=seed, prompt_logprobs=None)  # which the leader has
                    await self._take(index, replace(asked, sampling=sampling), take, leader=leader)

                for number, asked in enumerate(self.prompts):

                    def begun(leader: Answer, first: int = number * n, asked: ParsedRequest = asked) -> None:
                        for index in range(first + 1, first + n):
                            group.create_task(follow(index, asked, leader))

                    group.create_task(self._take(number * n, asked, take, begun))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__

    async def _take(
        self,
        index: int,
        asked: ParsedRequest,
        take: Take,
        begun: Callable[[Answer], None] = lambda answer: None,
        leader: Answer | None = None,
    ) -> None:
        async with self._free:
            submitted = self._first if index == 0 else None
            if submitted is None:
                choice = Choice(index, leader=leader)
                arrival = self._service.later(self.arrival)  # it may have waited for others: 16 are made at a time
                submitted = await self._service.start(self._api, arrival, asked, choice)
            try:
                answer = self.answers[index] = await submitted.begin()
                begun(answer)
                await take(index, answer, asked)
            finally:
                await submitted.aclose()

    def prompt_logprobs(self, index: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of the prompt of an answer, from its second token on, if they are wanted."""
        return self.answers[index - index % self.asked.n].sink.prompt_logprobs

    def report(self, error: BaseException) -> ApiError:
        """Count and log an error that the client gets within a stream."""
        return self._service.faults.report(error, self._api)

    async def aclose(self) -> None:
        """Give the first answer up if it was never begun; the others end with `run`."""
        if self._first is not None:
            await self._first.aclose()
