"""Trains the tiny model from the running interpreter's standard library and generated tasks.

Example:

    python -m training.train --minutes 145 --out runs/tiny --seed 0 --device auto
    python -m training.train --start runs/tiny --tokens 6400000 --warmth 0.5 --seed 1 --out runs/tools
    python -m training.train --start runs/tools --keep runs/tiny --tokens 3000000 --warmth 0.3 --seed 2 --out runs/both

The folder given by --out holds a loadable model from the first save on; a run that was stopped goes on with --resume.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from training import evaluate, tool_calls, vocabulary
from training.net import Muon, TinyNet
from warmkv.models.tiny import corpus

ANSWER = 5.0
FILLER = 0.3
MUON_RATE = 0.01
ADAM_RATE = 2e-3
FINAL_RATE_SHARE = 0.05
SHORT = 512
KEPT_SHARE = 0.5  # of the loss of a row that is kept: what another model says of it, beside what it says itself
WARMUP_STEPS = 60


@dataclass(frozen=True)
class Phase:
    """Describe what is trained up to the share `until` of the time.

    Row lengths and families have odds (`short`: those of rows of up to `SHORT` tokens, if they differ); `language` is
    the share of rows of plain text, `easy` the share of samples whose key words are single tokens.
    """

    until: float
    lengths: dict[int, float]
    families: dict[str, float]
    language: float = 0.35
    easy: float = 0.0
    short: dict[str, float] | None = None


# Looking something up is learnt suddenly, and soonest from short rows that are full of questions and repetitions; once
# it is there, longer rows come easily.
_FIRST = {"repeat": 0.6, "multi": 0.4}
_SOON = {"repeat": 0.1, "single": 0.15, "multi": 0.65, "copying": 0.1}
_ALL = {"single": 0.2, "multi": 0.44, "two_hop": 0.09, "copying": 0.09, "scratch": 0.09, "passages": 0.09}
_LAST = {"single": 0.1, "multi": 0.66, "two_hop": 0.06, "copying": 0.06, "scratch": 0.06, "passages": 0.06}
PHASES = (
    Phase(0.11, {128: 1.0}, _FIRST, language=0.15),
    Phase(0.18, {128: 0.6, 256: 0.4}, _SOON, language=0.2),
    Phase(0.24, {128: 0.3, 256: 0.7}, {"multi": 0.8, "single": 0.1, "copying": 0.1}, language=0.1, easy=0.6),
    Phase(0.32, {256: 0.4, 512: 0.6}, _ALL, easy=0.2),
    Phase(0.44, {256: 0.2, 512: 0.2, 1024: 0.6}, _ALL),
    Phase(0.55, {256: 0.1, 512: 0.1, 1024: 0.15, 2048: 0.65}, _ALL, language=0.55),
    Phase(1.00, {256: 0.08, 512: 0.12, 1024: 0.2, 2048: 0.55, 4096: 0.05}, _LAST, language=0.5),
)


# On top of a trained model: half of the rows keep what it can do, the other half have tools. A key's tokens within the
# quotes of a call are other ones than behind a space, in the question: rows of nothing else teach that first.
_KEPT = {family: 0.5 * odds for family, odds in _LAST.items()}
_SPELT = _KEPT | {"spelling": 0.2, "tool_call": 0.15, "tool_result": 0.1, "tool_not_needed": 0.05}
_TOOLS = _KEPT | {"spelling": 0.02, "tool_call": 0.2, "tool_result": 0.16, "tool_not_needed": 0.12}
# What long rows of the other families lost by then comes back last.
_BOTH = {"single": 0.04, "multi": 0.38, "two_hop": 0.03, "copying": 0.03, "scratch": 0.1, "passages": 0.04}
_BOTH |= {"spelling": 0.03, "tool_call": 0.18, "tool_result": 0.11, "tool_not_needed": 0.06}
WITH_TOOLS = (
    Phase(0.23, {256: 0.4, 512: 0.6}, _SPELT, language=0.15),
    Phase(0.65, {256: 0.1, 512: 0.25, 1024: 0.2, 2048: 0.4, 4096: 0.05}, _TOOLS, language=0.4),
    Phase(1.0, {256: 0.1, 512: 0.2, 1024: 0.15, 2048: 0.5, 4096: 0.05}, _BOTH, language=0.3),
)

# What long rows of the other families lost by then is learnt again from the model that had it.
_CALLS = {"tool_call": 0.34, "tool_result": 0.22, "tool_not_needed": 0.12, "spelling": 0.04}
_LONG = {"single": 0.05, "multi": 0.43, "two_hop": 0.08, "copying": 0.08, "scratch": 0.08, "passages": 0.1}
_LONG |= {"tool_call": 0.08, "tool_result": 0.06, "tool_not_needed": 0.04}
KEEPING = (
    Phase(
        1.0,
        {256: 0.1, 512: 0.22, 1024: 0.1, 2048: 0.53, 4096: 0.05},
        _LONG,
        language=0.2,
        short=_CALLS | {family: 0.28 * odds for family, odds in _ALL.items()},
    ),
)


def tokens_per_step(length: int, device: str) -> int:
    """Tokens of one optimizer step: small steps while rows are short, since early learning wants many steps."""
    return (2048 if length <= 128 else 4096) * (8 if device == "cuda" else 1)


class Rows:
    """Draws training rows: (token ids, loss weights), both of exactly the length asked for.

    `texts` are what plain rows are cut from; the whole training split if not given.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, texts: Sequence[str] | None = None) -> None:
        self.rng = random.Random(seed)
        self.encode: Callable[[str], list[int]] = lambda text: list(tokenizer.encode(text).ids)
        self.world = corpus.World("train", lambda text: len(self.encode(text)))
        self.easy = corpus.World("train", lambda text: len(self.encode(text)), longest_word=1)
        self.stream: list[int] = []
        for encoded in tokenizer.encode_batch(list(texts or corpus.texts("train"))):
            self.stream += [0, *encoded.ids]

    def language(self, length: int) -> tuple[list[int], list[float]]:
        """Plain source text; most rows open with the start token, as prompts do."""
        start = self.rng.randrange(len(self.stream) - length)
        ids = self.stream[start : start + length]
        if self.rng.random() < 0.85:
            ids[0] = 0
        return ids, [1.0] * length

    def repeat(self, length: int) -> tuple[list[int], list[float]]:
        """Random tokens, repeated: the barest form of looking something up."""
        ids = [0]
        weights = [0.0]
        while len(ids) < length:
            span, times = self.rng.randint(4, 24), self.rng.randint(2, 5)
            ids += [self.rng.randrange(3, vocabulary.VOCAB_SIZE) for _ in range(span)] * times
            weights += [0.0] * (span + 1) + [1.0] * (span * times - span - 1)
        return ids[:length], weights[:length]

    def spelling(self, length: int) -> tuple[list[int], list[float]]:
        """Questions without tools, each with the arguments that a call would have: a key in both of its spellings."""
        ids, weights = [0], [0.0]
        while len(ids) < length:
            for text, is_answer in tool_calls.spelling(self.world, self.rng):
                piece = self.encode(text)
                ids += piece
                weights += [ANSWER if is_answer else FILLER] * len(piece)
        return ids[:length], weights[:length]

    def task(self, family: str, length: int, easy: float) -> tuple[list[int], list[float]]:
        """One sample with several questions; what is left of the row is filled with plain text."""
        rng = self.rng
        keys = rng.randint(2, 3) if length <= 128 else rng.randint(3, 6) if length <= 256 else rng.randint(4, 10)
        turns = keys if family == "multi" else rng.randint(1, 3)
        target = length if rng.random() < 0.7 else rng.randint(length // 2, length)
        sample = evaluate.FAMILIES[family](
            self.easy if rng.random() < easy else self.world,
            rng,
            length=target,
            chat=rng.random() < 0.65,
            keys=keys if family == "multi" else None,
            turns=turns,
        )
        ids: list[int] = []
        weights: list[float] = []
        for text, is_answer in sample.segments():
            piece = self.encode(text)
            ids += piece
            weights += [ANSWER if is_answer else FILLER] * len(piece)
        if (left := length - len(ids)) > 0:
            more, _ = self.language(left)
            ids += more
            weights += [FILLER] * left
        return ids[:length], weights[:length]

    def batch(self, length: int, rows: int, phase: Phase) -> tuple[Tensor, Tensor, Tensor]:
        """Draw ids (int64) and loss weights (float32), both [rows, length]; and which rows have no tools, bool."""
        families = phase.short if phase.short and length <= SHORT else phase.families
        # Plain rows are mostly short ones: long ones cost more attention and teach little that short ones do not.
        language = phase.language if length <= SHORT else phase.language / 5
        drawn: list[tuple[list[int], list[float]]] = []
        kept = []
        for _ in range(rows):
            family = self.rng.choices(list(families), weights=list(families.values()))[0]
            plain = self.rng.random() < language
            kept.append(plain or (family != "spelling" and family not in tool_calls.TOOL_FAMILIES))
            if plain:
                drawn.append(self.language(length))
            elif family == "repeat":
                drawn.append(self.repeat(length))
            elif family == "spelling":
                drawn.append(self.spelling(length))
            else:
                drawn.append(self.task(family, length, phase.easy))
        ids, weights = zip(*drawn, strict=True)
        return torch.tensor(ids), torch.tensor(weights), torch.tensor(kept)


def save_model(net: TinyNet, tokenizer: Tokenizer, out: Path, record: dict[str, Any]) -> None:
    """Writes the loadable folder; each file is put in place whole, so a reader never sees half of one.

    `record` goes beside it as training.json: how the weights came about.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".saving-") as folder:
        fresh = TinyNet()
        fresh.load_state_dict(net.state_dict())
        fresh.export().save_pretrained(folder)
        vocabulary.wrap(tokenizer).save_pretrained(folder)
        (Path(folder) / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        for file in sorted(Path(folder).iterdir()):
            file.chmod(0o644)
            os.replace(file, out / file.name)


def save_checkpoint(
    path: Path, net: TinyNet, optimizers: list[torch.optim.Optimizer], progress: dict[str, float]
) -> None:
    """Writes everything a later --resume needs, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save({"net": net.state_dict(), "optimizers": [o.state_dict() for o in optimizers], **progress}, partial)
    shutil.move(partial, path)


def train(args: argparse.Namespace) -> None:
    """The whole run, from the tokenizer to the last save."""
    device = args.device if args.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    net = TinyNet().to(device)
    if args.start:
        tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
        net.take(load_file(args.start / "model.safetensors"))
    else:
        tokenizer = vocabulary.build_tokenizer(corpus.texts("train"))
    teacher = None
    if args.keep:
        teacher = TinyNet().to(device).requires_grad_(False)
        teacher.take(load_file(args.keep / "model.safetensors"))
    phases = KEEPING if args.keep else WITH_TOOLS if args.start else PHASES
    optimizers: list[torch.optim.Optimizer] = [
        Muon(net.matrices(), lr=MUON_RATE),
        torch.optim.AdamW(net.others(), lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-10),
    ]
    step = seen = 0
    spent = 0.0
    checkpoint = args.checkpoint or args.out.with_name(args.out.name + "-checkpoint.pt")
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        net.load_state_dict(state["net"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, seen, spent = int(state["step"]), int(state["seen"]), float(state["spent"])
    rows = Rows(tokenizer, args.seed + step)

    def save() -> None:
        """The model for use, and the run's state to go on from."""
        progress = {"step": step, "seen": seen, "spent": time.monotonic() - begin}
        record = {
            "steps": step,
            "tokens": seen,
            "minutes": round(progress["spent"] / 60, 1),
            "seed": args.seed,
            "device": device,
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        if args.start:
            record["start"] = json.loads((args.start / "training.json").read_text(encoding="utf-8"))
        save_model(net, tokenizer, args.out, record)
        save_checkpoint(checkpoint, net, optimizers, progress)

    torch._dynamo.config.recompile_limit = 32
    run: Callable[..., tuple[Tensor, Tensor, Tensor]] = net if args.eager else torch.compile(net, dynamic=False)
    taught = teacher.logits if teacher else None
    if taught and not args.eager:
        taught = torch.compile(taught, dynamic=False)
    print(
        f"{sum(p.numel() for p in net.parameters()):,} parameters on {device}; {len(rows.stream):,} tokens",
        flush=True,
    )
    begin = time.monotonic() - spent

    def share_done() -> float:
        """Return the share of the run that is done: of its tokens if they are given, else of its time."""
        return float(seen / args.tokens if args.tokens else (time.monotonic() - begin) / (args.minutes * 60))

    saved_at = line_at = time.monotonic()
    line_seen, right, answers = seen, 0, 0
    while (share := share_done()) < 1:
        phase = next(p for p in phases if share < p.until)
        length = rows.rng.choices(list(phase.lengths), weights=list(phase.lengths.values()))[0]
        drawn = rows.batch(length, tokens_per_step(length, device) // length, phase)
        ids, weights, kept = (tensor.to(device) for tensor in drawn)
        if taught:
            with torch.no_grad():
                said = taught(ids)
            loss, got, of = run(ids, weights, said, KEPT_SHARE * kept.float())
        else:
            loss, got, of = run(ids, weights)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        warmth = (1 - FINAL_RATE_SHARE) * (1 + math.cos(math.pi * share)) / 2
        rate = FINAL_RATE_SHARE + warmth * args.warmth
        for optimizer, base in zip(optimizers, (MUON_RATE, ADAM_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * rate * min(1.0, (step + 1) / WARMUP_STEPS)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + ids.numel()
        right, answers = right + int(got), answers + int(of)
        if step % args.every == 0:
            now = time.monotonic()
            print(
                f"{share:6.1%} step {step} tokens {seen:,} ({(seen - line_seen) / (now - line_at):,.0f}/s) "
                f"length {length} loss {loss.item():.3f} answer tokens right {right / max(1, answers):.3f}",
                flush=True,
            )
            line_at, line_seen, right, answers = now, seen, 0, 0
        if time.monotonic() - saved_at > args.save_minutes * 60:
            longest = max(phase.lengths, key=lambda n: phase.lengths[n])
            found = evaluate.recall(net.logits, rows.encode, evaluate.cells_of([longest]), args.samples, device)
            shown = (f"{row['family']}/{row['form']} {row['right'] / row['samples']:.2f}" for row in found)
            print(f"recall at {longest}: " + ", ".join(shown), flush=True)
            save()
            saved_at = time.monotonic()
    save()
    print(f"done: {step} steps, {seen:,} tokens, {args.out}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=145, help="training time (default 145)")
    parser.add_argument("--tokens", type=int, help="train on so many tokens, however long it takes")
    parser.add_argument("--start", type=Path, help="model folder to go on from: it learns to call tools besides")
    parser.add_argument("--keep", type=Path, help="model folder whose predictions are learnt on rows without tools")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--checkpoint", type=Path, help="where the run's state is kept (default OUT-checkpoint.pt)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint if there is one")
    parser.add_argument("--eager", action="store_true", help="do without torch.compile (slower; needs no compiler)")
    parser.add_argument("--warmth", type=float, default=1, help="factor on the decaying rate, to warm a resumed leg up")
    parser.add_argument("--every", type=int, default=50, help="steps between progress lines")
    parser.add_argument("--save-minutes", type=float, default=5, help="minutes between saves and recall checks")
    parser.add_argument("--samples", type=int, default=12, help="held-out samples per family and form in those checks")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
