"""Loading a model and its tokenizer, by folder or hub name."""

from __future__ import annotations

import logging
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from warmkv.config import ModelConfig
from warmkv.policies import batching
from warmkv.policies.compression.hook import ATTENTION
from warmkv.policies.compression.observe import kv_shape, rotation
from warmkv.policies.compression.prefill_state import PrefillState, TokenClasses
from warmkv.policies.slot_sizes import KVShape
from warmkv.policy_spec import PolicySpec
from warmkv.replicas.current_device import make_current
from warmkv.replicas.loading import quantized, supported
from warmkv.replicas.loading.adapters import check_adapter
from warmkv.replicas.loading.context import computed_context
from warmkv.replicas.loading.fingerprint import fingerprint
from warmkv.replicas.loading.last_layer import leave_at_drawn
from warmkv.replicas.loading.malloc import grow_segments, keep_freed_memory
from warmkv.replicas.loading.mapped_files import MappedFiles
from warmkv.replicas.loading.packed_weights import can_pack, leave_file, pack_linears, packed_bytes
from warmkv.replicas.loading.structure import check_config, is_listed, layer_traits, refusal
from warmkv.replicas.loading.tokenizer import model_path

log = logging.getLogger(__name__)

FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]  # of a hub model: weights, and all that describes it


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal LM that attends through warmkv, and what the engine must know of it."""

    module: Any  # a transformers PreTrainedModel
    device: torch.device
    dtype: torch.dtype
    kv_shape: KVShape
    max_context: int
    vocabulary: int
    eos_ids: frozenset[int]
    inv_freq: torch.Tensor  # float64 [head_dim / 2] on the device; radians per position of the rotary embedding
    fixed_rotation: bool  # whether a cached key can be rotated to a later position by inv_freq, in every layer
    weights: str  # fingerprint (`fingerprint.py`)
    leaves_at_drawn: bool = False  # whether its last layer can be left out where nothing is drawn
    query_tile: int = 0  # queries of prompts that are attended at a time, 0: as many as there are (`PrefillState`)

    def prefill_state(
        self,
        token_ids: Sequence[int],
        specs: Iterable[PolicySpec],
        classes: TokenClasses | None = None,
        keys_and_values: Iterable[torch.Tensor] | None = None,
    ) -> PrefillState:
        """Allocate the state of a prompt, with all that any of the policies observes; keys and values may be given."""
        return PrefillState.allocate(
            self.kv_shape,
            token_ids,
            specs,
            dtype=self.dtype,
            device=self.device,
            inv_freq=self.inv_freq,
            classes=classes,
            keys_and_values=keys_and_values,
            query_tile=self.query_tile,
        )

    @property
    def keys_per_token(self) -> float:
        """Return the keys to which a token's attention takes as long as the rest of it, roughly."""
        shape = self.kv_shape
        weights = self.weight_bytes() / self.dtype.itemsize
        return batching.keys_per_token(weights, shape.layers, shape.q_heads, shape.head_dim)

    def weight_bytes(self) -> int:
        """Return bytes of parameters and buffers; what is tied counts once."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        plain: int = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
        return plain + packed_bytes(self.module)


def fetch(config: ModelConfig) -> Path:
    """Download a hub model into the hub's cache, unless it is there; return its folder. Others are where they are.

    Processes that share the cache wait for each other's downloads. Raises OSError where it cannot be had, or has no
    weights as safetensors, and AdapterError where there is an adapter.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import HFValidationError, validate_repo_id  # type: ignore[attr-defined]

    folder = Path(model_path(config))
    if not folder.exists():
        try:
            validate_repo_id(config.path)
        except HFValidationError:
            raise FileNotFoundError("it is neither a folder nor a hub name (model.path)") from None
        folder = Path(snapshot_download(config.path, revision=config.revision, allow_patterns=FILES))
    check_adapter(folder)
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"no *.safetensors in {config.path} (model.path)")
    return folder


def resolve_device(name: str) -> torch.device:
    """Resolve `auto` to the first CUDA device where there is one, else the CPU."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Resolve `auto` to bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def load_model(config: ModelConfig, *, packed: bool = True) -> LoadedModel:
    """Load a model for inference on its device, which becomes the thread's current one.

    Weights are packed where that helps, unless `packed` is False. On a CPU this process keeps freed memory from now on.
    Raises OSError if there is no model, ValueError if it cannot be served.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.peft_utils import find_adapter_config_file

    if adapter := find_adapter_config_file(model_path(config), revision=config.revision):
        check_adapter(Path(adapter).parent)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if device.type == "cpu":
        keep_freed_memory()
    elif device.type == "cuda":
        grow_segments()
        make_current(device)
    configured = AutoConfig.from_pretrained(model_path(config), revision=config.revision)
    check_config(configured)  # before weights are read
    if quantized.settle(configured, device):
        return prepare(quantized.load_dense(fetch(config), configured, dtype).to(device), packed=packed)
    load = AutoModelForCausalLM.from_pretrained
    module = load(model_path(config), config=configured, revision=config.revision, dtype=dtype)
    if getattr(configured, "quantization_config", None) is not None and not getattr(module, "is_quantized", False):
        module.to(dtype)  # what a quantiser made plain, as fp8 without a GPU, is of its own dtype
    return prepare(module.to(device), packed=packed)


def prepare(module: Any, *, packed: bool = True) -> LoadedModel:
    """Switch a loaded causal LM to warmkv's attention. Raises ValueError for one that it would compute wrongly."""
    check_config(module.config)
    text = module.config.get_text_config()
    rotary: Any = getattr(module.get_decoder(), "rotary_emb", None)
    if not any(name.endswith("inv_freq") for name, _ in (rotary.named_buffers() if rotary is not None else ())):
        raise refusal(text.model_type, supported.NOT_ROTARY)
    module.eval().requires_grad_(False)
    rope_types = rotary.rope_type if isinstance(rotary.rope_type, dict) else {"": rotary.rope_type}  # by kind of layer
    # Dynamic scaling begins beyond max_position_embeddings, and reads the length at every step.
    rope_types = {kind: "default" if said == "dynamic" else said for kind, said in rope_types.items()}
    rotary.rope_type = rope_types if isinstance(rotary.rope_type, dict) else rope_types[""]
    shape = kv_shape(module)
    inv_freq = rotation(rotary).to(module.device, torch.float64)
    traits = layer_traits(module, shape, inv_freq)
    windows, max_context = tuple(layer.window for layer in traits), computed_context(text)
    if not is_listed(module.config):
        log.warning("%s is not among the families that were compared with transformers", text.model_type)
        if any(0 < window < max_context for window in windows):
            raise refusal(text.model_type, "its layers have windows, of which its configuration does not tell")
    module.set_attn_implementation(ATTENTION)
    device, dtype = module.device, module.get_input_embeddings().weight.dtype
    weights = fingerprint(module)  # before they are packed: then they are no parameters any more
    if packed and can_pack(device, dtype):
        pack_linears(module, MappedFiles.of_process().let_go)
        leave_file(module)
    eos = module.generation_config.eos_token_id if module.generation_config is not None else text.eos_token_id
    return LoadedModel(
        module=module,
        device=device,
        dtype=dtype,
        kv_shape=replace(shape, windows=windows if any(windows) else ()),
        max_context=max_context,
        vocabulary=module.get_input_embeddings().num_embeddings,
        eos_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
        inv_freq=inv_freq,
        fixed_rotation="longrope" not in rope_types.values()
        and _rotations(module.get_decoder()) == 1
        and all(layer.rotates_on for layer in traits),
        weights=weights,
        leaves_at_drawn=leave_at_drawn(module),
    )


def _rotations(decoder: Any) -> int:
    """Count the sets of frequencies of a decoder: those that are close would be one at the positions of the probe."""
    named = decoder.named_buffers()
    return len({tuple(part.tolist()) for name, part in named if name.endswith("inv_freq") and "original" not in name})


def token_classes(tokenizer: Any) -> TokenClasses:
    """Return which tokens of a vocabulary are special, only punctuation, or end a passage with a blank line."""
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    special = torch.zeros(len(texts), dtype=torch.bool)
    flagged = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special]
    special[[token for token in {*flagged, *tokenizer.all_special_ids} if token < len(texts)]] = True
    marks = [bool(text.strip()) and all(c in string.punctuation for c in text.strip()) for text in texts]
    return TokenClasses(
        special=special,
        punctuation=torch.tensor(marks) & ~special,
        separators=torch.tensor(["\n\n" in text for text in texts]),
        ends_line=torch.tensor([text.endswith("\n") for text in texts]),
        starts_line=torch.tensor([text.startswith("\n") for text in texts]),
    )
