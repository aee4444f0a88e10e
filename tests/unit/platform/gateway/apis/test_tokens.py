"""Tokens and hashes of a prefix seen before are not computed again, and are what they would be if they were."""

from __future__ import annotations

import copy
import functools
import json
import threading
import tracemalloc
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.unit.platform.exchanges import Gateway, arrival, chat, message
from warmkv.config import LimitsConfig, ModelConfig
from warmkv.platform.gateway.apis import cuts, tokens
from warmkv.platform.gateway.apis.prompt import render
from warmkv.platform.gateway.apis.templates import Uses, uses_of_content
from warmkv.platform.gateway.apis.token_cache import TokenCache, TokenizedPiece
from warmkv.platform.gateway.apis.tokens import OPTIONS, Piece, Prompt, Rendered, tokenize
from warmkv.platform.gateway.apis.turns import ContentBlock, Turn
from warmkv.platform.gateway.intake.parsing import Parsing
from warmkv.platform.tenants import Tenant, chain_root
from warmkv.prefixes import breakpoints
from warmkv.prefixes.hashing import block_hashes
from warmkv.replicas.loading.tokenizer import load_tokenizer

ROOT, SIZE = b"of a tenant", 4
CORPUS = [
    "the king said to the queen:  go, and see\nwhat the 12 men do.",
    "<|im_start|>user\nthe end<|im_end|>\n",
    "é€ ok",
]
SPECIAL = ["<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def tokenizer(kind: str) -> Any:
    """Return a real tokenizer: that of the shipped model, or one trained on a few words."""
    from transformers import PreTrainedTokenizerFast

    if kind == "tiny":
        return load_tokenizer(ModelConfig())
    if kind == "unigram":
        made = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(vocab_size=90, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>")
    else:
        made = Tokenizer(models.BPE(byte_fallback=kind == "sentencepiece", unk_token="<unk>"))
        alphabet = pre_tokenizers.ByteLevel.alphabet() if kind.startswith("bytes") else []
        alphabet = [f"<0x{value:02X}>" for value in range(256)] if kind == "sentencepiece" else alphabet
        special = ["<unk>", *SPECIAL]
        if kind == "sentencepiece":
            special, alphabet = [*special, *alphabet], []
        trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=special, initial_alphabet=alphabet)
    if kind.startswith("bytes"):
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "bytes, space in front")
        made.decoder = decoders.ByteLevel()
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
    made.train_from_iterator(CORPUS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=SPECIAL, chat_template=CHATML)


KINDS = ["tiny", "bytes", "bytes, space in front", "sentencepiece", "unigram"]
TEXTS = st.sampled_from(["the king", " said", "go,\n", "é", "<|im_end|>", "the queen  ", "1", "see what the men do"])
MESSAGES = st.lists(st.lists(TEXTS, min_size=1, max_size=2), min_size=1, max_size=4)


def conversation(texts: Sequence[Sequence[str]]) -> list[Turn]:
    turns = [
        Turn("user" if at % 2 == 0 else "assistant", tuple(map(ContentBlock, said))) for at, said in enumerate(texts)
    ]
    return turns if len(turns) % 2 else [*turns[:-1], Turn("user", turns[-1].blocks)]


def plain(tokenizer: Any, rendered: Rendered, root: bytes) -> Prompt:
    """Tokenize every piece by itself, with nothing remembered."""
    made, ends = list[int](), [0] * len(rendered.ttls)
    for piece in rendered.pieces:
        if piece.text:
            made += tokenizer(piece.text, **OPTIONS[piece.kind])["input_ids"]
        if piece.block is not None:
            ends[piece.block] = len(made)
    hashes = tuple(block_hashes(made, SIZE, root))
    return Prompt(tuple(made), tuple(ends), rendered.ttls, 0, hashes, root, rendered.outline)


@pytest.mark.parametrize("kind", KINDS)
@given(
    conversations=st.lists(st.tuples(MESSAGES, st.booleans()), max_size=5), capacity=st.sampled_from([0, 3000, 10**6])
)
def test_a_prompt_is_the_same_whatever_was_seen_before(kind, conversations, capacity):
    """Conversations that go on, begin alike, or are sent by another tenant, in a cache that holds few or all."""
    cache, before = TokenCache(capacity, capacity), list[list[str]]()
    for texts, goes_on in conversations:
        before = before + texts if goes_on else texts
        rendered = render(tokenizer(kind), conversation(before))
        for root in (ROOT, b"of another"):
            made = tokenize(tokenizer(kind), rendered, cache, root, SIZE)
            assert made == plain(tokenizer(kind), rendered, root)
    assert cache.nbytes <= capacity


@given(MESSAGES, st.integers(0, 40))
def test_a_plan_with_known_hashes_is_the_plan(texts, other_from):
    prompt = plain(tokenizer("bytes"), render(tokenizer("bytes"), conversation(texts)), ROOT)
    marks = [breakpoints.Breakpoint(end, "5m") for end in prompt.ends]
    for other in (None, min(other_from, len(prompt.tokens) - 1)):
        plan = functools.partial(
            breakpoints.plan, prompt.tokens, prompt.ends, marks, ROOT, block_size=SIZE, other_from=other
        )
        assert plan(known=prompt.hashes) == plan(known=prompt.hashes[:2]) == plan()


class Counting:
    """A tokenizer that notes the texts it is given, and how often its template is rendered."""

    def __init__(self, counted: Any) -> None:
        self._counted, self.texts, self.rendered = counted, list[str](), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._counted, name)

    def __call__(self, texts: Any, **options: Any) -> Any:
        self.texts += [texts] if isinstance(texts, str) else texts
        return self._counted(texts, **options)

    def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
        self.rendered += 1
        return self._counted.apply_chat_template(*arguments, **options)


class Counted:
    """A gateway's parsing of the bodies of one tenant or another; what it has done since the last body."""

    def __init__(self, folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gateway = Gateway(folder)
        self.tokenizer = Counting(load_tokenizer(self.gateway.config.model))
        self.parsing = Parsing(self.gateway.service, self.tokenizer, 4096)
        self.size, self.hashed = self.gateway.config.prefix_cache.block_size, 0
        monkeypatch.setattr(tokens, "block_hashes", self._block_hashes)

    def _block_hashes(self, ids: Sequence[int], size: int, root: bytes) -> list[bytes]:
        found = block_hashes(ids, size, root)
        self.hashed += len(found)
        return found

    def parse(self, body: dict[str, Any], salt: bytes = b"a") -> Prompt:
        self.tokenizer.texts, self.tokenizer.rendered, self.hashed = [], 0, 0
        take = self.parsing.chat if "max_tokens" not in body else self.parsing.message
        take = self.parsing.completion if "prompt" in body else take
        came = arrival(self.gateway.service, Tenant("", salt, frozenset(), LimitsConfig()))
        parsed = take(came, json.dumps(body).encode(), self.tokenizer)
        return (parsed[0] if isinstance(parsed, list) else parsed).prompt


@pytest.fixture
def counted(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(tmp_path, monkeypatch)


LONG = "The pump of house seven was repaired in May. " * 40 + "That is all."


@pytest.mark.parametrize("api", [message, chat])
def test_of_the_next_turn_only_the_new_text_is_tokenized_and_hashed(counted, api):
    said = [{"role": "user", "content": LONG}]
    first = counted.parse(api(counted.gateway, messages=said))
    assert LONG in counted.tokenizer.texts
    assert counted.hashed == len(first.tokens) // counted.size > 5
    said += [{"role": "assistant", "content": "In May, then."}, {"role": "user", "content": "And house eight?"}]
    second = counted.parse(api(counted.gateway, messages=said))
    assert counted.tokenizer.rendered == 1
    end = "<|im_end|>\n<|im_start|>"
    new = [f"{end}user\n", f"{end}assistant\n", "In May, then.", "And house eight?"]  # not what went before the answer
    assert sorted(counted.tokenizer.texts) == sorted(new)
    assert counted.hashed == len(second.tokens) // counted.size - len(first.tokens) // counted.size
    assert counted.parse(api(counted.gateway, messages=said)) == second
    assert (counted.tokenizer.texts, counted.hashed) == ([], 0)


def test_a_text_without_a_template_is_tokenized_once(counted):
    body = {"model": counted.gateway.config.model.name, "prompt": LONG}
    first = counted.parse(body)
    assert counted.tokenizer.texts == [LONG]
    assert counted.parse(body) == first
    assert (counted.tokenizer.texts, counted.hashed) == ([], 0)


WORDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
WORDS += "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"


@functools.cache
def cutting(kind: str) -> Any:
    """Return a tokenizer that may be cut between words: the words of Llama 3, or with NFC and a token in front."""
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    if kind == "llama, NFC, begin":
        made.normalizer = normalizers.NFC()
        made.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=CHATML)


CUTTING = {"tiny": tokenizer, "bytes": tokenizer, "llama": cutting, "llama, NFC, begin": cutting}
PIECES = [
    "the",
    " ",
    "  ",
    "\n",
    "a b",
    "e\u0301",
    "<|im_end|>",
    "12345",
    "I'll see",
    " \u0301",
    "word, and more",
    "é€",
    "\t",
]


@pytest.mark.parametrize("kind", CUTTING)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40), special=st.booleans())
def test_parts_of_a_text_have_the_tokens_of_the_whole(kind, pieces, special):
    """Also where a word begins, or ends, in the middle of a run of whitespace, or of marks that are composed."""
    made, text = CUTTING[kind](kind), "".join(pieces)
    assert cuts.cuts_between_words(made)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cuts, "PART_CHARACTERS", 3)
        whole = Rendered([Piece(text, "plain" if special else "content", 0)], (None,))
        assert "".join(piece.text for piece in whole.cut().pieces) == text
        assert plain(made, whole.cut(), ROOT) == plain(made, whole, ROOT)


def test_tokenizers_that_are_not_known_to_allow_it_are_not_cut():
    for kind in ("bytes, space in front", "sentencepiece", "unigram"):
        assert not cuts.cuts_between_words(tokenizer(kind))
    for change in ("single word", "with a space", "takes spaces", "end", "other words", "lower case"):
        made = copy.deepcopy(cutting("llama"))
        backend = made.backend_tokenizer
        if change == "single word":
            backend.add_tokens([AddedToken("king", single_word=True)])
        elif change == "with a space":
            backend.add_tokens(["the king"])
        elif change == "takes spaces":
            backend.add_tokens([AddedToken("king", rstrip=True)])
        elif change == "end":
            backend.post_processor = processors.TemplateProcessing(
                single="$A <|im_end|>", special_tokens=[("<|im_end|>", 1)]
            )
        elif change == "other words":
            backend.pre_tokenizer = pre_tokenizers.Split(Regex(".{1,5}"), "isolated")
        else:
            backend.normalizer = normalizers.Lowercase()
        assert not cuts.cuts_between_words(made), change


def test_of_a_long_text_that_goes_on_only_the_rest_is_tokenized(counted):
    """Whether it is a prompt by itself, or a document with a question behind it."""
    document = " ".join(f"the pump of house {number} was repaired in may" for number in range(200))
    for make in (
        lambda text: {"model": counted.gateway.config.model.name, "prompt": text},
        lambda text: message(counted.gateway, text),
    ):
        whole = counted.parse(make(f"{document} when was it?"))
        asked = counted.parse(make(f"{document} which house was next?"))
        assert 0 < len("".join(counted.tokenizer.texts)) < cuts.PART_CHARACTERS + 200
        shared = sum(ours == theirs for ours, theirs in zip(whole.hashes, asked.hashes, strict=False))
        assert counted.hashed <= len(asked.hashes) - shared + cuts.PART_CHARACTERS // counted.size
        assert counted.parse(make(f"{document} which house was next?"), b"new").tokens == asked.tokens


def test_tools_and_system_prompt_are_tokenized_once(counted):
    tools = [{"name": name, "description": LONG, "input_schema": {"type": "object"}} for name in ("look", "find")]
    head = {"system": LONG, "tools": tools}
    counted.parse(message(counted.gateway, "one", **head))
    counted.parse(message(counted.gateway, "two", **head))
    assert counted.tokenizer.rendered == 1
    assert counted.tokenizer.texts == ["<|im_end|>\n<|im_start|>assistant\n", "two"]


def test_nobody_finds_what_another_tenant_has_sent(counted):
    body = message(counted.gateway, LONG)
    ours = counted.parse(body)
    work = sorted(counted.tokenizer.texts), counted.hashed
    theirs = counted.parse(body, b"b")
    assert (sorted(counted.tokenizer.texts), counted.hashed) == work
    assert ours.tokens == theirs.tokens
    assert not set(ours.hashes) & set(theirs.hashes)


STRIPS = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
LOOKS = "{% for m in messages %}<{{ m.content[:] }}>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "content", "renderings"),
    [(None, " or  ", 1), (STRIPS, "two\n lines", 1), (STRIPS, " in front", 3), (STRIPS, "", 2), (LOOKS, "a", 2)],
)
def test_a_template_is_rendered_once_unless_marks_may_matter(counted, template, content, renderings):
    if template is not None:
        counted.tokenizer.chat_template = counted.tokenizer._counted.chat_template = template
    counted.parse(message(counted.gateway, content))
    assert counted.tokenizer.rendered == renderings


LOOPS = "{%% for m in messages %%}%s{%% endfor %%}"
WRITING = [
    CHATML,
    "{% set all = messages[1:] if messages[0].role == 'system' else messages %}"
    + "{% for m in all %}[{{ m['content'] | trim }}]{% endfor %}",
    "{% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.content %}{% endfor %}{{ ns.last }}",
    LOOPS % "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}",
    LOOPS
    % "{% if m.content %}{{ loop.index ~ m.content.strip() }}{% endif %}{% if 'tool_calls' in m %}calls{% endif %}",
    "{{ bos_token }}" + LOOPS % "{% set c = '[INST] ' + m.content + ' [/INST]' %}{% if loop.last %}{{ c }}{% endif %}",
    LOOPS % "{% if loop.index0 and messages[loop.index0 - 1].role != 'tool' %}{{ m.content or '-' }}{% endif %}",
]
LOOKING = [
    LOOPS % "{{ m.content | upper }}",
    LOOPS % "{% if m.content.startswith('a') %}b{% endif %}{{ m.content }}",
    LOOPS % "{{ m.content.split('</think>')[-1] }}",
    LOOPS % "{{ m.content[1:] }}",
    LOOPS % "{{ m.content | length }}",
    LOOPS % "{{ m.content | tojson }}",
    LOOPS % "{{ 'a' if m.content == 'a' else m.content }}",
    LOOPS % "{{ 'a' if 'b' in m.content else m.content }}",
    LOOPS % "{{ m }}",
    LOOPS % "{{ m.get('content') }}",
    LOOPS % "{{ m[key] }}",
    LOOPS % "{% for letter in m.content %}{{ letter }}-{% endfor %}",
    LOOPS % "{% filter upper %}{{ m.content }}{% endfilter %}",
    LOOPS % "{% set c %} {{ m.content }} {% endset %}{{ c | trim }}",
    LOOPS % "{% if late == 'a' %}b{% endif %}{% set late = m.content %}{{ m.content }}",
    LOOPS % "{{ loop.previtem.content | upper if loop.previtem }}{{ m.content }}",
    "{% macro show(text) %} {{ text }} {% endmacro %}" + LOOPS % "{{ show(m.content) | trim }}",
    "{% set ns = namespace(c='') %}" + LOOPS % "{% set ns.c = m.content %}" + "{{ ns.c | upper }}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ messages | tojson }}",
    "{% generation %}",
    "{% for",
]


def test_templates_that_look_into_content_are_told_by_their_syntax():
    assert [template for template in WRITING if uses_of_content(template) is None] == []
    assert [template for template in LOOKING if uses_of_content(template) is not None] == []
    assert uses_of_content(CHATML) == Uses()
    assert uses_of_content(STRIPS) == Uses(strips=True)


@pytest.mark.parametrize("template", WRITING)
@given(st.lists(st.lists(st.text("ab <", max_size=3), min_size=1, max_size=2), min_size=1, max_size=3))
def test_marks_change_nothing_where_they_are_taken_to(template, texts):
    from jinja2 import Environment

    rendered = Environment(extensions=["jinja2.ext.loopcontrols"]).from_string(template).render

    def said(begin: str, end: str) -> str:
        turns = [
            {"role": "user" if at % 2 else "system", "content": "\n".join(begin + text + end for text in blocks)}
            for at, blocks in enumerate(texts)
        ]
        return rendered(messages=turns, add_generation_prompt=True, bos_token="")

    uses = uses_of_content(template)
    assert uses is not None
    if all(map(uses.ignore_marks, texts)):
        assert said("{", "}").replace("{", "").replace("}", "") == said("", "")


def test_a_tenants_prompts_are_forgotten_when_it_says_so(counted):
    body = message(counted.gateway, LONG)
    for salt in (b"a", b"b"):
        counted.parse(body, salt)
    counted.parsing.forget(chain_root(b"a", counted.gateway.config))
    counted.parse(body, b"b")
    assert counted.tokenizer.texts == []
    counted.parse(body, b"a")
    assert LONG in counted.tokenizer.texts


# --- the cache


def piece(tokens: int, hashes: int = 0) -> TokenizedPiece:
    return TokenizedPiece(array("I", range(tokens)), tuple(bytes([number]) * 16 for number in range(hashes)))


def keys(name: str, count: int) -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(count)]


def test_the_ends_of_what_was_used_longest_ago_go_first():
    size = piece(10).nbytes
    cache = TokenCache(6 * size, 5 * size)
    cache.keep(b"a", {key: piece(10) for key in keys("old", 3)})
    cache.keep(b"a", {key: piece(10) for key in keys("new", 2)})
    assert len(cache.find(b"a", keys("old", 3))) == 3
    cache.keep(b"a", {key: piece(10) for key in keys("newest", 2)})
    assert [len(cache.find(b"a", keys(name, 3))) for name in ("old", "new", "newest")] == [1, 2, 2]
    cache.keep(b"a", {key: piece(10) for key in keys("whole", 9)})
    assert [len(cache.find(b"a", keys(name, 9))) for name in ("old", "new", "newest", "whole")] == [0, 0, 0, 5]


def test_a_tenant_that_sends_much_loses_its_own():
    size = piece(10).nbytes
    cache = TokenCache(6 * size, 4 * size)
    cache.keep(b"quiet", {key: piece(10) for key in keys("small", 2)})
    for number in range(9):
        cache.keep(b"loud", {key: piece(10) for key in keys(f"large{number}", 3)})
    assert len(cache.find(b"quiet", keys("small", 2))) == 2
    cache.keep(b"third", {key: piece(10) for key in keys("more", 1)})
    assert len(cache.find(b"quiet", keys("small", 2))) == 1  # who came longest ago
    cache.keep(b"third", {key: piece(10) for key in keys("more", 2)})
    assert cache.find(b"quiet", keys("small", 2)) == []
    assert cache.nbytes == 6 * size
    cache.forget(b"loud")
    assert cache.nbytes == 2 * size


def test_a_piece_takes_no_more_memory_than_is_counted():
    cache, pieces = TokenCache(), 300
    tracemalloc.start()
    try:
        cache.keep(b"a", {bytes([at % 256, at // 256]) * 8: piece(at % 128, at % 3) for at in range(pieces)})
        assert tracemalloc.get_traced_memory()[0] <= cache.nbytes
    finally:
        tracemalloc.stop()


def test_threads_may_use_it_together():
    cache = TokenCache(20 * piece(10).nbytes, 8 * piece(10).nbytes)
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(200):
                tenant = bytes([(turn + number) % 4])
                known = keys(f"{turn % 7}-", 1 + turn % 5)
                assert all(found == piece(10) for found in cache.find(tenant, known))
                cache.keep(tenant, {key: piece(10) for key in known})
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    held = sum(found.nbytes for tenant in cache._tenants.values() for found in tenant.pieces.values())
    assert cache.nbytes == held <= 20 * piece(10).nbytes
