"""Measures the tiny model: recall by family, form and length; perplexity against n-grams; attention on the first token.

Example:

    python -m training.evaluate --json warmkv/models/tiny/figures.json --card warmkv/models/tiny/README.md

Everything is measured on held-out text and held-out key words. `--quick` takes under a minute on two cores, the whole
run about ten. Without --model the model that ships with the package is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import track
from torch import Tensor

from training.tool_calls import TOOL_FAMILIES, ToolSample
from warmkv.models.tiny import PATH, corpus, tasks
from warmkv.terminal import console, plain_table, show_table

Encode = Callable[[str], list[int]]
Logits = Callable[[Tensor], Tensor]
Ids = npt.NDArray[np.int64]

FAMILIES: dict[str, Callable[..., tasks.TaskSample | ToolSample]] = {**tasks.FAMILIES, **TOOL_FAMILIES}
LENGTHS = (256, 512, 1024, 2048, 3072)
FORMS = ("plain", "chat")
FOLLOW_UP = "follow_up"
"""The multi-key family with a second question after the first one was answered; chat form only."""
PROMISED, PROMISED_LENGTH = ("single", "multi", FOLLOW_UP), 2048
"""The cells that the model is shipped for: measured with more samples."""
PROMISED_SAMPLES = 250
WINDOW = 1024
SINK_WINDOW = 512
CARD_START, CARD_END = "<!-- figures: written by training/evaluate.py -->", "<!-- end of figures -->"


@torch.no_grad()
def answered(logits: Logits, encode: Encode, sample: tasks.TaskSample | ToolSample, device: str = "cpu") -> bool:
    """Whether greedy decoding gives exactly the answer and then its end mark.

    One forward pass decides it: greedy decoding follows a text if, and only if, each of its tokens is the most
    likely one after those before it. `logits` maps ids [1, tokens] to [1, tokens, vocabulary].
    """
    prompt = encode(sample.prompt())
    answer = encode(sample.segments()[-1][0])
    ids = torch.tensor([prompt + answer], device=device)
    guess = logits(ids)[0, len(prompt) - 1 : -1].argmax(-1)
    return bool((guess == ids[0, len(prompt) :]).all())


def recall(
    logits: Logits, encode: Encode, cells: Iterable[tuple[str, str, int]], samples: int, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Whole answers right for every (family, form, length in tokens), on the held-out split."""
    world = corpus.World("heldout", lambda text: len(encode(text)))
    out = []
    for family, form, length in cells:
        rng = random.Random(f"{family}/{form}/{length}")
        draw = FAMILIES["multi" if family == FOLLOW_UP else family]
        turns = 2 if family == FOLLOW_UP else 1
        right = sum(
            answered(logits, encode, draw(world, rng, length=length, chat=form == "chat", turns=turns), device)
            for _ in range(samples)
        )
        out.append({"family": family, "form": form, "length": length, "right": right, "samples": samples})
    return out


def cells_of(lengths: Iterable[int]) -> list[tuple[str, str, int]]:
    """Every (family, form, length) of the full measurement."""
    rows = [(family, form) for family in tasks.FAMILIES for form in FORMS]
    rows += [(family, "chat") for family in (FOLLOW_UP, *TOOL_FAMILIES)]
    return [(family, form, length) for family, form in rows for length in lengths]


def stream(encode: Encode, split: corpus.Split) -> Ids:
    """All files of a split as one run of token ids, each file opened by the start token (id 0)."""
    ids: list[int] = []
    for text in corpus.texts(split):
        ids += [0, *encode(text)]
    return np.array(ids, dtype=np.int64)


class _Counts:
    """How often each n-gram, packed into one integer, occurs."""

    def __init__(self, keys: Ids) -> None:
        self.keys, self.counts = np.unique(keys, return_counts=True)

    def of(self, keys: Ids) -> Ids:
        """The count of every key, 0 where it was not seen."""
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.counts[at], 0)


def ngram_perplexity(train: Ids, test: Ids, order: int, vocabulary: int) -> float:
    """Perplexity of an n-gram model with Witten-Bell interpolation down to the uniform distribution.

    Every order keeps the share c(h) / (c(h) + t(h)) for what it counted after the history h, with t(h) the number of
    distinct tokens seen after h, and leaves the rest to the next shorter history. The first two tokens are context.
    """

    def packed(ids: Ids, n: int) -> Ids:
        """The n-gram that ends at each position from 2 on, as one integer."""
        key = np.zeros(len(ids) - 2, dtype=np.int64)
        for back in range(n - 1, -1, -1):
            key = key * vocabulary + ids[2 - back : len(ids) - back]
        return key

    chance = np.full(len(test) - 2, 1.0 / vocabulary)
    for n in range(1, order + 1):
        grams = _Counts(packed(train, n))
        histories = _Counts(packed(train, n) // vocabulary)
        kinds = _Counts(grams.keys // vocabulary)
        wanted = packed(test, n)
        total, distinct = histories.of(wanted // vocabulary), kinds.of(wanted // vocabulary)
        seen = (grams.of(wanted) + distinct * chance) / np.maximum(total + distinct, 1)
        chance = np.where(total > 0, seen, chance)
    return float(np.exp(-np.log(chance).mean()))


@torch.no_grad()
def model_perplexity(logits: Logits, ids: Ids) -> float:
    """Perplexity of ids over windows of WINDOW tokens, each opened by the start token, nothing scored twice."""
    total, scored = 0.0, 0
    for start in range(2, len(ids), WINDOW - 1):
        window = torch.from_numpy(np.concatenate(([0], ids[start : start + WINDOW - 1])))[None]
        scores = logits(window)[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(scores, window[0, 1:], reduction="sum"))
        scored += window.size(1) - 1
    return math.exp(total / scored)


@torch.no_grad()
def first_token_mass(model: Any, ids: Ids, windows: int) -> list[dict[str, float]]:
    """Per layer, the share of attention that later tokens pay to the first token: mean over heads, and of the top head.

    `model` must return attentions (eager attention). Queries in the first 64 positions are left out: they have
    little else to look at. A uniform share would be below 1/64.
    """
    masses = []
    for i in range(windows):
        window = torch.from_numpy(np.concatenate(([0], ids[i * SINK_WINDOW : (i + 1) * SINK_WINDOW - 1])))[None]
        attentions = model(input_ids=window, output_attentions=True).attentions
        masses.append(torch.stack([a[0, :, 64:, 0].mean(-1) for a in attentions]))
    mass = torch.stack(masses).mean(0)
    return [{"mean": float(heads.mean()), "top_head": float(heads.max())} for heads in mass]


def evaluate(folder: Path, quick: bool = False, samples: int = 30) -> dict[str, Any]:
    """Measure the model in `folder`, as it is written to JSON; `samples` a cell, 250 in the promised ones."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def logits(ids: Tensor) -> Tensor:
        scores: Tensor = model(input_ids=ids).logits
        return scores

    cells = cells_of((256, 2048) if quick else LENGTHS)
    rows = []
    for cell in track(cells, description="recall"):
        promised = cell[0] in PROMISED and cell[2] == PROMISED_LENGTH
        rows += recall(logits, encode, [cell], 4 if quick else PROMISED_SAMPLES if promised else samples)
    train, test = stream(encode, "train"), stream(encode, "heldout")
    if quick:
        test = test[:20_000]
    size = int(model.config.vocab_size)
    perplexity = {
        "tokens": len(test),
        "model": model_perplexity(logits, test),
        "trigram": ngram_perplexity(train, test, 3, size),
        "unigram": ngram_perplexity(train, test, 1, size),
    }
    eager = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return {
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "quick": quick,
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_tokens": len(train),
        "recall": rows,
        "perplexity": perplexity,
        "first_token_mass": first_token_mass(eager.eval(), test, 4 if quick else 16),
    }


def _grid(figures: dict[str, Any]) -> tuple[list[int], list[list[str]]]:
    """The lengths measured, and one row of text cells per family and form."""
    lengths = sorted({row["length"] for row in figures["recall"]})
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for row in figures["recall"]:
        share = f"{row['right'] / row['samples']:.2f}"
        lines.setdefault((row["family"], row["form"]), {})[row["length"]] = share
    return lengths, [[family, form, *(cells.get(n, "") for n in lengths)] for (family, form), cells in lines.items()]


def card_tables(figures: dict[str, Any]) -> str:
    """The figures as Markdown, for the model card."""
    lengths, rows = _grid(figures)
    head = ["family", "form", *(f"{n:,}" for n in lengths)]
    lines = [
        f"| {' | '.join(head)} |",
        "|" + " --- |" * len(head),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    samples = " or ".join(str(n) for n in sorted({row["samples"] for row in figures["recall"]}))
    ppl, mass = figures["perplexity"], figures["first_token_mass"]
    versions = figures["versions"]
    return "\n".join(
        [
            f"Share of whole answers right, {samples} held-out samples a cell, by tokens of context:",
            "",
            *lines,
            "",
            f"Perplexity per token on {ppl['tokens']:,} held-out tokens: model {ppl['model']:.1f}, "
            f"trigram {ppl['trigram']:.1f}, unigram {ppl['unigram']:.1f}.",
            "",
            "Attention paid to the first token, per layer (mean over heads; top head in brackets): "
            + ", ".join(f"{layer['mean']:.0%} ({layer['top_head']:.0%})" for layer in mass)
            + ".",
            "",
            f"Measured with Python {versions['python']}, torch {versions['torch']}, "
            f"transformers {versions['transformers']}, in float32.",
        ]
    )


def write_card(card: Path, figures: dict[str, Any]) -> None:
    """Replaces the figures between the card's two marks."""
    text = card.read_text(encoding="utf-8")
    before, rest = text.split(CARD_START, 1)
    after = rest.split(CARD_END, 1)[1]
    card.write_text(f"{before}{CARD_START}\n{card_tables(figures)}\n{CARD_END}{after}", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=PATH, help="model folder (default: the one in the package)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--card", type=Path, help="model card whose figures to replace")
    parser.add_argument("--quick", action="store_true", help="few samples and lengths; for a look, not for the card")
    parser.add_argument(
        "--samples", type=int, default=30, help="samples a cell, where nothing is promised (default: 30)"
    )
    args = parser.parse_args()
    figures = evaluate(args.model, args.quick, args.samples)
    lengths, rows = _grid(figures)
    table = plain_table("family", "form", *(f"{n:,}" for n in lengths), left=2)
    table.title = "whole answers right"
    for row in rows:
        table.add_row(*row)
    show_table(table)
    ppl = figures["perplexity"]
    console.print(f"perplexity: model {ppl['model']:.2f}, trigram {ppl['trigram']:.2f}, unigram {ppl['unigram']:.2f}")
    console.print("first-token mass per layer: " + ", ".join(f"{x['mean']:.1%}" for x in figures["first_token_mass"]))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if args.card:
        write_card(args.card, figures)


if __name__ == "__main__":
    main()
