"""Dequantise checkpoints of GPTQ and AWQ: integers of 2, 4 or 8 bits, packed in 32, with a scale and a zero a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

AWQ_ORDER = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}
"""Places within 32 bits of the columns that follow each other, by the bits of one (AutoAWQ's `gemm` layout)."""

BITS = (2, 4, 8)
PARTS = {"gptq": ("qweight", "qzeros", "scales", "g_idx"), "awq": ("qweight", "qzeros", "scales")}
"""Tensors that a weight is stored as."""
FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
"""Layouts of each method that are read here, as a checkpoint's configuration names them."""


def gptq_weight(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor, *, zero_offset: int) -> Tensor:
    """Dequantise a weight of GPTQ (Frantar et al., 2022, arXiv 2210.17323) to float32 [out, in].

    `qweight` int32 [in * bits / 32, out] packs rows, `qzeros` int32 [groups, out * bits / 32] columns; `scales`
    [groups, out]; `g_idx` [in] is the group of each row. `zero_offset` is 1 where zeros are stored less one, as GPTQ's
    first format does.
    """
    groups = g_idx.long()
    bits = _bits(qweight.shape[0], len(groups))
    rows = _unpack(qweight, bits).transpose(1, 2).flatten(0, 1)
    zeros = _unpack(qzeros, bits).flatten(1) + zero_offset
    return ((rows - zeros[groups]) * scales.float()[groups]).T.contiguous()


def awq_weight(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """Dequantise a weight of AWQ (Lin et al., 2023, arXiv 2306.00978) to float32 [out, in].

    `qweight` int32 [in, out * bits / 32] and `qzeros` int32 [groups, out * bits / 32] pack columns, in `AWQ_ORDER`;
    `scales` [groups, out].
    """
    bits = _bits(qweight.shape[1], scales.shape[1])
    if bits not in AWQ_ORDER:
        raise ValueError(f"AWQ weights of {bits} bits")
    order = list(AWQ_ORDER[bits])
    numbers, zeros = (_unpack(packed, bits)[..., order].flatten(1) for packed in (qweight, qzeros))
    size = len(numbers) // len(zeros)
    zeros, factors = (each.repeat_interleave(size, dim=0) for each in (zeros, scales.float()))
    return ((numbers - zeros) * factors).T.contiguous()


def dense_weights(folder: Path, method: str, layout: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read a folder's *.safetensors and dequantise what is quantised by GPTQ or AWQ to a dtype, one weight at a time.

    `layout` is one of `FORMATS`. The parts of a weight may be in several files. Raises ValueError, with the weight's
    name, for integers of other sizes and for parts that are missing.
    """
    dense: dict[str, Tensor] = {}
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in sorted(folder.glob("*.safetensors"))]
        stored = {name: file for file in files for name in sorted(file.keys())}
        quantised = {name.rpartition(".")[0] for name in stored if name.endswith((".qweight", ".qzeros"))}
        for name, file in stored.items():
            stem, _, part = name.rpartition(".")
            if stem not in quantised or part == "bias":
                dense[name] = file.get_tensor(name)
        for stem in sorted(quantised):
            try:
                weight = _weight(_parts(stored, stem, PARTS[method]), method, layout)
            except ValueError as error:
                raise ValueError(f"{stem} in {folder}: {error}") from error
            dense[f"{stem}.weight"] = weight.to(dtype)
    return dense


def _weight(parts: dict[str, Tensor], method: str, layout: str) -> Tensor:
    if method == "awq":
        return awq_weight(**parts)
    return gptq_weight(**parts, zero_offset=1 if layout == "gptq" else 0)


def _parts(stored: Mapping[str, Any], stem: str, parts: Sequence[str]) -> dict[str, Tensor]:
    """Read the parts of a weight, each from its file. Raises ValueError where one is missing."""
    if missing := [part for part in parts if f"{stem}.{part}" not in stored]:
        raise ValueError(f"no {', '.join(missing)}")
    return {part: stored[f"{stem}.{part}"].get_tensor(f"{stem}.{part}") for part in parts}


def _bits(packed: int, numbers: int) -> int:
    """Return the bits of an integer, of which `numbers` are in `packed` of 32. Raises ValueError for odd ones."""
    bits, rest = divmod(32 * packed, numbers)
    if rest or bits not in BITS:
        raise ValueError(
            f"{numbers} integers in {32 * packed} bits, where {', '.join(map(str, BITS))} bits each are read"
        )
    return bits


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers in int32 [n, m], lowest bits first: [n, m, 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (packed[..., None] >> shifts) & (1 << bits) - 1
