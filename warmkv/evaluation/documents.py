"""Documents and conversations that the evaluation asks about, beside the families of the tiny model's training."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from warmkv.models.tiny import tasks
from warmkv.models.tiny.corpus import World
from warmkv.models.tiny.tasks import QuestionTurn, TaskSample

VALUE_ONLY = " Answer with the value only."
SCRATCH_FIRST, SCRATCH_AGAIN = 0.25, 0.5
"""Depths at which a scratch slot is written, and written again: the second value counts."""
TURN_TOKENS = 96


def ask(question: str, chat: bool) -> str:
    """Phrase a question as the tiny model's families do; in chat form it asks for nothing but the value.

    Chat models would otherwise wrap the value in a sentence, and the forced answer would be scored as wrong.
    """
    return question + VALUE_ONLY if chat else f"Question: {question}\nAnswer:"


def of_family(
    world: World, rng: random.Random, family: str, length: int, chat: bool, keys: int | None = None
) -> TaskSample:
    """Generate a sample of a family, without a system prompt (not every chat template takes one)."""
    sample = tasks.FAMILIES[family](world, rng, length=length, chat=chat, keys=keys)
    if not chat:
        return sample
    question = sample.question
    for suffix in filter(None, set(tasks.SUFFIXES)):
        question = question.removesuffix(suffix)
    return replace(sample, question=question + VALUE_ONLY, system=None)


def needle(world: World, rng: random.Random, length: int, depth: float, chat: bool) -> TaskSample:
    """Put one code into the text, at a given depth (0 the beginning, 1 the end)."""
    noun, value = rng.choice(tasks.NOUNS), tasks.code(rng)
    (key,) = world.keys(rng, 1)
    line = rng.choice(tasks.CODE_NEEDLES).format(noun=noun, key=key, value=value)
    question = ask(rng.choice(tasks.CODE_QUESTIONS).format(noun=noun, key=key), chat)
    return hide(world, rng, length, [(depth, line)], lambda text: TaskSample("needle", text, question, value, chat))


def copying(world: World, rng: random.Random, length: int, words: int, chat: bool) -> TaskSample:
    """Generate a text with a long phrase of random words, to be repeated word for word."""
    (key,) = world.keys(rng, 1)
    phrase = " ".join(rng.sample(world.words, words))
    line = rng.choice(tasks.COPY_NEEDLES).format(key=key, value=phrase)
    question = ask(rng.choice(tasks.COPY_QUESTIONS).format(key=key), chat)
    make = lambda text: TaskSample("copying", text, question, phrase, chat, break_after="\n")  # noqa: E731
    return hide(world, rng, length, [(rng.random(), line)], make)


def summary(world: World, rng: random.Random, length: int, keys: int, chat: bool) -> TaskSample:
    """Put codes all over the text; the answer lists every key with its code, in the order of the text."""
    noun = rng.choice(tasks.NOUNS)
    values = {key: tasks.code(rng) for key in world.keys(rng, keys)}
    template = rng.choice(tasks.CODE_NEEDLES)
    facts = [
        ((at + rng.random()) / keys, template.format(noun=noun, key=key, value=value))
        for at, (key, value) in enumerate(values.items())
    ]
    question = f"List every {noun} in the order of the text, one a line, as key: {noun}."
    question = question if chat else f"Question: {question}\nAnswer:"
    answer = "\n".join(f"{key}: {value}" for key, value in values.items())
    make = lambda text: TaskSample("summary", text, question, answer, chat, break_after="\n")  # noqa: E731
    return hide(world, rng, length, facts, make)


def scratch(world: World, rng: random.Random, length: int, late: bool, decoded: int) -> tuple[TaskSample, float]:
    """Write scratch values that are read back in the end, return them and the depth at which the one asked for was
    written.

    One slot is written twice in the prompt, another (`late`: this one is asked for) among the last `decoded` tokens,
    which are decoded rather than prefilled: the model's own reasoning.
    """
    early_key, late_key = world.keys(rng, 2)
    template = rng.choice(tasks.SCRATCH_NEEDLES)
    old, early_value, late_value = (tasks.code(rng) for _ in range(3))
    line = template.format(key=late_key, value=late_value)
    question = ask(rng.choice(tasks.SCRATCH_QUESTIONS).format(key=late_key if late else early_key), False)
    after = max(0, decoded - world.count(question) - world.count(line) - 2)  # filler between it and the question
    depth = 1 - after / length
    facts = [
        (SCRATCH_FIRST, template.format(key=early_key, value=old)),
        (SCRATCH_AGAIN, template.format(key=early_key, value=early_value)),
        (depth, line),
    ]
    answer = late_value if late else early_value
    sample = hide(world, rng, length, facts, lambda text: TaskSample("scratch", text, question, answer, False))
    return sample, depth if late else SCRATCH_AGAIN


def conversation(world: World, rng: random.Random, length: int, depth: float, chat: bool) -> TaskSample:
    """Write many turns that each state a fact and ask about one; the last asks for the fact stated at `depth` of them.

    That fact is never asked about before, so that no earlier answer repeats it.
    """
    count = max(4, length // TURN_TOKENS)
    stated = round(depth * (count - 1))
    noun, template = rng.choice(tasks.NOUNS), rng.choice(tasks.CODE_NEEDLES)
    names = world.keys(rng, count + 1)  # the last one is stated in the first turn, too
    values = {name: tasks.code(rng) for name in names}
    question = rng.choice(tasks.CODE_QUESTIONS)
    heads, asked = [], []
    for turn in range(count):
        said = [names[turn], names[-1]] if turn == 0 else [names[turn]]
        heads.append([template.format(noun=noun, key=key, value=values[key]) for key in said])
        known = [key for key in (names[-1], *names[: turn + 1]) if key != names[stated]]
        asked.append(names[stated] if turn == count - 1 else rng.choice(known))

    def build(fillers: Sequence[Sequence[str]]) -> TaskSample:
        texts = ["\n".join([*filler, *head]) for filler, head in zip(fillers, heads, strict=True)]
        turns: list[QuestionTurn] = []
        for text, key in zip(texts, asked, strict=True):
            lead = f"{text}\n" if turns else ""  # the first text is the sample's document
            turns.append(QuestionTurn(lead + ask(question.format(noun=noun, key=key), chat), values[key]))
        return TaskSample("chat", texts[0], turns[-1].question, turns[-1].answer, chat, tuple(turns[:-1]))

    room, fillers = length - world.count(build([()] * count).text()), list[list[str]]()
    for turn in range(count):
        fillers.append(world.filler(rng, room // (count - turn)))
        room -= sum(map(world.cost, fillers[-1]))
    while any(fillers) and world.count(build(fillers).text()) > length:
        max(fillers, key=len).pop()
    return build(fillers)


def hide(
    world: World, rng: random.Random, length: int, facts: Sequence[tuple[float, str]], make: Callable[[str], TaskSample]
) -> TaskSample:
    """Apply `make` to a text with each fact at its depth, filled up so that the whole sample has `length` tokens."""
    prefix = rng.choice(tasks.PREFIXES)
    facts = sorted((depth, prefix + line) for depth, line in facts)
    lines = world.filler(rng, length - world.count(make(_woven(world, [], facts)).text()))
    while True:
        sample = make(_woven(world, lines, facts))
        over = world.count(sample.text()) - length
        if over <= 0 or not lines:
            return sample
        while lines and over > 0:
            over -= world.cost(lines.pop())


def _woven(world: World, lines: Sequence[str], facts: Sequence[tuple[float, str]]) -> str:
    """Insert every fact before the first line that begins at its depth or later."""
    total, before, waiting, out = sum(map(world.cost, lines)), 0, list(facts), []
    for line in lines:
        while waiting and before >= waiting[0][0] * total:
            out.append(waiting.pop(0)[1])
        out.append(line)
        before += world.cost(line)
    return "\n".join([*out, *(line for _, line in waiting)])
