"""A compression method: which tokens of a prompt survive the hand-off to decode. One file each in `methods/`.

Importing a method needs neither torch nor `warmkv.policy_spec`, which takes names and knobs from here: budgets,
admission and the simulator read what a method declares. Only scoring needs torch, and imports it when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from warmkv.knobs import Knob
from warmkv.policies import budgets
from warmkv.policies.compression import structural
from warmkv.registry import METHODS

if TYPE_CHECKING:
    from torch import Tensor

    from warmkv.policies.compression.prefill_state import PrefillState
    from warmkv.policies.compression.selection import Selection
    from warmkv.policy_spec import DecodeRule, PolicySpec, Storage

register = METHODS.register


class Method:
    """A compression method under one spec. Stateless: everything about a request is an argument.

    A subclass declares a name and its knobs and overrides `ends` and `score`; everything else has a default.
    """

    name: ClassVar[str]
    knobs: ClassVar[tuple[Knob, ...]] = ()

    # Columns of the tables in docs/policies.md
    keeps: ClassVar[str] = ""
    decoding: ClassVar[str] = ""  # by default the decode rule
    differs: ClassVar[str] = "tokens by head"
    source: ClassVar[str] = "warmkv's own"  # arXiv number, and the code that was read
    deviates: ClassVar[str] = "nothing"  # from that source

    # What it goes with
    decode: ClassVar[DecodeRule] = "append"  # where a policy does not say
    decode_rules: ClassVar[tuple[DecodeRule, ...]] = ("append", "ring", "argmin")
    rule_knobs_refused: ClassVar[tuple[str, ...]] = ()  # knobs of decode rules that have no meaning here
    storages: ClassVar[tuple[Storage, ...]] = ()  # none: all
    has_budget: ClassVar[bool] = True
    has_scores: ClassVar[bool] = True  # wrappers change what scores pick
    delegates: ClassVar[bool] = False  # stands for other methods, by the prompt
    by_default_in_eval: ClassVar[bool] = False

    # What memory is set aside for, and what the engine prepares
    recent_only: ClassVar[bool] = False  # keeps sinks and the most recent tokens, whatever they say
    follows_content: ClassVar[bool] = False  # what a layer or head keeps is known only after the prompt is computed
    shares_layers: ClassVar[bool] = False  # layers share one budget, divided by content
    shares_heads: ClassVar[bool] = False  # KV heads of a layer share one budget
    rebased: ClassVar[bool] = False  # positions are those within the cache: sinks are rotated on
    rotates: ClassVar[bool] = False  # rotates keys or queries to other positions
    reads_segments: ClassVar[bool] = False  # decoding reads some entries only, chosen by segments of the cache
    by_last_step: ClassVar[bool] = False  # argmin goes by the last step's attention, not by the sum over all
    reads_classes: ClassVar[bool] = False  # needs to know which tokens are special

    __slots__ = ("spec",)

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec

    # Before the prompt is computed: tokens, no tensors

    def resolve(self, prompt_tokens: int) -> PolicySpec:
        """Return the policy that runs a prompt of this length; asked where it `delegates`."""
        raise NotImplementedError(f"{self.name} stands for itself")

    def kept(self, budget: int, prompt_tokens: int) -> int:
        """Return the tokens that a KV head keeps on average (at most, where content decides) of a longer prompt."""
        return budget

    def layer_budgets(self, kept: int, prompt_tokens: int, layers: int) -> list[int] | None:
        """Return the tokens per KV head that each layer keeps of a longer prompt, None if all keep `kept`."""
        return None

    def selects_all_lengths(self, prompt_tokens: int) -> bool:
        """Return whether it selects even where the prompt is within the budget."""
        return False

    def segment(self, budget: int, prompt_tokens: int) -> int:
        """Return the entries of a segment, of a prompt that exceeds the budget; asked where `reads_segments`."""
        raise NotImplementedError(f"{self.name} reads everything")

    def read_limit(self, budget: int, prompt_tokens: int, head_dim: int) -> tuple[int, int]:
        """Return the entries that a step may read and the channels it chooses by; asked where `reads_segments`."""
        raise NotImplementedError(f"{self.name} reads everything")

    def observed_queries(self, prompt_tokens: int, compressed: bool) -> int:
        """Return how many of the prompt's last queries decide what is kept, or with which scores decode begins."""
        window = self.spec.window
        if window is None or not compressed or window >= budgets.kept_tokens(self.spec, prompt_tokens):
            return 0
        return int(window)

    def needs_column_sums(self, compressed: bool) -> bool:
        """Return whether it needs the attention that every token received from all queries of the prompt."""
        return False

    def keeps_alike(self) -> bool:
        """Return whether all KV heads of a layer keep the same tokens, by the scores of all heads together."""
        return False

    def ends(self, budget: int) -> tuple[int, int]:
        """Return the tokens at the beginning and at the end of the prompt that are always kept."""
        return 0, 0

    def protected_ends(self, budget: int) -> tuple[int, int]:
        """Return the method's ends, those of a ring's sinks and of structural protection, within the budget."""
        first, last = structural.protect(self.ends(budget), budgets.protected_entries(self.spec, budget), budget)
        if self.spec.decode == "ring":
            first = max(first, min(self.spec.sinks or 0, budget - 1))
        return first, min(last, budget - first)

    def votes_window(self, budget: int) -> int:
        """Return the last queries that vote: the window, unless the budget or a protected beginning leaves less."""
        return min(int(self.spec.window), budget - budgets.protected_entries(self.spec, budget))

    # After the prompt is computed: tensors

    def select(self, prompt: PrefillState) -> list[Selection]:
        """Return what each layer keeps of a prompt."""
        from warmkv.policies.compression import selection

        return selection.select(self, prompt)

    def score(self, prompt: PrefillState, layer: int, budget: int) -> Tensor:
        """Return what each token of a layer is worth: float32 [kv_heads, T]. Called only where something must go."""
        raise NotImplementedError(f"{self.name} keeps what its ends are, and scores nothing")

    def content_budgets(self, prompt: PrefillState) -> list[int]:
        """Return the tokens per KV head (the average where heads differ) that each layer keeps."""
        return budgets.layer_budgets(self.spec, prompt.tokens, prompt.layers)

    def choose(self, scores: Tensor, ends: tuple[int, int], budget: int, prompt: PrefillState) -> Tensor:
        """Return positions [heads, n], ascending, of the best tokens between the ends and of the ends.

        The heads are those of one layer, or of several where each chooses for itself.
        """
        from warmkv.policies.compression import selection

        return selection.choose_per_head(scores, ends, budget, prompt, self.spec.shots)

    def select_layers(self, prompt: PrefillState, layers: range, budget: int) -> list[Tensor]:
        """Return positions [kv_heads, n] that each of some layers keeps of a prompt that exceeds its budget.

        They are several only of a method that `has_scores`.
        """
        from warmkv.policies.compression import selection

        return selection.select_layers(self, prompt, layers, budget)
