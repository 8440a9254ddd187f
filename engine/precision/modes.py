"""What a precision asked for means on a device, and in words why it is something else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.cards import AUTO
from ..kernels.targets import has_fp8, target
from ..options import why_no_fp8

#: Plain float types, by their names as precisions.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Precisions besides the plain float types. Activations are of the 16-bit type that a model was made for: bf16 ones may
#: leave fp16's range.
MIXED = ("fp8", "int8", "fp16_fast")


@dataclass(frozen=True)
class Mode:
    """kind: type of 8-bit operands, None: none. half_accumulate: fp16 sums where they are faster. refused: why what
    was asked for (asked) does not run, and what runs instead."""

    kind: str | None = None
    half_accumulate: bool = False
    refused: str | None = None
    asked: str = "fp8"

    @property
    def plain(self) -> bool:
        return self.kind is None and not self.half_accumulate


def resolve(asked: str, device: torch.device, min_db: float, kernels_off: str | None, plain: str = "fp16",
            kernels: str = AUTO) -> Mode:  # fmt: skip
    """asked: "fp8", "int8", "fp16_fast", or any other precision, which "auto" with a floor may go below.

    kernels_off: why the fused kernels cannot run the model so. A CPU runs fp8 and int8 for their numbers' sake.
    plain: the type of the model's activations, and what runs where none of this does. kernels: those asked for.
    """
    emulated = device.type == "cpu"
    if asked not in MIXED and (asked != "auto" or min_db <= 0 or emulated or kernels_off):
        return Mode()
    if kernels_off:
        return Mode(refused=f"{asked} is not to be had ({kernels_off}): {plain} runs instead")
    here = target(device, kernels)
    if asked == "auto":
        return Mode("fp8" if here.fp8 else "int8")
    if asked == "fp16_fast":
        if plain != "fp16":
            return Mode(refused=f"fp16_fast is for models made for fp16: {plain} runs instead")
        if here.half_accumulate:
            return Mode(half_accumulate=True)
        return Mode(refused=f"fp16 sums are no faster on {here.name}: fp16_fast is {plain} here")
    if asked == "fp8" and not emulated and not here.fp8 and not has_fp8(device, kernels):
        return Mode("int8", refused=f"{why_no_fp8(here)}: int8 runs instead")
    return Mode(asked)
