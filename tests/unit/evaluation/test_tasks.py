"""Samples: what is asked can be known, at the depth that is said, and the same seed gives the same."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from warmkv.evaluation import tasks
from warmkv.evaluation.tasks import EARLY, MIDDLE, RECENT, TASKS

LENGTH = 512


def draw(texts, name, *, depth=None, form="chat", index=0, seed=0, length=LENGTH):
    return tasks.draw(TASKS[name], texts, seed=seed, length=length, depth=depth, form=form, index=index)


def parts(tokenizer, sample):
    """Text before the answer, and the answer."""
    forced = sample.forced[: -sample.answer]
    return tokenizer.decode([*sample.prompt, *forced]), tokenizer.decode(sample.forced[-sample.answer :]).strip()


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("form", ["plain", "chat"])
def test_a_seed_gives_the_same_sample_of_about_the_length(texts, name, form):
    depth = (TASKS[name].depths or (MIDDLE,))[0]
    sample = draw(texts, name, depth=depth, form=form)
    assert sample == draw(texts, name, depth=depth, form=form)
    assert sample != draw(texts, name, depth=depth, form=form, seed=1)
    assert LENGTH * 0.85 < len(sample.prompt) + len(sample.forced) <= LENGTH + 16
    assert 1 < sample.answer <= len(sample.forced)


@pytest.mark.parametrize("form", ["plain", "chat"])
@pytest.mark.parametrize("depth", [0.0, 0.3, 0.7, 1.0])
def test_the_needle_stands_at_its_depth(texts, tokenizer, form, depth):
    text, answer = parts(tokenizer, draw(texts, "needle", depth=depth, form=form, length=1024))
    assert len(answer) == 4
    assert abs(text.index(answer) / len(text) - depth) < 0.12


@pytest.mark.parametrize("name", ["needle", "multi", "two_hop", "copying", "passages"])
def test_the_answer_stands_in_the_prompt_and_nothing_else_is_forced(texts, tokenizer, name):
    sample = draw(texts, name, depth=MIDDLE)
    text, answer = parts(tokenizer, sample)
    assert answer in text
    assert len(sample.forced) == sample.answer


def test_the_prompt_is_what_the_chat_template_makes(texts, tokenizer):
    text, _ = parts(tokenizer, draw(texts, "multi"))
    assert text.startswith("<|im_start|>user\n")
    assert text.endswith("Answer with the value only.<|im_end|>\n<|im_start|>assistant\n")
    assert text.count("<|im_start|>") == 2


def test_a_hybrid_model_answers_without_thinking(tokenizer):
    """Render what Qwen3's template ends with where thinking is off, and the other name of that variable."""
    closed = "<think>\n\n</think>\n\n"
    for name in ("enable_thinking", "thinking"):
        changed = copy.deepcopy(tokenizer)
        changed.chat_template += f"{{%- if {name} is defined and not {name} -%}}{{{{- {closed!r} -}}}}{{%- endif -%}}"
        text, answer = parts(tokenizer, draw(tasks.Texts(changed), "multi"))
        assert text.endswith(f"<|im_start|>assistant\n{closed}")
        assert answer == parts(tokenizer, draw(tasks.Texts(tokenizer), "multi"))[1]


def test_plain_text_begins_with_the_start_token_if_there_is_one(texts, tokenizer):
    assert draw(texts, "needle", depth=0.5, form="plain").prompt[0] == tokenizer.bos_token_id
    assert draw(texts, "code", form="plain").prompt[0] == tokenizer.bos_token_id
    bare = tasks.Texts(SimpleNamespace(encode=tokenizer.encode, bos_token_id=None))
    sample = draw(bare, "needle", depth=0.5, form="plain")
    assert sample.prompt == draw(texts, "needle", depth=0.5, form="plain").prompt[1:]


def test_a_summary_lists_every_code_in_the_order_of_the_text(texts, tokenizer):
    text, answer = parts(tokenizer, draw(texts, "summary"))
    places = [text.index(line.split(": ")[1]) for line in answer.splitlines()]
    assert len(places) == tasks.LISTED_KEYS
    assert places == sorted(places)


def test_scratch_values_are_written_in_the_prompt_or_while_decoding(texts, tokenizer):
    for depth, there in ((MIDDLE, "prompt"), (RECENT, "decoded")):
        for index in range(5):
            sample = draw(texts, "scratch", depth=depth, form="plain", index=index)
            _, answer = parts(tokenizer, sample)
            decoded = tokenizer.decode(sample.forced[: -sample.answer])
            written = {"prompt": tokenizer.decode(sample.prompt), "decoded": decoded}
            assert answer in written[there]
            assert len(sample.forced) - sample.answer == tasks.decoded_tokens(LENGTH)


@pytest.mark.parametrize("form", ["plain", "chat"])
def test_a_conversation_states_what_it_asks_for_once_and_long_before(texts, tokenizer, form):
    for depth in (EARLY, MIDDLE, RECENT):
        sample = draw(texts, "chat", depth=depth, form=form, length=1024)
        text, answer = parts(tokenizer, sample)
        assert text.count(answer) == 1  # no earlier answer repeats it
        assert abs(text.index(answer) / len(text) - depth) < 0.2


def test_code_goes_on_where_the_prompt_ends(texts, tokenizer):
    sample = draw(texts, "code", form="plain")
    assert sample.answer == len(sample.forced) == tasks.CODE_TOKENS
    text = tokenizer.decode(sample.prompt[1:]) + tokenizer.decode(sample.forced)
    assert text in "".join(2 * tasks.corpus.texts("heldout"))


def test_a_task_without_the_form_asked_for_takes_its_own():
    assert tasks.forms_of(TASKS["code"], ["chat"]) == ["plain"]
    assert tasks.forms_of(TASKS["needle"], ["plain", "chat"]) == ["plain", "chat"]
