"""A compression policy as one line of configuration: which method, at what budget, and how its parts are combined.

A policy is three independent choices: what survives the hand-off (the method and its knobs), where new tokens go
(`decode`), and how entries are kept in memory (`storage`).
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

DecodeRule = Literal["append", "ring", "argmin"]
Storage = Literal["model", "fp8", "kivi4", "kivi2", "turbo4", "turbo3"]
Task = Literal["general", "reasoning", "few_shot"]

PolicyName = Literal[
    "full", "window", "streaming_llm", "h2o", "snapkv", "pyramidkv", "adakv", "tova", "knorm", "keydiff",
    "expected_attention", "rocketkv", "fastgen", "cake", "adaptive", "auto",
]  # fmt: skip

_VOTES = {"window": 32, "kernel": 5, "pooling": "avg"}
METHODS: dict[PolicyName, dict[str, Any]] = {
    "full": {},
    "window": {},
    "streaming_llm": {"sinks": 4},
    "h2o": {"heavy": 0.5},
    "snapkv": _VOTES,
    "pyramidkv": {**_VOTES, "beta": 20},
    "adakv": {"window": 32, "kernel": 7, "pooling": "max", "floor": 0.2},
    "tova": {"per_head": False},
    "knorm": {},
    "keydiff": {},
    "expected_attention": {"sinks": 4, "window": 128, "horizon": 512},
    "rocketkv": {"window": 32, "kernel": 63, "pooling": "max"},
    "fastgen": {"recovery": 0.95},
    "cake": {"window": 32, "kernel": 5, "pooling": "avg", "gamma": 200.0, "tau1": 1.0, "tau2": 1.0},
    "adaptive": {**_VOTES, "target": 0.9, "least": 0.05},
    "auto": {"task": "general", "scoring": 0.25},
}
"""Every method with its knobs and their defaults (reference: the papers named in each method's file)."""

KNOBS = tuple(dict.fromkeys(knob for knobs in METHODS.values() for knob in knobs))
_DECODE: dict[PolicyName, DecodeRule] = {"window": "ring", "streaming_llm": "ring", "h2o": "argmin", "tova": "argmin"}
_WITHOUT_BUDGET = ("full", "fastgen", "auto")
_ONLY_APPEND = ("full", "rocketkv", "fastgen", "auto")
_WITHOUT_SCORES = ("full", "window", "streaming_llm", "fastgen", "auto")
_RULES: dict[DecodeRule, dict[str, Any]] = {"ring": {"sinks": 4}, "argmin": {"heavy": 0.5}}  # knobs of decode rules
PROTECT, RESIDUAL = 0.1, 32
KIVI_RESIDUAL = 128
"""Of the name `kivi`, as its authors evaluate it on LongBench; 32, as in their example, where it is a storage among
other choices: in the rows that eviction leaves, 128 entries in the model's dtype would be most of what is kept."""


class PolicySpec(BaseModel):
    """A compression policy.

    `budget` counts every token kept per KV head and layer: an int is tokens, a float in (0, 1] is a share of the
    prompt. A ring over the whole prompt as its budget makes room for every new token by evicting an old one.
    The short form `NAME[@BUDGET][+PART...][:KNOB=VALUE,...]` is accepted wherever a policy is: `snapkv@0.2`,
    `snapkv@1024+ring+kivi4`, `h2o@0.1+protect`, `snapkv@0.2:window=16`. `kivi`, `turboquant` and `fp8` name the full
    cache in such a storage, `kivi` with the residual of its paper; `structural` and `shotkv` name snapkv inside that
    wrapper.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    name: PolicyName = "full"
    budget: int | float = 1.0
    decode: DecodeRule = Field("append", description="where new tokens go; by default as the method does")
    storage: Storage = Field("model", description="how kept entries are stored; model is the model's own dtype")
    protect: float = Field(0.0, ge=0, le=0.5, description="share of the budget reserved at each end of the prompt")
    shots: bool = Field(False, description="keep passages between blank lines as whole units (ShotKV)")
    residual: int = Field(
        RESIDUAL, ge=32, le=4096, multiple_of=32, description="most recent entries that kivi leaves in model dtype"
    )
    sinks: int | None = Field(None, ge=0, le=4096, description="first tokens that are never given up")
    heavy: float | None = Field(None, ge=0, le=1, description="share of an argmin budget that is not the most recent")
    window: int | None = Field(None, ge=1, le=4096, description="last prompt tokens that vote")
    kernel: int | None = Field(None, ge=1, le=1023, description="width of the pooling along positions, odd")
    pooling: Literal["avg", "max"] | None = None
    beta: int | None = Field(None, ge=1, le=1000, description="how steep the pyramid is (pyramidkv)")
    floor: float | None = Field(
        None, ge=0, le=1, description="weight of an even share beside what heads win, 1 is snapkv (adakv)"
    )
    per_head: bool | None = Field(None, description="each KV head keeps tokens of its own, by its own scores (tova)")
    horizon: int | None = Field(None, ge=1, le=65536, description="future positions averaged over (expected_attention)")
    recovery: float | None = Field(None, gt=0, le=1, description="attention mass a head must keep (fastgen)")
    gamma: float | None = Field(None, ge=0, description="weight of a token's variance of attention (cake)")
    tau1: float | None = Field(None, gt=0, description="a layer's entropy counts to the power of 1/tau1 (cake)")
    tau2: float | None = Field(None, gt=0, description="a layer's variance counts to the power of 1/tau2 (cake)")
    target: float | None = Field(None, gt=0, le=1, description="attention mass to keep (adaptive)")
    least: float | None = Field(None, ge=0, le=1, description="smallest share of the prompt kept (adaptive)")
    task: Task | None = Field(None, description="what is asked for, where the method chooses by it (auto)")
    scoring: float | None = Field(None, ge=0, description="most that scoring may add to prefill, a share of it (auto)")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        """Read the short form, resolve aliases and fill in every default of the method."""
        if isinstance(value, str):
            value = _parse(value)
        if not isinstance(value, dict):
            return value
        tree = _resolve_alias(dict(value))
        name: Any = tree.get("name", "full")
        if name not in get_args(PolicyName):
            return tree  # refused by the field itself, with the known names
        given = {knob for knob in KNOBS if tree.get(knob) is not None}
        tree = {key: item for key, item in tree.items() if item is not None}
        tree.setdefault("decode", _DECODE.get(name, "append"))
        own = own_knobs(name, tree["decode"])
        for knob in sorted(given - own.keys()):
            owners: list[str] = [method for method, knobs in METHODS.items() if knob in knobs]
            owners += [f"any {rule}" for rule, knobs in _RULES.items() if knob in knobs]
            raise ValueError(f"{knob} is a knob of {', '.join(owners)}; {name} with {tree['decode']} does not have it")
        return {**own, **tree}

    @model_validator(mode="after")
    def _check(self) -> PolicySpec:
        if isinstance(self.budget, float) and not 0 < self.budget <= 1:
            raise ValueError(f"a share must be in (0, 1], got {self.budget}; for tokens write an integer")
        if isinstance(self.budget, int) and self.budget < 2:
            raise ValueError(f"a budget in tokens must be at least 2, got {self.budget}; the whole prompt is 1.0")
        if self.name in _WITHOUT_BUDGET and self.budget != 1.0:
            raise ValueError(f"{self.name} has no budget, got {self.budget}")
        if self.decode == "ring" and isinstance(self.budget, int) and self.budget <= (self.sinks or 0):
            raise ValueError(f"budget {self.budget} leaves no recent token beside {self.sinks} sinks")
        if self.kernel is not None and self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, got {self.kernel}")
        if self.decode != "append" and self.name in _ONLY_APPEND:
            raise ValueError(f"{self.name} only appends while decoding, got {self.decode}")
        if self.name in ("window", "streaming_llm") and self.decode != "ring":
            raise ValueError(f"{self.name} is a ring while decoding, got {self.decode}")
        if self.residual != RESIDUAL and self.name != "auto" and not self.storage.startswith("kivi"):
            raise ValueError(f"residual is a knob of kivi2 and kivi4 storage, got {self.storage}")
        if self.name == "rocketkv" and self.storage != "model":
            raise ValueError(f"rocketkv reads chosen pages in the model's dtype, got {self.storage}")
        if self.name in _WITHOUT_SCORES and (self.protect or self.shots):
            raise ValueError(f"protect and shots change what a scorer picks; {self.name} has no scores")
        if self.shots and self.name == "adakv":
            raise ValueError(
                "shots keeps the same units in all heads of a layer; adakv gives each head a budget of its own"
            )
        return self

    @property
    def label(self) -> str:
        """The short form: `name@budget`, parts and knobs that are not at their default."""
        head = self.name if self.name in _WITHOUT_BUDGET else f"{self.name}@{self.budget}"
        if self.decode != _DECODE.get(self.name, "append"):
            head += f"+{self.decode}"
        if self.storage != "model":
            head += f"+{self.storage}"
        if self.protect == PROTECT:
            head += "+protect"
        if self.shots:
            head += "+shots"
        own = own_knobs(self.name, self.decode)
        given = {knob: getattr(self, knob) for knob, default in own.items() if getattr(self, knob) != default}
        knobs = [f"{knob}={str(value).lower() if isinstance(value, bool) else value}" for knob, value in given.items()]
        if self.protect not in (0.0, PROTECT):
            knobs.append(f"protect={self.protect}")
        if self.residual != RESIDUAL:
            knobs.append(f"residual={self.residual}")
        return f"{head}:{','.join(knobs)}" if knobs else head


def own_knobs(name: PolicyName, decode: DecodeRule) -> dict[str, Any]:
    """Knobs of a method and of the decode rule it is combined with, with their defaults."""
    knobs = METHODS[name]
    if decode == "ring" and name != "window":
        knobs = {**_RULES["ring"], **knobs}
    if decode == "argmin" and name != "tova":
        knobs = {**_RULES["argmin"], **knobs}
    return knobs


def _parse(text: str) -> dict[str, Any]:
    """Parse a short form to a tree of fields."""
    head, _, knobs = text.partition(":")
    head, *parts = head.split("+")
    name, at, budget = head.partition("@")
    tree: dict[str, Any] = {"name": name}
    try:
        if at:
            tree["budget"] = int(budget) if budget.isdigit() else float(budget)
        for part in parts:
            chosen = _part(part)
            if chosen.keys() & tree.keys():
                raise ValueError
            tree.update(chosen)
        for knob in filter(None, knobs.split(",")):
            key, equals, value = knob.partition("=")
            if not equals or key in tree:
                raise ValueError
            tree[key] = int(value) if value.isdigit() else value
    except ValueError:
        raise ValueError(
            f"{text!r}: write NAME@TOKENS or NAME@SHARE, then +PARTS and :KNOB=VALUE, as in snapkv@1024, snapkv@0.2, "
            "snapkv@0.2+ring+kivi4 or snapkv@0.2:window=16"
        ) from None
    return tree


def _part(part: str) -> dict[str, Any]:
    if part in get_args(DecodeRule):
        return {"decode": part}
    if part in get_args(Storage):
        return {"storage": part}
    if part == "protect":
        return {"protect": PROTECT}
    if part == "shots":
        return {"shots": True}
    raise ValueError


_BITS = {"kivi": (2, 4), "turboquant": (3, 4)}


def _resolve_alias(tree: dict[str, Any]) -> dict[str, Any]:
    """Names that stand for a storage or a wrapper: `kivi` and `turboquant` take bits, the wrappers an inner method."""
    name = tree.get("name")
    if not isinstance(name, str):
        return tree
    if name in ("kivi", "turboquant", "fp8") and "storage" in tree:
        raise ValueError(f"{name} is a storage itself, got {tree['storage']} besides")
    if name in _BITS and tree.get("bits", 4) not in _BITS[name]:
        raise ValueError(f"bits of {name} must be one of {_BITS[name]}, got {tree['bits']}")
    match name:
        case "kivi" | "turboquant" as name:
            storage = f"{name.removesuffix('quant')}{tree.get('bits', 4)}"
            residual = {"residual": KIVI_RESIDUAL} if name == "kivi" else {}
            return {**residual, **_without(tree, "bits"), "name": "full", "storage": storage}
        case "fp8":
            return {**tree, "name": "full", "storage": "fp8"}
        case "structural":
            return {"protect": PROTECT, **_without(tree, "inner"), "name": tree.get("inner", "snapkv")}
        case "shotkv":
            return {**_without(tree, "inner"), "name": tree.get("inner", "snapkv"), "shots": True}
    return tree


def _without(tree: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key not in (*keys, "name")}


def split_policies(text: str) -> tuple[str, ...]:
    """`a,b:knob=1,knob=2,c` in pieces: what reads `knob=value` belongs to the policy before it."""
    return tuple(piece.strip() for piece in re.split(r",(?!\s*\w+=)", text) if piece.strip())
