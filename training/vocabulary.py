"""The tiny model's tokenizer: byte-level BPE trained on standard-library text, digits in pairs, a ChatML template.

Definitions of tools come first, calls are JSON within `<tool_call>`, results are turns of the role `tool`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from warmkv.models.tiny.tasks import BOS, TURN_END, TURN_START

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
MAX_LENGTH = 4096
SPECIAL_TOKENS = (BOS, TURN_START, TURN_END)
"""Ids 0, 1 and 2: end of text (also the first token of plain text), start and end of a turn."""

CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n<tools>\\n' -}}
{%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}
{{- '</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for block in message['content'] -%}{{- ('' if loop.first else '\\n') + block['text'] -}}{%- endfor -%}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{{- '' if loop.first and not message['content'] else '\\n' -}}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- (call['function']['arguments'] | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def _with_pairs(texts: Iterable[str]) -> Iterator[str]:
    """The texts, and every two-digit number and role name often enough to become a token of its own."""
    yield from texts
    for pair in range(100):
        yield f"{pair:02d} " * 5000
    yield "\nassistant\nuser\nsystem\n" * 5000


def build_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Trains the tokenizer; the same texts give the same vocabulary.

    Digits are split into pairs first, so a four-digit value is always two tokens and its second half follows its
    first by plain induction, while an odd-length number still is written with the digits' own bytes.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,2}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_with_pairs(texts), trainer)
    return tokenizer


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as `transformers` saves and loads it, with the chat template."""
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=BOS,
        pad_token=BOS,
        additional_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
