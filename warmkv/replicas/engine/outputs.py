"""Detokenize the output of a step for all requests at once, in the event loop (cf. vLLM's OutputProcessor)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from llguidance import LLMatcher
from tokenizers import Tokenizer

from warmkv.replicas.engine.scheduler import EngineEvent
from warmkv.replicas.engine.text import Detokenizer
from warmkv.replicas.engines.interface import Engine
from warmkv.replicas.protocol import (
    Admitted,
    Alive,
    Delta,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    PromptLogprobs,
    Started,
    TokenLogprobs,
)

log = logging.getLogger(__name__)

CONTEXT_TOKENS = 4  # of the prompt, for decoding what follows it
ADMITTED = Admitted()


class Output:
    """The answer to one request. `started` and `ended` are set once; `started` by None if the answer ends before.

    `ended` raises what `fail` was told, or what went wrong with the text.
    """

    def __init__(
        self, request: GenerateRequest, deliver: Callable[[Event], None], detokenizer: Detokenizer, beat: float
    ) -> None:
        loop = asyncio.get_running_loop()
        self.request, self.deliver, self.detokenizer = request, deliver, detokenizer
        self.started: asyncio.Future[Started | None] = loop.create_future()
        self.ended: asyncio.Future[Finished | Failed] = loop.create_future()
        self.beat, self.turns = beat, 0  # when it is due to give a sign of life, and the engine's turns so far
        self.num_output_tokens, self.tokens, self.text = 0, list[int](), ""  # the latter two since the last Delta
        self.logprobs: list[TokenLogprobs] = []  # of these tokens
        self.end: Finished | Failed | None = None

    def fail(self, error: Exception) -> None:
        """End the answer with an error."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # whoever awaits it gets it all the same
        self._start(None)

    def take(self, event: EngineEvent) -> None:
        """Take what the engine emitted."""
        if isinstance(event, int | TokenLogprobs):
            if self.detokenizer.stopped_by is None:
                if isinstance(event, TokenLogprobs):
                    self.logprobs.append(event)
                    event = event.token
                self.num_output_tokens += 1
                self.tokens.append(event)
                self.text += self.detokenizer.push(event)
        elif isinstance(event, Started):
            self.deliver(event)
            self._start(event)
        elif isinstance(event, PromptLogprobs):
            self.deliver(event)
        else:
            self.end = event

    def tell(self) -> bool:
        """Deliver what was taken; return True if there was text."""
        stop, end = self.detokenizer.stopped_by, self.end
        if stop is not None:
            end = Finished("stop", self.num_output_tokens, stop)
        elif isinstance(end, Finished):
            self.text += self.detokenizer.finish()
            self.num_output_tokens = end.output_tokens
        told = bool(self.text)
        if told:
            self.deliver(Delta(self.text, self.num_output_tokens, tuple(self.tokens), tuple(self.logprobs)))
            self.text, self.tokens = "", []
            if self.logprobs:
                self.logprobs = []
        if end is not None:
            if self.logprobs and isinstance(end, Finished):
                end = replace(end, logprobs=(*self.logprobs, *end.logprobs))
            self.deliver(end)
            self.ended.set_result(end)
            self._start(None)
        return told

    def _start(self, event: Started | None) -> None:
        if not self.started.done():
            self.started.set_result(event)


class OutputProcessor:
    """Turn the output of each part of a step into events, in one callback of the event loop it is made in.

    An answer that has been silent for `beat_seconds` sends Alive if the engine's thread has turned.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, beat_seconds: float) -> None:
        self._engine, self._tokenizer, self._beat_seconds = engine, tokenizer, beat_seconds
        self._loop = asyncio.get_running_loop()
        self._outputs: dict[Output, None] = {}
        self._emitted: list[tuple[Output, EngineEvent]] = []  # of the engine's thread
        self._beating: asyncio.TimerHandle | None = None
        engine.flush = self._flush

    def submit(
        self,
        request: GenerateRequest,
        deliver: Callable[[Event], None],
        admitted: Admitted = ADMITTED,
        matcher: LLMatcher | None = None,
    ) -> Output:
        """Submit a request, and have `admitted`, Started, text as it comes, then Finished (or Failed) delivered.

        `matcher` is that of its constraint. Raises EngineError where the request cannot be taken.
        """
        context = request.token_ids[-CONTEXT_TOKENS:]
        sampling = request.sampling
        detokenizer = Detokenizer(self._tokenizer, sampling.stop, context, sampling.shown_ids, sampling.min_tokens)
        output = Output(request, deliver, detokenizer, self._next_beat())
        output.turns = self._engine.turns
        self._engine.submit(request, lambda event: self._emitted.append((output, event)), matcher)
        self._outputs[output] = None
        if self._beating is None:
            self._beating = self._loop.call_at(output.beat, self._beat)
        deliver(admitted)
        return output

    def fail(self, output: Output, event: Failed) -> None:
        """End an answer, unless it has ended, with Failed, and abort the request."""
        if output.end is None:
            self._engine.cancel(output.request.id)
            self._process([(output, event)])

    def cancel(self, output: Output) -> None:
        """Stop listening, and abort the request if it has not ended."""
        if output in self._outputs:
            del self._outputs[output]
            if output.end is None:
                self._engine.cancel(output.request.id)
        if not output.ended.done():
            output.ended.cancel()

    def _flush(self) -> None:
        """Send emitted events to the event loop. For the engine's thread."""
        if self._emitted:
            emitted, self._emitted = self._emitted, []
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._process, emitted)

    def _process(self, emitted: list[tuple[Output, EngineEvent]]) -> None:
        taken: dict[Output, None] = {}
        for output, event in emitted:
            if not output.ended.done():
                try:
                    output.take(event)
                    taken[output] = None
                except Exception as error:  # of its text, say; the others must hear
                    output.fail(error)
        for output in taken:
            if output.ended.done():
                continue
            try:
                if output.tell():
                    output.beat, output.turns = self._next_beat(), self._engine.turns
            except Exception as error:
                output.fail(error)

    def _next_beat(self) -> float:
        return self._loop.time() + self._beat_seconds

    def _beat(self) -> None:
        self._beating = None
        now, turns = self._loop.time(), self._engine.turns
        for output in self._outputs:
            if now >= output.beat:
                if turns > output.turns and not output.ended.done():
                    output.deliver(Alive())
                output.beat, output.turns = self._next_beat(), turns
        if self._outputs:
            self._beating = self._loop.call_at(min(output.beat for output in self._outputs), self._beat)
