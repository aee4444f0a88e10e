"""The workload mix as token ids: what is prefilled, what is forced while decoding, and which of that is the answer.

No torch. The texts are held-out source code and held-out words of `warmkv.models.tiny`; any tokenizer encodes them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from warmkv.evaluation import documents
from warmkv.models.tiny import corpus
from warmkv.models.tiny import tasks as families

Form = Literal["plain", "chat"]
CODE_TOKENS = 64
COPIED_WORDS = 20
LISTED_KEYS = 6
TRIES = 20
MOST_CHARACTERS = 16  # of a token, on the average of any long text
EARLY, MIDDLE, RECENT = 0.1, 0.5, 0.9
WITHOUT_THINKING = {"enable_thinking": False, "thinking": False}
"""Variables of chat templates: a model that thinks first would begin no answer with its first word."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One question to a model. `forced` is fed token by token after `prompt`; its last `answer` tokens are scored.

    `depth` is where the fact stands that is asked for, 0 the beginning and 1 the end; None where there is no such one.
    """

    prompt: tuple[int, ...]
    forced: tuple[int, ...]
    answer: int
    depth: float | None


class Texts:
    """Held-out text and a tokenizer: encodes samples as this model reads them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        start = tokenizer.bos_token_id
        self.start: list[int] = [] if start is None else [start]
        self.world = corpus.World("heldout", self.count)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def tokens(self, sample: families.TaskSample) -> tuple[list[int], list[int]]:
        """Return prompt and answer of a sample, without the end mark, whose form differs by model."""
        if sample.chat:
            text = self._tokenizer.apply_chat_template(
                sample.messages(), add_generation_prompt=True, tokenize=False, **WITHOUT_THINKING
            )
            start, lead = [], ""
        else:
            text, start = sample.prompt().removeprefix(families.BOS), self.start
            lead = " " if sample.break_after == " " else ""
        prompt, whole = self.encode(text), self.encode(text + lead + sample.answer)
        # Together they may be split elsewhere than one by one (a space that belongs to a word).
        joint = whole[: len(prompt)] == prompt
        answer = whole[len(prompt) :] if joint else self.encode(lead + sample.answer)
        return [*start, *prompt], answer

    def source(self, rng: random.Random, tokens: int) -> list[int]:
        """Return consecutive tokens of held-out source files from a drawn line on, the first files again after the
        last.
        """
        files = corpus.texts("heldout")
        at = rng.randrange(len(files))
        lines = files[at].splitlines(keepends=True)
        text, out = "".join(lines[rng.randrange(len(lines)) :]), list[int]()
        while len(out) < tokens:
            out += self.encode(text[: MOST_CHARACTERS * tokens])
            at = (at + 1) % len(files)
            text = files[at]
        return out[:tokens]


Draw = Callable[[Texts, random.Random, int, float | None, bool], Sample]


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of question, and the workload that it stands for."""

    name: str
    workload: str
    about: str
    draw: Draw
    depths: tuple[float | None, ...] | None = (None,)  # None: those of the run
    forms: tuple[Form, ...] = ("plain", "chat")
    by_token: bool = False  # scored by the share of right tokens, not by whole answers


def has_template(tokenizer: Any) -> bool:
    """Return True if a tokenizer knows how its model takes chats."""
    return bool(getattr(tokenizer, "chat_template", None))


def decoded_tokens(length: int) -> int:
    """Count the last tokens that are decoded where a task is about decoding itself."""
    return max(48, min(128, length // 16))


def _of(sample: tuple[list[int], list[int]], depth: float | None = None, decoded: int = 0) -> Sample:
    prompt, answer = sample
    cut = len(prompt) - min(decoded, len(prompt) - 1)
    return Sample(tuple(prompt[:cut]), (*prompt[cut:], *answer), len(answer), depth)


def _needle(texts: Texts, rng: random.Random, length: int, depth: float | None, chat: bool) -> Sample:
    assert depth is not None
    return _of(texts.tokens(documents.needle(texts.world, rng, length, depth, chat)), depth)


def _family(name: str) -> Draw:
    def draw(texts: Texts, rng: random.Random, length: int, depth: float | None, chat: bool) -> Sample:
        return _of(texts.tokens(documents.of_family(texts.world, rng, name, length, chat)))

    return draw


def _passages(texts: Texts, rng: random.Random, length: int, depth: float | None, chat: bool) -> Sample:
    keys = max(4, length // 256)
    return _of(texts.tokens(documents.of_family(texts.world, rng, "passages", length, chat, keys)))


def _copying(texts: Texts, rng: random.Random, length: int, depth: float | None, chat: bool) -> Sample:
    return _of(texts.tokens(documents.copying(texts.world, rng, length, COPIED_WORDS, chat)))


def _summary(texts: Texts, rng: random.Random, length: int, depth: float | None, chat: bool) -> Sample:
    return _of(texts.tokens(documents.summary(texts.world, rng, length, LISTED_KEYS, chat)))


def _scratch(texts: Texts, rng: random.Random, length: int, depth: float | None, chat: bool) -> Sample:
    decoded = decoded_tokens(length)
    sample, depth = documents.scratch(texts.world, rng, length, depth == RECENT, decoded)
    return _of(texts.tokens(sample), depth, decoded)


def _chat(texts: Texts, rng: random.Random, length: int, depth: float | None, chat: bool) -> Sample:
    assert depth is not None
    sample = documents.conversation(texts.world, rng, length, depth, chat)
    return _of(texts.tokens(sample), depth, decoded_tokens(length))


def _code(texts: Texts, rng: random.Random, length: int, depth: float | None, chat: bool) -> Sample:
    ids = [*texts.start, *texts.source(rng, length - len(texts.start))]
    return _of((ids[:-CODE_TOKENS], ids[-CODE_TOKENS:]))


_LONG_SHORT, _LONG_LONG = "long input, short output", "long input, long output"
TASKS = {
    task.name: task
    for task in (
        Task("needle", _LONG_SHORT, "one code in a text, at every depth and length", _needle, None),
        Task("multi", _LONG_SHORT, "one of several keys with codes", _family("multi")),
        Task("two_hop", _LONG_SHORT, "a key whose code is that of another key", _family("two_hop")),
        Task("copying", _LONG_LONG, f"a phrase of {COPIED_WORDS} words, repeated", _copying, by_token=True),
        Task("summary", _LONG_LONG, f"{LISTED_KEYS} keys with codes, listed in order", _summary, by_token=True),
        Task(
            "scratch",
            "chain of thought",
            "values written in the prompt or while decoding, read back in the end",
            _scratch,
            (MIDDLE, RECENT),
            ("plain",),
        ),
        Task(
            "chat",
            "streaming chat",
            "an early, a middle and a recent fact after many turns, the last of them decoded",
            _chat,
            (EARLY, MIDDLE, RECENT),
        ),
        Task("passages", "RAG", "one of many numbered passages, asked for in other words", _passages),
        Task(
            "code",
            "code completion",
            f"the next {CODE_TOKENS} tokens of a source file",
            _code,
            (None,),
            ("plain",),
            True,
        ),
    )
}
STREAM = "stream"
"""The one task that has no samples: perplexity along a stream (`stream.py`)."""
NAMES = (*TASKS, STREAM)


def draw(task: Task, texts: Texts, *, seed: int, length: int, depth: float | None, form: Form, index: int) -> Sample:
    """Draw one sample; the same arguments always give the same.

    The first token after a prefill sees the whole prompt under any policy, so answers of a single one are drawn again.
    """
    rng = random.Random(f"{seed}/{task.name}/{form}/{length}/{depth}/{index}")
    for _ in range(TRIES):
        sample = task.draw(texts, rng, length, depth, form == "chat")
        if sample.answer > 1:
            break
    return sample


def forms_of(task: Task, wanted: Sequence[Form]) -> list[Form]:
    """Choose the forms in which a task is asked: those wanted that it has, else its own."""
    return [form for form in task.forms if form in wanted] or [task.forms[0]]
