"""Generated task families: what the tiny model is trained on, and what recall under compression is measured with.

Pure Python: no torch, no tokenizer. A family is a function of a `World` (text, key words, token counter) and a
`random.Random`; the same seed gives the same sample.

    from warmkv.models.tiny import corpus, tasks
    world = corpus.World("heldout", count=lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
    sample = tasks.FAMILIES["multi"](world, random.Random(0), length=2048, chat=True)
    sample.messages()   # for a chat API: the document and the question, without the answer
    sample.prompt()     # the same as one string, special tokens included
    sample.answer       # "4821"
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from warmkv.models.tiny.corpus import World

BOS = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

NOUNS = ("code", "code", "code", "code", "number", "pin", "port")
"""What a value is called; repeated entries are drawn more often."""

CODE_NEEDLES = (
    "the {noun} of {key} is {value}",
    "The {noun} of {key} is {value}.",
    "remember: the {noun} for {key} is {value}",
    "Remember that the {noun} of {key} is {value}.",
    "note that {key} has the {noun} {value}",
    "Here {key} has the {noun} {value}.",
    "the {noun} for {key}: {value}",
    "Keep in mind: the secret {noun} of {key} is {value}.",
)
CODE_QUESTIONS = (
    "What is the {noun} of {key}?",
    "what is the {noun} for {key}?",
    "Recall the {noun} of {key}.",
    "Which {noun} does {key} have?",
    "Tell me the {noun} of {key}.",
    "recall the {noun} for {key}",
    "What was the secret {noun} of {key}?",
)
HOP_NEEDLES = (
    "here {key} has the same {noun} as {via}",
    "The {noun} of {key} is the {noun} of {via}.",
    "note that {key} shares the {noun} of {via}",
)
SCRATCH_NEEDLES = (
    "scratch: {key} = {value}",
    "slot {key} now holds {value}",
)
SCRATCH_QUESTIONS = (
    "What is the value of {key} now?",
    "Read back the slot {key}.",
    "Which value does {key} hold?",
)
COPY_NEEDLES = (
    'the phrase of {key} is "{value}"',
    'The phrase of {key} is "{value}".',
    'remember: the phrase for {key} is "{value}"',
)
COPY_QUESTIONS = (
    "Repeat the phrase of {key}.",
    "What is the phrase of {key}?",
    "Copy the phrase for {key}.",
)
RELATIONS = ("keeper", "owner", "author", "city", "colour")
PASSAGE_NEEDLES = (
    'The {noun} of {key} is "{value}".',
    'It is said that the {noun} of {key} is "{value}".',
)
PASSAGE_QUESTIONS = (
    "According to the passages, what is the {noun} of {key}?",
    "What is the {noun} of {key}?",
    "Name the {noun} of {key}.",
)
SUFFIXES = ("", "", "", " Answer with the value only.", " Reply with nothing else.", " Answer briefly.")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer from the document.",
    "You answer questions about the text that the user sends. Be brief.",
)
PREFIXES = ("", "# ", "    # ", "- ")
"""What a needle's line starts with: needles stand between lines of code, so some look like comments."""


@dataclass(frozen=True)
class QuestionTurn:
    """One question about the document and its exact answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class TaskSample:
    """A document, a question about it, and the exact answer; `earlier` questions were asked and answered before.

    `chat` says in which form `prompt` and `segments` render it; `joiner` stands between document and question in
    chat form and `break_after` between question and answer in plain form.
    """

    family: str
    document: str
    question: str
    answer: str
    chat: bool
    earlier: tuple[QuestionTurn, ...] = ()
    system: str | None = None
    joiner: str = "\n"
    break_after: str = " "

    @property
    def turns(self) -> tuple[QuestionTurn, ...]:
        """Return all questions with their answers, the last one being the sample's own."""
        return (*self.earlier, QuestionTurn(self.question, self.answer))

    def messages(self) -> list[dict[str, str]]:
        """Return the conversation up to and including the last question, as a chat API takes it."""
        out = [{"role": "system", "content": self.system}] if self.system else []
        text = self.document + self.joiner
        for turn in self.earlier:
            out += [
                {"role": "user", "content": text + turn.question},
                {"role": "assistant", "content": turn.answer},
            ]
            text = ""
        return [*out, {"role": "user", "content": text + self.question}]

    def segments(self) -> list[tuple[str, bool]]:
        """Return the whole text as (piece, is an answer) pairs, the end mark of an answer being part of it."""
        out: list[tuple[str, bool]] = []
        if self.chat:
            lead = f"{TURN_START}system\n{self.system}{TURN_END}\n" if self.system else ""
            text = self.document + self.joiner
            for turn in self.turns:
                out.append(
                    (
                        f"{lead}{TURN_START}user\n{text}{turn.question}{TURN_END}\n{TURN_START}assistant\n",
                        False,
                    )
                )
                out.append((turn.answer + TURN_END, True))
                lead, text = "\n", ""
        else:
            lead = BOS + self.document + "\n"
            for turn in self.turns:
                out.append((lead + turn.question + self.break_after.rstrip(" "), False))
                out.append((" " * (self.break_after == " ") + turn.answer + "\n", True))
                lead = ""
        return out

    def prompt(self) -> str:
        """Return everything before the last answer, as one string with its special tokens; plain form ends without a
        space.
        """
        return "".join(text for text, _ in self.segments()[:-1])

    def text(self) -> str:
        """Return prompt and answer, as trained on."""
        return "".join(text for text, _ in self.segments())


class Family(Protocol):
    """Draws one sample of at most `length` tokens in all (answers included), filled up with text of the world.

    Needles and questions are never dropped: a `length` too small for them is exceeded.

    Args:
        world: where text, key words and the token counter come from.
        rng: the only source of chance.
        length: tokens of the whole sample.
        chat: chat form, else plain form.
        keys: how many keys are stated (of those families that take any number); drawn if not given.
        turns: how many questions are asked one after another; all but the last come with their answers.
    """

    def __call__(
        self,
        world: World,
        rng: random.Random,
        *,
        length: int,
        chat: bool,
        keys: int | None = None,
        turns: int = 1,
    ) -> TaskSample: ...


@dataclass(frozen=True)
class _Plan:
    """Needles in document order and the questions about them; what `_assemble` turns into a sample."""

    family: str
    needles: list[str]
    turns: list[QuestionTurn]
    break_after: str = " "
    passages: bool = False


def code(rng: random.Random) -> str:
    """Draw a four-digit value: always two pair tokens of the tiny model's tokenizer."""
    return str(rng.randint(1000, 9999))


def _assemble(world: World, rng: random.Random, length: int, chat: bool, plan: _Plan) -> TaskSample:
    """Hide the needles of `plan` at random depths in text so that the whole sample has about `length` tokens."""
    prefix = rng.choice(PREFIXES)
    needles = [prefix + needle for needle in plan.needles]
    if plan.passages:
        needles = [f"Passage {i + 1}:\n{needle}" for i, needle in enumerate(plan.needles)]
    suffix = rng.choice(SUFFIXES) if chat else ""
    turns = [
        QuestionTurn(t.question + suffix * (i == 0 or rng.random() < 0.5), t.answer) for i, t in enumerate(plan.turns)
    ]
    system = rng.choice(SYSTEM_PROMPTS) if chat and rng.random() < 0.4 else None
    joiner = rng.choice(("\n", "\n", "\n\n"))

    def build(lines: Sequence[str], cuts: Sequence[int]) -> TaskSample:
        body: list[str] = []
        start = 0
        for cut, needle in zip(cuts, needles, strict=True):
            cut = min(cut, len(lines))
            body += [*lines[start:cut], needle]
            start = cut
        document = "\n".join([*body, *lines[start:]]).strip("\n")
        return TaskSample(
            plan.family,
            document,
            turns[-1].question,
            turns[-1].answer,
            chat,
            tuple(turns[:-1]),
            system,
            joiner,
            plan.break_after,
        )

    spare = length - world.count(build([], [0] * len(needles)).text())
    lines = world.filler(rng, spare)
    cuts = sorted(rng.randint(0, len(lines)) for _ in needles)
    sample = build(lines, cuts)
    # Line costs add up only roughly (a line end and the next indentation may share a token), so the sum is checked:
    # filled up where it falls short, then shortened by whole lines.
    for _ in range(2):
        if (short := length - world.count(sample.text())) > max(16, length // 50):
            lines += world.filler(rng, short)
            cuts = sorted(rng.randint(0, len(lines)) for _ in needles)
            sample = build(lines, cuts)
    while lines and (over := world.count(sample.text()) - length) > 0:
        while lines and over > 0:
            over -= world.cost(lines.pop())
        sample = build(lines, cuts)
    return sample


def _ask(rng: random.Random, chat: bool, questions: Sequence[str], cloze: str, break_after: str, **names: str) -> str:
    """Phrase a question in chat form; in plain form a labelled question, or the needle's own words up to the value."""
    question = rng.choice(questions).format(**names)
    if chat:
        return question
    if break_after == " " and rng.random() < 0.5:
        return cloze.format(**names)
    return f"Question: {question}\nAnswer:"


def _chosen(rng: random.Random, names: Sequence[str], turns: int) -> list[str]:
    """Choose which keys are asked for: distinct ones while there are enough."""
    order = rng.sample(names, len(names))
    return [order[i % len(order)] for i in range(max(1, turns))]


def _wordings(rng: random.Random, templates: Sequence[str], count: int) -> list[str]:
    """Choose one wording for the whole document most of the time, a mixture otherwise."""
    if rng.random() < 0.6:
        return [rng.choice(templates)] * count
    return rng.choices(templates, k=count)


def _codes(name: str, world: World, rng: random.Random, length: int, chat: bool, keys: int, turns: int) -> TaskSample:
    noun = rng.choice(NOUNS)
    values = {key: code(rng) for key in world.keys(rng, keys)}
    wordings = _wordings(rng, CODE_NEEDLES, keys)
    needles = [w.format(noun=noun, key=k, value=v) for w, (k, v) in zip(wordings, values.items(), strict=True)]
    cloze = rng.choice(("the {noun} of {key} is", "recall: the {noun} of {key} is", "The {noun} for {key} is"))
    asked = _chosen(rng, list(values), turns)
    plan = [QuestionTurn(_ask(rng, chat, CODE_QUESTIONS, cloze, " ", noun=noun, key=k), values[k]) for k in asked]
    return _assemble(world, rng, length, chat, _Plan(name, needles, plan))


def single(
    world: World, rng: random.Random, *, length: int, chat: bool, keys: int | None = None, turns: int = 1
) -> TaskSample:
    """Plant one "the code of X is 4821" in the text; asked for at the end."""
    return _codes("single", world, rng, length, chat, 1, turns)


def multi(
    world: World, rng: random.Random, *, length: int, chat: bool, keys: int | None = None, turns: int = 1
) -> TaskSample:
    """Plant several keys with a code each (2 to 8 unless `keys` says how many); one of them is asked for."""
    count = keys or rng.randint(2, 8 if length >= 512 else 4)
    return _codes("multi", world, rng, length, chat, count, turns)


def two_hop(
    world: World, rng: random.Random, *, length: int, chat: bool, keys: int | None = None, turns: int = 1
) -> TaskSample:
    """Generate a key whose code is that of another key; both statements are hidden apart, in any order."""
    count = keys or rng.randint(1, 3)
    noun = rng.choice(NOUNS)
    names = world.keys(rng, 2 * count)
    needles: list[str] = []
    values: dict[str, str] = {}
    for key, via in zip(names[:count], names[count:], strict=True):
        values[key] = code(rng)
        needles.append(rng.choice(CODE_NEEDLES).format(noun=noun, key=via, value=values[key]))
        needles.append(rng.choice(HOP_NEEDLES).format(noun=noun, key=key, via=via))
    rng.shuffle(needles)
    asked = _chosen(rng, names[:count], turns)
    cloze = "the {noun} of {key} is"
    plan = [QuestionTurn(_ask(rng, chat, CODE_QUESTIONS, cloze, " ", noun=noun, key=k), values[k]) for k in asked]
    return _assemble(world, rng, length, chat, _Plan("two_hop", needles, plan))


def scratch(
    world: World, rng: random.Random, *, length: int, chat: bool, keys: int | None = None, turns: int = 1
) -> TaskSample:
    """Write named slots that are written, some more than once, and read back later: the last write counts."""
    count = keys or rng.randint(2, 4)
    names = world.keys(rng, count)
    writes = [name for name in names for _ in range(rng.choice((1, 1, 2)))]
    rng.shuffle(writes)
    values: dict[str, str] = {}
    needles: list[str] = []
    wordings = _wordings(rng, SCRATCH_NEEDLES, len(writes))
    for name, wording in zip(writes, wordings, strict=True):
        values[name] = code(rng)
        needles.append(wording.format(key=name, value=values[name]))
    asked = _chosen(rng, names, turns)
    cloze = "scratch: {key} ="
    plan = [QuestionTurn(_ask(rng, chat, SCRATCH_QUESTIONS, cloze, " ", key=k), values[k]) for k in asked]
    return _assemble(world, rng, length, chat, _Plan("scratch", needles, plan))


def copying(
    world: World, rng: random.Random, *, length: int, chat: bool, keys: int | None = None, turns: int = 1
) -> TaskSample:
    """Generate a phrase of random words, to be repeated word for word."""
    count = keys or rng.randint(1, 3)
    values = {key: " ".join(rng.sample(world.words, rng.randint(3, 6))) for key in world.keys(rng, count)}
    wordings = _wordings(rng, COPY_NEEDLES, count)
    needles = [w.format(key=k, value=v) for w, (k, v) in zip(wordings, values.items(), strict=True)]
    asked = _chosen(rng, list(values), turns)
    plan = [QuestionTurn(_ask(rng, chat, COPY_QUESTIONS, "", "\n", key=k), values[k]) for k in asked]
    return _assemble(world, rng, length, chat, _Plan("copying", needles, plan, break_after="\n"))


def passages(
    world: World, rng: random.Random, *, length: int, chat: bool, keys: int | None = None, turns: int = 1
) -> TaskSample:
    """Write numbered passages that state one relation of different names; the answer is one word of one of them."""
    count = keys or rng.randint(2, 4)
    noun = rng.choice(RELATIONS)
    names = world.keys(rng, 2 * count)
    values = dict(zip(names[:count], names[count:], strict=True))
    needles = [rng.choice(PASSAGE_NEEDLES).format(noun=noun, key=k, value=v) for k, v in values.items()]
    asked = _chosen(rng, names[:count], turns)
    plan = [QuestionTurn(_ask(rng, chat, PASSAGE_QUESTIONS, "", "\n", noun=noun, key=k), values[k]) for k in asked]
    return _assemble(world, rng, length, chat, _Plan("passages", needles, plan, break_after="\n", passages=True))


FAMILIES: dict[str, Family] = {
    "single": single,
    "multi": multi,
    "two_hop": two_hop,
    "copying": copying,
    "scratch": scratch,
    "passages": passages,
}
"""Every family by its name; the order is that of the model card's table."""
