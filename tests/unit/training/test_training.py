"""The shipped tiny model: it loads, its tokenizer and template are sound, its tasks are fair, it recalls."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from training import evaluate, net, tool_calls, train, vocabulary
from warmkv.models.tiny import PATH, corpus, tasks

transformers = pytest.importorskip("transformers")

MEGABYTE = 1_000_000
CASES = [(family, chat) for family in tasks.FAMILIES for chat in (False, True)]


@cache
def _tokenizer() -> Any:
    """Return the tokenizer for tests that hypothesis drives (it does not mix with fixtures)."""
    return transformers.AutoTokenizer.from_pretrained(PATH)


@pytest.fixture(autouse=True, scope="module")
def _few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return _tokenizer()


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def encode(tokenizer: Any) -> evaluate.Encode:
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture(scope="module")
def worlds(encode: evaluate.Encode) -> dict[str, corpus.World]:
    def count(text: str) -> int:
        return len(encode(text))

    return {"train": corpus.World("train", count), "heldout": corpus.World("heldout", count)}


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PATH / "figures.json").read_text(encoding="utf-8"))
    return found


def generated(model: Any, tokenizer: Any, messages: list[dict[str, Any]], tokens: int = 24) -> str:
    """What greedy decoding answers to a conversation, end mark included."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        out = model.generate(**prompt, max_new_tokens=tokens, do_sample=False)
    text: str = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])
    return text


# The folder


def test_loads_as_a_llama_with_grouped_heads(model: Any) -> None:
    config = model.config
    assert config.model_type == "llama"
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings >= 4096
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_is_small_and_in_half_precision() -> None:
    from safetensors import safe_open

    assert sum(file.stat().st_size for file in PATH.iterdir() if file.is_file()) <= 12 * MEGABYTE
    with safe_open(PATH / "model.safetensors", framework="pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.float16}  # noqa: SIM118


def test_ends_at_the_end_of_a_turn_and_of_text(model: Any, tokenizer: Any) -> None:
    ends = {tokenizer.convert_tokens_to_ids(token) for token in (tasks.BOS, tasks.TURN_END)}
    assert set(model.generation_config.eos_token_id) == ends


# The tokenizer


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=80))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = _tokenizer()
    if any(token in text for token in vocabulary.SPECIAL_TOKENS):
        return
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_every_byte_is_a_token_of_the_alphabet(tokenizer: Any) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    known = tokenizer.get_vocab()
    assert all(letter in known for letter in ByteLevel.alphabet())


@pytest.mark.parametrize("value", ["1000", "4821", "9999", "7007"])
def test_a_four_digit_value_is_two_tokens_wherever_it_stands(tokenizer: Any, value: str) -> None:
    pairs = [tokenizer.convert_tokens_to_ids(value[:2]), tokenizer.convert_tokens_to_ids(value[2:])]
    for text in (f"is {value}.", f"\n{value}\n", f"({value})", value):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert any(ids[i : i + 2] == pairs for i in range(len(ids)))


@pytest.mark.parametrize("family", list(tasks.FAMILIES))
def test_the_template_renders_what_the_tasks_train_on(tokenizer: Any, worlds: Any, family: str) -> None:
    for seed in range(6):
        sample = tasks.FAMILIES[family](worlds["train"], random.Random(seed), length=400, chat=True, turns=1 + seed % 3)
        rendered = tokenizer.apply_chat_template(sample.messages(), tokenize=False, add_generation_prompt=True)
        assert rendered == sample.prompt()
    whole = [*sample.messages(), {"role": "assistant", "content": sample.answer}]
    assert tokenizer.apply_chat_template(whole, tokenize=False) == sample.text() + "\n"


def test_the_template_joins_text_blocks_by_a_line_end(tokenizer: Any) -> None:
    blocks = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    as_blocks = tokenizer.apply_chat_template([{"role": "user", "content": blocks}], tokenize=False)
    as_text = tokenizer.apply_chat_template([{"role": "user", "content": "first\nsecond"}], tokenize=False)
    assert as_blocks == as_text


@pytest.mark.parametrize(("family", "chat"), CASES)
def test_pieces_encode_as_the_whole_text_does(worlds: Any, encode: evaluate.Encode, family: str, chat: bool) -> None:
    """Training and measuring encode prompt and answer apart; a server sees them as one text."""
    sample = tasks.FAMILIES[family](worlds["heldout"], random.Random(3), length=300, chat=chat, turns=2)
    pieces = [token for text, _ in sample.segments() for token in encode(text)]
    assert pieces == encode(sample.text())


@pytest.mark.parametrize("family", list(tool_calls.TOOL_FAMILIES))
def test_conversations_with_tools_are_what_the_template_renders(
    tokenizer: Any, worlds: Any, encode: evaluate.Encode, family: str
) -> None:
    """Word for word, and token by token where training encodes them piece by piece."""
    for seed in range(12):
        draw = tool_calls.TOOL_FAMILIES[family]
        sample = draw(worlds["train"], random.Random(seed), length=(256, 512, 700)[seed % 3], turns=1 + seed % 3)
        tools = list(sample.tools)
        prompt = tokenizer.apply_chat_template(
            sample.messages(), tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert prompt == sample.prompt()
        whole = tokenizer.apply_chat_template([*sample.messages(), sample.answer], tools=tools, tokenize=False)
        assert whole == sample.text() + "\n"
        assert [token for text, _ in sample.segments() for token in encode(text)] == encode(sample.text())
        assert bool(sample.answer.get("tool_calls")) == (family == "tool_call")
        names = [tool["function"]["name"] for tool in tools]
        assert len(set(names)) == len(names)


# The tasks


@pytest.mark.parametrize(("family", "chat"), CASES)
def test_a_seed_fixes_the_sample(worlds: Any, family: str, chat: bool) -> None:
    draw = tasks.FAMILIES[family]
    first, second, other = (draw(worlds["heldout"], random.Random(s), length=512, chat=chat) for s in (7, 7, 8))
    assert first == second
    assert first != other


@pytest.mark.parametrize("length", [512, 2048])
@pytest.mark.parametrize(("family", "chat"), CASES)
def test_samples_have_the_length_asked_for(
    worlds: Any, encode: evaluate.Encode, family: str, chat: bool, length: int
) -> None:
    for seed in range(3):
        sample = tasks.FAMILIES[family](worlds["heldout"], random.Random(seed), length=length, chat=chat)
        assert 0.9 * length <= len(encode(sample.text())) <= length


@pytest.mark.parametrize("family", list(tasks.FAMILIES))
def test_the_answer_stands_in_the_document(worlds: Any, family: str) -> None:
    for seed in range(5):
        sample = tasks.FAMILIES[family](worlds["heldout"], random.Random(seed), length=400, chat=True, turns=3)
        assert all(turn.answer in sample.document for turn in sample.turns)
        assert len(sample.earlier) == 2


def test_two_hops_need_both_statements(worlds: Any) -> None:
    sample = tasks.FAMILIES["two_hop"](worlds["heldout"], random.Random(0), length=300, chat=True, keys=1)
    stated = [line for line in sample.document.splitlines() if sample.answer in line]
    asked = [word for word in worlds["heldout"].words if f" {word}" in sample.question]
    assert asked
    assert not any(f" {word} " in line for word in asked for line in stated)


def test_the_last_write_counts(worlds: Any) -> None:
    for seed in range(20):
        sample = tasks.FAMILIES["scratch"](worlds["heldout"], random.Random(seed), length=300, chat=True)
        lines = sample.document.splitlines()
        last = max(i for i, line in enumerate(lines) if sample.answer in line)
        key = next(w for w in worlds["heldout"].words if f" {w}" in lines[last] and f" {w}" in sample.question)
        assert not any(f" {key} = " in line or f"slot {key} now" in line for line in lines[last + 1 :])


def test_heldout_words_and_files_never_train(worlds: Any) -> None:
    held = set(corpus.key_words("heldout"))
    assert len(held) > 200
    assert held.isdisjoint(corpus.key_words("train"))
    assert corpus.texts("heldout")
    assert len(corpus.texts("train")) > 10 * len(corpus.texts("heldout"))
    rng = random.Random(0)
    drawn = {key for _ in range(400) for key in worlds["train"].keys(rng, 10)}
    assert held.isdisjoint(drawn)
    assert all(corpus.word_split(key) == "train" for key in drawn)


def test_the_split_is_the_same_in_every_process() -> None:
    number = int.from_bytes(hashlib.sha256(b"word:harbor").digest()[:8], "big")
    assert (corpus.word_split("harbor") == "heldout") == (number % corpus.HELDOUT_WORD_SHARE == 0)


# The trainer


def test_the_exported_model_computes_what_was_trained(tmp_path: Path, tokenizer: Any) -> None:
    torch.manual_seed(0)
    trained = net.TinyNet(torch.float32)
    with torch.no_grad():
        for stack in (*trained.matrices(), *trained.others()):
            stack.copy_((stack + 0.05 * torch.randn_like(stack)).half())
    ids = torch.randint(0, vocabulary.VOCAB_SIZE, (2, 40))
    train.save_model(trained, tokenizer.backend_tokenizer, tmp_path, {"steps": 0})
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()
    with torch.no_grad():
        torch.testing.assert_close(exported(input_ids=ids).logits, trained.logits(ids), atol=2e-4, rtol=1e-4)


def test_training_goes_on_from_an_exported_model(tmp_path: Path, tokenizer: Any) -> None:
    torch.manual_seed(0)
    first, second = net.TinyNet(torch.float32), net.TinyNet(torch.float32)
    train.save_model(first, tokenizer.backend_tokenizer, tmp_path, {"steps": 0})
    second.take(load_file(tmp_path / "model.safetensors"))
    for before, after in zip((*first.matrices(), *first.others()), (*second.matrices(), *second.others()), strict=True):
        assert torch.equal(before.half(), after.half())


def test_muon_steps_have_equal_size_in_every_direction() -> None:
    torch.manual_seed(0)
    spread = torch.linalg.svdvals(net.orthogonalized(torch.randn(2, 64, 32)))
    assert spread.min() > 0.4
    assert spread.max() < 1.5


def test_training_rows_are_weighted_where_the_answers_are(tokenizer: Any) -> None:
    rows = train.Rows(tokenizer.backend_tokenizer, 0, corpus.texts("heldout")[:3])
    ids, weights, without_tools = rows.batch(256, 8, train.Phase(1.0, {256: 1.0}, {"multi": 1.0}, language=0.0))
    assert ids.shape == weights.shape == (8, 256)
    assert without_tools.all()
    answers = tokenizer.decode(ids[0][weights[0] == train.ANSWER])
    sample = tokenizer.decode(ids[0])
    assert answers.strip()
    assert all(value in sample for value in answers.replace(tasks.TURN_END, " ").split())


@pytest.mark.parametrize(("length", "without_tools"), [(256, False), (1024, True)])
def test_short_rows_are_drawn_from_families_of_their_own(tokenizer: Any, length: int, without_tools: bool) -> None:
    rows = train.Rows(tokenizer.backend_tokenizer, 0, corpus.texts("heldout")[:3])
    phase = train.Phase(1.0, {256: 1.0}, {"multi": 1.0}, language=0.0, short={"tool_call": 0.5, "spelling": 0.5})
    assert (rows.batch(length, 4, phase)[2] == without_tools).all()


@torch.no_grad()
def test_a_kept_row_is_pulled_towards_what_the_other_model_says() -> None:
    torch.manual_seed(0)
    trained, other = net.TinyNet(torch.float32), net.TinyNet(torch.float32)
    torch.nn.init.normal_(other.norm, std=3.0)
    ids = torch.randint(0, vocabulary.VOCAB_SIZE, (2, 12))
    weights = torch.ones(2, 12)
    taught = other.logits(ids)

    def loss(row: int, share: float) -> float:
        kept = torch.zeros(2)
        kept[row] = share
        return float(trained(ids, weights, taught, kept)[0])

    alone = float(trained(ids, weights)[0])
    assert loss(0, 0.0) == pytest.approx(alone)
    for row in range(2):
        said, seen = trained.logits(ids)[row, :-1].log_softmax(-1), ids[row, 1:]
        hard = -sum(float(said[at, token]) for at, token in enumerate(seen)) / 22
        soft = -float((taught[row, :-1].softmax(-1) * said).sum()) / 22
        assert loss(row, 0.25) == pytest.approx(alone + 0.25 * (soft - hard), rel=1e-4)


# What the model can do


@pytest.mark.parametrize(
    ("family", "form", "samples"),
    [
        ("multi", "chat", 2),
        *(
            pytest.param(family, form, 20, marks=pytest.mark.soak(least=0.5))
            for family in ("single", "multi")
            for form in ("plain", "chat")
        ),
    ],
)
def test_recalls_at_two_thousand_tokens(
    model: Any, encode: evaluate.Encode, family: str, form: str, samples: int, soaked: Callable[..., int]
) -> None:
    samples = soaked(samples, least=5)
    row = evaluate.recall(lambda ids: model(input_ids=ids).logits, encode, [(family, form, 2048)], samples)[0]
    assert row["samples"] == samples
    assert row["right"] / row["samples"] >= 0.8  # the card's 95% are of 250 samples; these are few


def test_answers_a_conversation_and_a_second_question(model: Any, tokenizer: Any, worlds: Any) -> None:
    right = 0
    for seed in range(6):
        sample = tasks.FAMILIES["multi"](worlds["heldout"], random.Random(seed), length=600, chat=True, turns=2)
        right += generated(model, tokenizer, sample.messages()) == sample.answer + tasks.TURN_END
    assert right >= 5


@pytest.mark.parametrize("family", list(tool_calls.TOOL_FAMILIES))
def test_calls_tools_for_what_only_they_know(model: Any, encode: evaluate.Encode, family: str) -> None:
    row = evaluate.recall(lambda ids: model(input_ids=ids).logits, encode, [(family, "chat", 512)], 12)[0]
    assert row["right"] >= 8


def test_answers_a_document_and_a_question_in_two_blocks(model: Any, tokenizer: Any, worlds: Any) -> None:
    filler = "\n".join(worlds["heldout"].filler(random.Random(5), 300))
    document = f"{filler}\n# the code of harbor is 4821\n{filler}"
    blocks = [{"type": "text", "text": document}, {"type": "text", "text": "What is the code of harbor?"}]
    assert generated(model, tokenizer, [{"role": "user", "content": blocks}]) == "4821" + tasks.TURN_END


def test_one_pass_scores_what_generation_gives(model: Any, tokenizer: Any, worlds: Any, encode: Any) -> None:
    for seed in range(4):
        family = list(tasks.FAMILIES)[seed]
        sample = tasks.FAMILIES[family](worlds["heldout"], random.Random(seed), length=300, chat=True)
        said = generated(model, tokenizer, sample.messages()) == sample.answer + tasks.TURN_END
        assert evaluate.answered(lambda ids: model(input_ids=ids).logits, encode, sample) == said


def test_perplexity_is_what_the_card_says(model: Any, encode: evaluate.Encode, figures: dict[str, Any]) -> None:
    text = max(corpus.texts("heldout"), key=len)[:12_000]
    ours = evaluate.model_perplexity(lambda ids: model(input_ids=ids).logits, np.array([0, *encode(text)]))
    assert ours < figures["perplexity"]["trigram"]


@pytest.mark.soak(least=0.5)
def test_perplexity_is_below_the_trigram_models(model: Any, encode: evaluate.Encode) -> None:
    learnt, test = evaluate.stream(encode, "train"), evaluate.stream(encode, "heldout")[:12_000]
    size = model.config.vocab_size
    unigram, trigram = (evaluate.ngram_perplexity(learnt, test, n, size) for n in (1, 3))
    ours = evaluate.model_perplexity(lambda ids: model(input_ids=ids).logits, test)
    assert ours < 0.8 * trigram < 0.8 * unigram


def test_ngram_model_is_a_distribution() -> None:
    train_ids = torch.randint(0, 5, (300,)).numpy()
    chances = [
        1 / evaluate.ngram_perplexity(train_ids, torch.tensor([1, 2, token]).numpy(), 3, 5) for token in range(5)
    ]
    assert sum(chances) == pytest.approx(1.0)


# The card


def test_the_card_shows_the_measured_figures(figures: dict[str, Any]) -> None:
    card = (PATH / "README.md").read_text(encoding="utf-8")
    assert evaluate.card_tables(figures) in card
    assert not figures["quick"]


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("single", "plain"),
        ("single", "chat"),
        ("multi", "plain"),
        ("multi", "chat"),
    ],
)
def test_the_measured_recall_reaches_its_target(figures: dict[str, Any], family: str, form: str) -> None:
    (cell,) = (r for r in figures["recall"] if (r["family"], r["form"], r["length"]) == (family, form, 2048))
    assert cell["samples"] == evaluate.PROMISED_SAMPLES
    assert cell["right"] / cell["samples"] >= 0.95


def test_perplexity_is_under_the_baselines(figures: dict[str, Any]) -> None:
    assert figures["perplexity"]["model"] < figures["perplexity"]["trigram"] < figures["perplexity"]["unigram"]
