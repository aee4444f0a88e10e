"""What a run evaluates, checked before anything is loaded. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from pydantic import ValidationError

from warmkv.evaluation import matching
from warmkv.evaluation.tasks import NAMES, STREAM, TASKS, Form, Task, forms_of
from warmkv.faults import UserError
from warmkv.policy_spec import METHODS, STORAGES, PolicySpec

FULL = "full"
QUICK = {"lengths": (512, 1024), "depths": (0.0, 0.5, 1.0), "samples": 2, "stream_tokens": 1536}
SHORTEST = 256


class EvalError(UserError):
    """A run that cannot be done as asked; the message says what to write instead."""


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """Everything that decides the numbers of a run, beside the model's weights."""

    model: str = "tiny"
    device: str = "auto"
    policies: tuple[str, ...] = (
        *(name for name, method in METHODS.items() if method.by_default_in_eval),
        "full+kivi4",
    )
    budgets: tuple[float, ...] = (1.0, 0.5, 0.2, 0.1, 0.05)  # shares of the full cache's bytes
    tasks: tuple[str, ...] = NAMES
    forms: tuple[Form, ...] = ()  # none: chat where the model has a template
    lengths: tuple[int, ...] = (512, 1024, 2048, 3072)  # tokens of a sample, the answer included
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 5  # per task, form, length and depth
    seed: int = 0
    stream_tokens: int = 16_384

    def __post_init__(self) -> None:
        for name in ("budgets", "tasks", "forms", "lengths", "depths"):  # a sample counts once
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        self.specs()
        if not self.budgets or not all(0 < share <= 1 for share in self.budgets):
            raise EvalError(f"budgets are shares of the full cache's bytes in (0, 1], got {_listed(self.budgets)}")
        if unknown := [name for name in self.tasks if name not in NAMES]:
            raise EvalError(f"no task is called {_listed(unknown)}; there are {_listed(NAMES)}, or all")
        if not self.tasks:
            raise EvalError(f"name a task: {_listed(NAMES)}, or all")
        if not self.lengths or min(self.lengths) < SHORTEST:
            raise EvalError(f"lengths are tokens, at least {SHORTEST}, got {_listed(self.lengths)}")
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise EvalError(f"depths go from 0 (the beginning) to 1 (the end), got {_listed(self.depths)}")
        if self.samples < 1:
            raise EvalError(f"samples must be at least 1, got {self.samples}")
        if STREAM in self.tasks and self.stream_tokens < 2 * SHORTEST:
            raise EvalError(f"a stream has at least {2 * SHORTEST} tokens, got {self.stream_tokens}")

    def specs(self) -> dict[str, PolicySpec]:
        """Return policies by label, the full cache first: everything is compared with it."""
        return {label_of(spec): spec for spec in map(read_policy, (FULL, *self.policies))}

    def parts(self, has_template: bool) -> Iterator[SampleSet]:
        """Yield the parts of a run, which are stored one by one."""
        wanted = self.forms or (("chat",) if has_template else ("plain",))
        for name in self.tasks:
            if name == STREAM:
                continue
            task = TASKS[name]
            for form in forms_of(task, wanted):
                for length in self.lengths:
                    yield SampleSet(task, form, length, task.depths or self.depths, self.samples)

    def to_json(self) -> dict[str, Any]:
        """Return the settings kept with the results, policies in full."""
        tree = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return {**tree, "policies": list(self.specs())}


@dataclass(frozen=True, slots=True)
class SampleSet:
    """All samples of one task in one form and length."""

    task: Task
    form: Form
    length: int
    depths: tuple[float | None, ...]
    samples: int

    @property
    def name(self) -> str:
        return f"{self.task.name}-{self.form}-{self.length}"

    def __len__(self) -> int:
        return len(self.depths) * self.samples

    def cells(self) -> Iterator[tuple[float | None, int]]:
        """Yield depth and number of every sample."""
        return ((depth, index) for depth in self.depths for index in range(self.samples))


def make(quick: bool, given: dict[str, Any]) -> EvalPlan:
    """Make the plan of a command line: defaults, those of a quick run, then the given values. Raises EvalError."""
    known = {field.name for field in fields(EvalPlan)}
    chosen = {key: value for key, value in given.items() if value is not None}
    assert chosen.keys() <= known
    return EvalPlan(**{**(QUICK if quick else {}), **chosen})


def read_policy(text: str) -> PolicySpec:
    """Read a policy without its budget, which the run sets. Raises EvalError."""
    try:
        spec = PolicySpec.model_validate(text)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        if text.partition(":")[0].partition("+")[0].partition("@")[0] not in METHODS:
            reason = f"there are {_listed(METHODS)}, and full+kivi4 and the like with {_listed(STORAGES)}"
        raise EvalError(f"policy {text}: {reason}") from None
    if spec.budget != 1.0:
        raise EvalError(f"policy {text}: leave the budget out; --budgets sets those of all policies, in bytes")
    return spec


def label_of(spec: PolicySpec) -> str:
    """Return the short form of a policy without a budget."""
    return spec.label.replace("@1.0", "", 1)


def bounded(specs: dict[str, PolicySpec]) -> dict[str, PolicySpec]:
    """Return policies whose memory does not grow while decoding: what a stream can run under, the two classics
    included.
    """
    classics = {name: read_policy(name) for name in ("window", "streaming_llm")}
    chosen = {label: spec for label, spec in specs.items() if spec.decode != "append" and matching.has_budget(spec)}
    return {**classics, **chosen}


def _listed(items: Sequence[Any] | Any) -> str:
    return ", ".join(str(item) for item in items)
