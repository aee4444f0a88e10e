"""Asymmetric integers: codes of a few bits between the least and the greatest number of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Below float16's 65504 by more than the rounding of a step, 15 times, can add: decoding gives no infinity.
LARGEST = 65_000.0
# A group whose step is smaller counts as constant. Below, float16 has so few bits left that rounding the step could
# cost the largest number its highest code; encoding what was decoded would then give other codes.
SMALLEST_STEP = 2.0**-20


def quantise(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return uint8 codes of float32 `x`, and a float16 zero point and step for each group, which is all of dimension
    `dim`.

    Codes are computed with the zero point and the step as stored, so that the rounding of these adds next to no error.
    The least number has code 0 and the greatest the highest, so encoding what was decoded finds the same range.
    """
    import torch

    highest = 2**bits - 1
    least = x.amin(dim, keepdim=True)
    spacing = _half_spacing(least)
    zero = (least / spacing).ceil() * spacing  # upwards: one that is below the least number might not give it code 0
    step = (x.amax(dim, keepdim=True) - zero) / highest
    spacing = _half_spacing(step)
    step = (step / spacing).round() * spacing
    step = torch.where(step < SMALLEST_STEP, 0.0, step)  # or negative: the zero point may be above a narrow group
    codes = ((x - zero) / torch.where(step == 0, 1.0, step)).round().clamp(0, highest).to(torch.uint8)
    return codes, zero.half(), step.half()


def dequantise(codes: Tensor, zero: Tensor, step: Tensor) -> Tensor:
    """Return the numbers, float32, that codes stand for."""
    return zero.float().addcmul(step.float(), codes.float())


def _half_spacing(x: Tensor) -> Tensor:
    """Return the distance between neighbouring float16 numbers at float32 `x`, by its exponent.

    Rounding to it stays in float32, because a compiler that fuses `x.half().float()` leaves out the rounding.
    """
    import torch

    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # the greatest power of two that is not beyond |x|
    return power.clamp(min=2.0**-14) * 2.0**-10
