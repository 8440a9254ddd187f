"""Passes between products. A row's result does not depend on the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .....kernels.launching import launcher
from .....kernels.operators import operator
from .....kernels.targets import Target

#: Positions and channels of one program of `mixed`.
POSITIONS, CHANNELS = 32, 64
#: Gates of one program of `gates`, and channels of a step.
GATES, DEPTH = 16, 128

# -- in plain torch, fp32 arithmetic -----------------------------------------------------------------------------------


def _layer_normed(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor, *, more: tuple[Tensor, Tensor] | None = None
) -> None:
    total = x.float() if more is None else x.float() + more[0].float()
    out.copy_(F.layer_norm(total.to(x.dtype).float(), (x.shape[1],), weight, bias, eps))
    if more is not None:
        x.copy_(total + more[1])


def _mixed(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, sums: Tensor) -> None:
    h, w, c = x.shape
    padded = F.pad(x.float(), (0, 0, 1, 1, 1, 1))
    total = bias.expand(h, w, c).clone()
    for tap in range(9):
        row, column = divmod(tap, 3)
        total.addcmul_(padded[row : row + h, column : column + w], weight[tap])
    made = F.gelu(total)
    out.copy_(made)
    flat = F.pad(made.view(h * w, c), (0, 0, 0, len(sums) * POSITIONS - h * w))
    torch.sum(flat.view(len(sums), POSITIONS, c), 1, out=sums)


def _gates(sums: Tensor, count: int, weight: Tensor, bias: Tensor, second: Tensor, out: Tensor) -> None:
    out.copy_(second * F.linear(sums / count, weight, bias).sigmoid())


def windows_of(height: int, width: int, window: int, device: torch.device | None = None) -> Tensor:
    """Return the positions of a picture, row by row, that its windows hold: int64 [windows, window^2]. Windows start at
    the top left; where one goes beyond the picture, it holds the nearest position again."""
    rows, columns = (torch.arange(-(-n // window) * window, device=device).clamp_max_(n - 1).view(-1, window)
                     for n in (height, width))  # fmt: skip
    return (rows[:, None, :, None] * width + columns[None, :, None, :]).flatten(2).flatten(0, 1)


def places_in(height: int, width: int, window: int, device: torch.device | None = None) -> Tensor:
    """Return where the windows of `windows_of`, flattened, hold each position of the picture: int64 [H * W]."""
    rows, columns = (torch.arange(n, device=device) for n in (height, width))
    whole = (rows // window)[:, None] * -(-width // window) + columns // window
    return (whole * window**2 + (rows % window)[:, None] * window + columns % window).flatten()


def _windowed(picture: Tensor, window: int, out: Tensor) -> None:
    h, w, c = picture.shape
    torch.index_select(picture.view(h * w, c), 0, windows_of(h, w, window, picture.device).flatten(), out=out)


def _unwindowed(windows: Tensor, window: int, picture: Tensor) -> None:
    h, w, c = picture.shape
    picture.view(h * w, c).add_(windows[places_in(h, w, window, picture.device)])


# -- by kernels --------------------------------------------------------------------------------------------------------


@operator("layer_normed_kernel", reference=_layer_normed)
def layer_normed(
    here: Target, x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor, *,
    more: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Normalise rows by their mean and variance, multiply by a weight and add a bias.

    Args:
        x: [R, C], unit stride between channels.
        weight, bias: float32 [C].
        out: [R, C] contiguous, of x's type or float32.
        more: [R, C] contiguous, first added to x in place; and float32 [C], added to x after it was normalised.
    """
    c = x.shape[1]
    launcher("mixing.layer_normed_kernel", here)[(x.shape[0],)](
        x, *((x, weight) if more is None else more), weight, bias, out, eps, C=c, STRIDE=x.stride(0), BLOCK=_power(c),
        ADDS=more is not None, num_warps=4,
    )  # fmt: skip


def blocks(positions: int) -> int:
    """Return the rows of `sums` that `mixed` writes."""
    return -(-positions // POSITIONS)


@operator("mixed_kernel", reference=_mixed)
def mixed(here: Target, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, sums: Tensor) -> None:
    """Convolve each channel of a picture with 3x3 taps, zeros around it, and apply GELU.

    Args:
        x: [H, W, C] contiguous.
        weight: float32 [9, C], taps row by row.
        bias: float32 [C].
        out: [H, W, C] contiguous, other memory than x's.
        sums: float32 [`blocks(H * W)`, C], the results' sums over as many blocks of positions.
    """
    h, w, c = x.shape
    launcher("mixing.mixed_kernel", here)[(len(sums), -(-c // CHANNELS))](
        x, weight, bias, out, sums, h, w, C=c, BP=POSITIONS, BC=CHANNELS, num_warps=4
    )


@operator("gates_kernel", reference=_gates)
def gates(here: Target, sums: Tensor, count: int, weight: Tensor, bias: Tensor, second: Tensor, out: Tensor) -> None:
    """Multiply the inputs of a product by gates, the sigmoid of a product of means.

    Args:
        sums: float32 [C], of `count` positions.
        weight, bias: float32 [C, C] and [C], of the means.
        second: float32 [K, C], weight of the product whose inputs are gated; K is C.
        out: [K, C] contiguous, that weight with its columns times their gates.
    """
    c = len(sums)
    launcher("mixing.gates_kernel", here)[(-(-c // GATES),)](
        sums, weight, bias, second, out, float(count), C=c, BN=GATES, BK=DEPTH, num_warps=4
    )


@operator("windows_kernel", reference=_windowed)
def windowed(here: Target, picture: Tensor, window: int, out: Tensor) -> None:
    """Copy a picture [H, W, C] into its windows, [windows * window^2, C]. They start at the top left; where one goes
    beyond the picture, it holds the nearest position again."""
    _windows(here, picture, window, out, back=False)


@operator("windows_kernel", reference=_unwindowed)
def unwindowed(here: Target, windows: Tensor, window: int, picture: Tensor) -> None:
    """Add windows to the picture [H, W, C], of whose size `windowed` would make them."""
    _windows(here, picture, window, windows, back=True)


def _windows(here: Target, picture: Tensor, window: int, flat: Tensor, back: bool) -> None:
    h, w, c = picture.shape
    launcher("mixing.windows_kernel", here)[(len(flat),)](
        picture, flat, h, w, SIDE=window, C=c, BLOCK=_power(c), BACK=back, num_warps=4
    )


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
