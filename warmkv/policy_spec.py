"""A compression policy as one line of configuration: which method, at what budget, and how its parts are combined.

A policy is three independent choices: what survives the hand-off (the method and its knobs), where new tokens go
(`decode`), and how entries are kept in memory (`storage`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Optional, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from warmkv.knobs import HEAVY, PROTECT, SINKS, Knob
from warmkv.registry import METHODS as METHODS
from warmkv.registry import STORAGES as STORAGES
from warmkv.registry import PluginError

if TYPE_CHECKING:
    from warmkv.policies.compression.method import Method
    from warmkv.policies.compression.storage_format import StorageFormat

DecodeRule = Literal["append", "ring", "argmin"]

METHODS.load()
STORAGES.load()
_RULES: dict[DecodeRule, Knob] = {"ring": SINKS, "argmin": HEAVY}
RESIDUAL = 32

if TYPE_CHECKING:
    Storage = str
else:
    Storage = Literal[tuple(STORAGES)]


class PolicyParts(BaseModel):
    """The fields that every compression policy has; `PolicySpec` adds the knobs of all methods."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    name: str = "full"
    budget: int | float = 1.0
    decode: DecodeRule = Field("append", description="where new tokens go; by default as the method does")
    storage: Storage = Field("model", description="how kept entries are stored; model is the model's own dtype")
    protect: float = Field(0.0, ge=0, le=0.5, description="share of the budget reserved at each end of the prompt")
    shots: bool = Field(False, description="keep passages between blank lines as whole units (ShotKV)")
    residual: int = Field(
        RESIDUAL,
        ge=32,
        le=4096,
        multiple_of=32,
        description="most recent entries in the model's dtype, where storage is packed in groups (kivi)",
    )

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
        if not isinstance(name, str) or name not in METHODS:
            return tree  # refused by the field itself, with the known names
        given = {knob for knob in KNOBS if tree.get(knob) is not None}
        tree = {key: item for key, item in tree.items() if item is not None}
        tree.setdefault("decode", METHODS[name].decode)
        if storage := STORAGES.get(str(tree.get("storage"))):
            tree.setdefault("residual", storage.residual)
        own = {knob.name: knob.default for knob in own_knobs(name, tree["decode"])}
        for knob in sorted(given - own.keys()):
            owners = ", ".join(_owners(knob))
            raise ValueError(f"{knob} is a knob of {owners}; {name} with {tree['decode']} does not have it")
        return {**own, **tree}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.budget, float) and not 0 < self.budget <= 1:
            raise ValueError(f"a share must be in (0, 1], got {self.budget}; for tokens write an integer")
        if isinstance(self.budget, int) and self.budget < 2:
            raise ValueError(f"a budget in tokens must be at least 2, got {self.budget}; the whole prompt is 1.0")
        method, sinks = METHODS[self.name], getattr(self, "sinks", None)
        if not method.has_budget and self.budget != 1.0:
            raise ValueError(f"{self.name} has no budget, got {self.budget}")
        if self.decode == "ring" and isinstance(self.budget, int) and self.budget <= (sinks or 0):
            raise ValueError(f"budget {self.budget} leaves no recent token beside {sinks} sinks")
        for knob in method.knobs:
            if knob.odd and getattr(self, knob.name) % 2 == 0:
                raise ValueError(f"{knob.name} must be odd, got {getattr(self, knob.name)}")
        if self.decode not in method.decode_rules:
            raise ValueError(f"{self.name} {_only(method.decode_rules)} while decoding, got {self.decode}")
        self._check_storage()
        if method.storages and self.storage not in method.storages:
            raise ValueError(f"{self.name} goes with storage {' or '.join(method.storages)}, got {self.storage}")
        if not method.has_scores and (self.protect or self.shots):
            raise ValueError(f"protect and shots change what a scorer picks; {self.name} has no scores")
        if self.shots and method.shares_heads:
            raise ValueError(
                f"shots keeps the same units in all heads of a layer; {self.name} gives each head its own budget"
            )
        return self

    @cached_property
    def method(self) -> Method:
        """Return the method of this policy. Kept, for the simulator asks it of every request."""
        return METHODS[self.name](self)  # type: ignore[arg-type]

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy, whose method is its own."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("method", None)
        return copied

    def _check_storage(self) -> None:
        storage = self.storage_format
        if self.decode not in storage.decode_rules:
            raise ValueError(f"storage {self.storage} {_only(storage.decode_rules)} while decoding, got {self.decode}")
        if storage.group > 1 and self.residual % storage.group:
            raise ValueError(f"residual must be a multiple of {storage.group}, got {self.residual}")
        if self.residual != storage.residual and storage.group == 1 and not METHODS[self.name].delegates:
            grouped = " and ".join(name for name, each in STORAGES.items() if each.group > 1)
            raise ValueError(f"residual is a knob of {grouped} storage, got {self.storage}")

    @property
    def storage_format(self) -> StorageFormat:
        """Return the format that `storage` names."""
        return STORAGES[self.storage]

    @property
    def stored_as(self) -> dict[str, Any]:
        """Return the storage and its knob, for another policy that keeps entries as this one does."""
        residual = {"residual": self.residual} if self.storage_format.group > 1 else {}
        return {"storage": self.storage, **residual}

    @property
    def label(self) -> str:
        """Return the short form: `name@budget`, parts and knobs that are not at their default."""
        method = METHODS[self.name]
        head = f"{self.name}@{self.budget}" if method.has_budget else self.name
        if self.decode != method.decode:
            head += f"+{self.decode}"
        if self.storage != "model":
            head += f"+{self.storage}"
        if self.protect == PROTECT:
            head += "+protect"
        if self.shots:
            head += "+shots"
        own = ((knob, getattr(self, knob.name)) for knob in own_knobs(self.name, self.decode))
        given = {knob.name: value for knob, value in own if value != knob.default}
        knobs = [f"{knob}={str(value).lower() if isinstance(value, bool) else value}" for knob, value in given.items()]
        if self.protect not in (0.0, PROTECT):
            knobs.append(f"protect={self.protect}")
        if self.residual != self.storage_format.residual:
            knobs.append(f"residual={self.residual}")
        return f"{head}:{','.join(knobs)}" if knobs else head


def _owners(knob: str) -> list[str]:
    """Return the methods and decode rules that have a knob."""
    methods = [name for name, method in METHODS.items() if any(own.name == knob for own in method.knobs)]
    return methods + [f"any {rule}" for rule, own in _RULES.items() if own.name == knob]


def _all_knobs() -> dict[str, Knob]:
    """Return the knobs of all decode rules and methods, without defaults. Raises PluginError where two differ."""
    found: dict[str, Knob] = {}
    for own in (tuple(_RULES.values()), *(method.knobs for method in METHODS.values())):
        for knob in own:
            meant = found.setdefault(knob.name, knob.by_default(None))
            taken = knob.name in PolicyParts.model_fields or hasattr(PolicyParts, knob.name)
            if taken or meant != knob.by_default(None):
                raise PluginError(f"{knob.name}, a knob of {_owners(knob.name)[-1]}, has another meaning already")
    return found


def _field(knob: Knob) -> tuple[Any, Any]:
    """Return a knob as a field of a pydantic model, None where a method does not have it."""
    owners = _owners(knob.name)
    description = f"{knob.description} ({owners[0]})" if knob.description and len(owners) == 1 else knob.description
    limits: dict[str, Any] = {"ge": knob.ge, "gt": knob.gt, "le": knob.le}
    return Optional[knob.type], Field(None, description=description, **limits)  # noqa: UP045


def _check_names() -> None:
    """Raise PluginError where a method or a storage has a name that stands for something else."""
    aliases = [(storage.alias, storage.bits) for storage in STORAGES.values() if storage.alias]
    names = {*METHODS, *get_args(DecodeRule), "structural", "shotkv", "protect", "shots"}
    for name, storage in STORAGES.items():
        if names & {name, storage.alias} or aliases.count((storage.alias, storage.bits)) > 1:
            raise PluginError(f"storage {name}: its name or alias stands for something else already; choose another")
    if taken := [name for name in METHODS if _resolve_alias({"name": name}) != {"name": name}]:
        raise PluginError(f"method {taken[0]}: this name stands for something else already; choose another")


KNOBS = _all_knobs()
_DOC = """A compression policy.

`budget` counts every token kept per KV head and layer: an int is tokens, a float in (0, 1] is a share of the
prompt. A ring over the whole prompt as its budget makes room for every new token by evicting an old one.
The short form `NAME[@BUDGET][+PART...][:KNOB=VALUE,...]` is accepted wherever a policy is: `snapkv@0.2`,
`snapkv@1024+ring+kivi4`, `h2o@0.1+protect`, `snapkv@0.2:window=16`. `kivi`, `turboquant` and `fp8` name the full
cache in such a storage, `kivi` with the residual of its paper; `structural` and `shotkv` name snapkv inside that
wrapper.
"""

if TYPE_CHECKING:

    class PolicySpec(PolicyParts):
        def __getattr__(self, knob: str) -> Any: ...

else:
    PolicySpec = create_model(
        "PolicySpec",
        __base__=PolicyParts,
        __module__=__name__,
        __doc__=_DOC,
        name=(Literal[tuple(METHODS)], "full"),
        **{name: _field(knob) for name, knob in KNOBS.items()},
    )


def own_knobs(name: str, decode: DecodeRule) -> tuple[Knob, ...]:
    """Return the knobs of a method and of the decode rule it is combined with."""
    method = METHODS[name]
    known = {knob.name for knob in method.knobs} | set(method.rule_knobs_refused)
    return (*(knob for rule, knob in _RULES.items() if rule == decode and knob.name not in known), *method.knobs)


def _only(rules: tuple[DecodeRule, ...]) -> str:
    """Say which decode rules a method goes with."""
    phrases = {"append": "only appends", "ring": "is a ring", "argmin": "evicts by score"}
    return " or ".join(phrases[rule] for rule in rules)


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


def _resolve_alias(tree: dict[str, Any]) -> dict[str, Any]:
    """Resolve names that stand for a storage or a wrapper: a storage's may take bits, the wrappers an inner method."""
    name = tree.get("name")
    if not isinstance(name, str):
        return tree
    if by_bits := {storage.bits: storage for storage in STORAGES.values() if storage.alias == name}:
        return _full_cache(by_bits, tree)
    match name:
        case "structural":
            return {"protect": PROTECT, **_without(tree, "inner"), "name": tree.get("inner", "snapkv")}
        case "shotkv":
            return {**_without(tree, "inner"), "name": tree.get("inner", "snapkv"), "shots": True}
    return tree


def _full_cache(by_bits: Mapping[int, StorageFormat], tree: dict[str, Any]) -> dict[str, Any]:
    """Return the full cache in the storage that an alias and its bits name."""
    name = tree["name"]
    if "storage" in tree:
        raise ValueError(f"{name} is a storage itself, got {tree['storage']} besides")
    storage = by_bits[max(by_bits)]
    if len(by_bits) > 1 and "bits" in tree:
        known = tuple(sorted(by_bits))
        if tree["bits"] not in known:
            raise ValueError(f"bits of {name} must be one of {known}, got {tree['bits']}")
        storage, tree = by_bits[tree["bits"]], _without(tree, "bits")
    residual = {"residual": storage.alias_residual or storage.residual} if storage.group > 1 else {}
    return {**residual, **tree, "name": "full", "storage": storage.name}


def _without(tree: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key not in (*keys, "name")}


def split_policies(text: str) -> tuple[str, ...]:
    """Split `a,b:knob=1,knob=2,c`: what reads `knob=value` belongs to the policy before it."""
    return tuple(piece.strip() for piece in re.split(r",(?!\s*\w+=)", text) if piece.strip())


_check_names()
