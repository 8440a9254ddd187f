"""Products of a transformer's tokens with a weight, in 16 bit or in 8 bit with a scale for each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.observe import observed
from ..kernels.targets import FP8
from ..kernels.tokens import LIMITS, multiplied, summed
from .codes import Codes

#: Scale of a row of zeros.
LEAST_SCALE = 1e-12
#: 8-bit products of the libraries refuse row counts that are small or odd: 47 in fp8, less than 17 in int8.
FEWEST_ROWS, ROW_STEP = 128, 16
#: Operand types of products by the name of their precision.
KINDS = {"fp8": FP8, "int8": torch.int8}


@dataclass(frozen=True)
class Product:
    """A weight [N, K] and bias [N] of one product; 8-bit weights have scales [N]. turn: columns of its inputs that are
    rotated together; 0: none are. pairs: rows 2 i and 2 i + 1 are those of a gate and of what it is multiplied with,
    and the product's results are SiLU of the one times the other; int8 only."""

    weight: Tensor
    bias: Tensor
    scales: Tensor | None = None
    turn: int = 0
    pairs: bool = False

    def paired(self) -> Product:
        """Return the product with `pairs`, of one whose first half of rows are the gates."""
        weight, bias, scales = (
            t.view(2, -1, *t.shape[1:]).transpose(0, 1).flatten(0, 1) for t in (self.weight, self.bias, self.scales)
        )
        return Product(weight, bias, scales, self.turn, True)

    @classmethod
    def of(cls, linear: torch.nn.Linear, kind: str | None, dtype: torch.dtype, device: torch.device) -> Product:
        """Pack a linear layer. `kind` is the type of the weight, None: `dtype`, which is that of the bias in any
        case. The int8 codes of a file are taken as they are."""
        bias, codes = linear.bias.to(device, dtype), Codes.of(linear) if kind == "int8" else None
        if codes is not None:
            return cls(codes.values.to(device), bias, codes.scales.to(device), codes.group)
        weight = linear.weight.to(device)
        if kind is None:
            return cls(weight.to(dtype), bias)
        codes, scales = coded(weight, kind)
        return cls(codes, bias, scales)


def coded(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return a weight [N, K] in 8 bit ("fp8" or "int8"), and the scales of its rows, float32 [N]."""
    codes, wide = torch.empty(weight.shape, dtype=KINDS[kind], device=weight.device), weight.float()
    low, high = torch.aminmax(wide, dim=1)
    scales = (torch.maximum(-low, high) / LIMITS[KINDS[kind]]).clamp_min_(LEAST_SCALE)
    wide = (wide.clone() if wide is weight else wide).div_(scales[:, None])
    codes.copy_(wide.round_() if kind == "int8" else wide)
    return codes, scales


@observed
def product(
    p: Product, x: Tensor, out: Tensor, scales: Tensor | None = None, sums: Tensor | None = None, *,
    scale: Tensor | None = None, backend: str = "auto",
) -> None:  # fmt: skip
    """Compute x [R, K] times the weight, plus the bias, into out [R, N], or what `Product.pairs` says into [R, N / 2].

    Args:
        scales: [R], of 8-bit rows.
        sums: int32, as `multiplied` needs it.
        scale: [N], of int8 products: they are added to out times this. out may then lack rows at the end.
    """
    if p.scales is None:
        torch.addmm(p.bias, x, p.weight.t(), out=out)
    elif p.weight.dtype == torch.int8:
        multiplied(x, p.weight, scales, p.scales, p.bias, out, sums, pairs=p.pairs, scale=scale, backend=backend)
    elif x.is_cuda:
        torch._scaled_mm(x, p.weight.t(), scales[:, None], p.scales[None, :], bias=p.bias, out_dtype=out.dtype,
                         use_fast_accum=True, out=out)  # fmt: skip
    else:  # the same numbers, for a CPU
        summed(x.float() @ p.weight.float().t(), scales, p.scales, p.bias, out)


def wide_of(kind: str | None, dtype: torch.dtype) -> torch.dtype:
    """Return the result type of products: fp8 products of the libraries with row scales give bf16 only."""
    return torch.bfloat16 if kind == "fp8" else dtype


def product_rows(rows: int, kind: str | None) -> int:
    """Return the rows of a product for `rows` tokens, including padding."""
    return rows if kind is None else max(FEWEST_ROWS, -(-rows // ROW_STEP) * ROW_STEP)
