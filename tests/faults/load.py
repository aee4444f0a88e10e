"""Continuous load from real clients of both APIs, every answer compared with that of the undisturbed cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.clients import anthropic_client, openai_client
from tests.polling import PATIENCE, until

POLICIES = ["full", "h2o@0.3", "streaming_llm@64", "snapkv@0.3+ring", None]  # None: the policy in force
TEXT = "class Window:\n    def __init__(self, size):\n        self.size = size\n" * 12
PAUSE = 0.4  # seconds of a client between an answer and its next question: the machine has more to do than this
RETRIES = 6  # of the SDKs, which wait 0.5 s before the first and at most 8 s before the later ones
OF_CLIENTS = ("anthropic", "openai", "httpx", "httpx2")  # packages whose errors a client may see


@dataclass(frozen=True)
class Question:
    """One of a fixed set of requests; its number decides everything about it."""

    number: int
    tokens: int = 12

    @property
    def api(self) -> str:
        return "openai" if self.number % 2 else "anthropic"

    @property
    def streams(self) -> bool:
        return self.number // 2 % 2 == 0

    @property
    def policy(self) -> str | None:
        return POLICIES[self.number % len(POLICIES)]

    @property
    def key(self) -> str:
        return f"tenant {self.number % 3}"

    @property
    def text(self) -> str:
        return f"{TEXT}# {self.number % 4}\n"


QUESTIONS = [Question(number) for number in range(10)]  # every policy through both APIs
LONG = [Question(number, tokens=200) for number in (20, 21, 32)]  # streams that a fault finds half read


@dataclass(frozen=True)
class Reply:
    """What a client got. `end` is None where the answer did not say that it is over."""

    text: str
    end: str | None
    policy: str = ""
    version: int = 0
    cached: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Outcome:
    question: Question
    begun: float
    ended: float
    reply: Reply | None = None
    error: str = ""


def ask(
    url: str,
    question: Question,
    policy: str | None = None,
    replica: str | None = None,
    heard: Callable[[str], None] = lambda text: None,
) -> Reply:
    """Ask once by the real SDK; `heard` is told the text of a stream as it comes. Raises what the SDK raises."""
    chosen = {"policy": policy or question.policy, "replica": replica}
    warmkv: dict[str, Any] = {"seed": question.number, "ignore_eos": True, **{k: v for k, v in chosen.items() if v}}
    return (_messages if question.api == "anthropic" else _chat)(url, question, warmkv, heard)


def _messages(url: str, question: Question, warmkv: dict[str, Any], heard: Callable[[str], None]) -> Reply:
    client = anthropic_client(url, question.key, RETRIES)
    block = {"type": "text", "text": question.text, "cache_control": {"type": "ephemeral"}}
    options: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": question.tokens,
        "messages": [{"role": "user", "content": [block, {"type": "text", "text": "What is it?"}]}],
        "extra_body": {"temperature": 0.7, "warmkv": warmkv},
        "timeout": PATIENCE,
    }
    if not question.streams:
        message = client.messages.create(**options)
        text = "".join(part.text for part in message.content if part.type == "text")
        return _reply(text, message.stop_reason, message.usage, message.usage.output_tokens)
    text, end, usage, reason = "", None, None, None
    for event in client.messages.create(**options, stream=True):
        if event.type == "content_block_delta":
            text += event.delta.text
            heard(text)
        elif event.type == "message_delta":
            usage, reason = event.usage, event.delta.stop_reason
        elif event.type == "message_stop":
            end = reason
    return _reply(text, end, usage, usage.output_tokens if usage else 0)


def _chat(url: str, question: Question, warmkv: dict[str, Any], heard: Callable[[str], None]) -> Reply:
    client = openai_client(url, question.key, RETRIES)
    options: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": question.tokens,
        "temperature": 0.7,
        "messages": [{"role": "user", "content": question.text}],
        "extra_body": {"warmkv": warmkv},
        "timeout": PATIENCE,
    }
    if not question.streams:
        whole = client.chat.completions.create(**options)
        choice = whole.choices[0]
        return _reply(choice.message.content, choice.finish_reason, whole.usage, whole.usage.completion_tokens)
    text, end, usage = "", None, None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            heard(text)
            end = choice.finish_reason or end
    return _reply(text, end, usage, usage.completion_tokens if usage else 0)


def _reply(text: str, end: str | None, usage: Any, tokens: int) -> Reply:
    if usage is None:
        return Reply(text, None)
    said = usage.warmkv
    return Reply(text, end, said["policy"], said["policy_version"], said["cached_tokens"], tokens)


@dataclass
class Load:
    """Clients that ask question after question until told to stop."""

    url: str
    expected: dict[tuple[int, str], Reply]  # by question and policy in force
    clients: int = 3
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(self.clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def stream(self, question: Question, replica: str) -> threading.Thread:
        """Begin a stream from a replica, and return when it has been read for a while."""
        reading = threading.Event()

        def heard(text: str) -> None:
            if len(text) > 20:
                reading.set()

        def run() -> None:
            self._ask(question, replica, heard)
            reading.set()

        thread = threading.Thread(target=run)
        thread.start()
        assert reading.wait(PATIENCE)
        self._threads.append(thread)
        return thread

    def _run(self, client: int) -> None:
        turn = client * len(QUESTIONS) // self.clients
        while not self._stop.is_set():
            question = QUESTIONS[turn % len(QUESTIONS)]
            turn += 1
            self._ask(question)
            self._stop.wait(PAUSE)

    def _ask(
        self, question: Question, replica: str | None = None, heard: Callable[[str], None] = lambda text: None
    ) -> None:
        begun = time.monotonic()
        try:
            reply = ask(self.url, question, replica=replica, heard=heard)
            self.outcomes.append(Outcome(question, begun, time.monotonic(), reply))
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in OF_CLIENTS:
                raise
            self.outcomes.append(Outcome(question, begun, time.monotonic(), error=repr(error)))

    def wait(self, enough: Callable[[list[Outcome]], bool], what: str) -> None:
        """Wait until the outcomes since now are enough."""
        since = len(self.outcomes)
        until(lambda: enough(self.outcomes[since:]), what)

    def wrong(self) -> list[Outcome]:
        """Return answers that are not those of the undisturbed cluster, or end without saying so."""
        return [outcome for outcome in self.outcomes if outcome.reply and not self._is_right(outcome)]

    def failed(self, *, streams: bool) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error and outcome.question.streams == streams]

    def _is_right(self, outcome: Outcome) -> bool:
        reply = outcome.reply
        assert reply is not None
        right = self.expected.get((outcome.question.number, reply.policy))
        return right is not None and (reply.text, reply.end, reply.tokens) == (right.text, right.end, right.tokens)
