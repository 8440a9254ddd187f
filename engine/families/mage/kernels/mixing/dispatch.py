"""Dispatch of the passes between products: kernels where there are some, else torch. A row's result does not depend on
the others."""

from __future__ import annotations

from torch import Tensor

from .....kernels.launching import launcher
from .....kernels.observe import observed
from .....kernels.targets import kernels_for, on_device
from . import reference

#: Positions and channels of one program of `mixed`.
POSITIONS, CHANNELS = 32, 64
#: Gates of one program of `gates`, and channels of a step.
GATES, DEPTH = 16, 128


@observed
def layer_normed(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor, *, more: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> None:  # fmt: skip
    """Normalise rows by their mean and variance, multiply by a weight and add a bias.

    Args:
        x: [R, C], unit stride between channels.
        weight, bias: float32 [C].
        out: [R, C] contiguous, of x's type or float32.
        more: [R, C] contiguous, first added to x in place; and float32 [C], added to x after it was normalised.
    """
    here = kernels_for(x.device, backend)
    if here is None:
        reference.layer_normed(x, weight, bias, eps, out, more)
        return
    c = x.shape[1]
    with on_device(x):
        launcher("mixing.layer_normed_kernel", here)[(x.shape[0],)](
            x, *((x, weight) if more is None else more), weight, bias, out, eps, C=c, STRIDE=x.stride(0),
            BLOCK=_power(c), ADDS=more is not None, num_warps=4,
        )  # fmt: skip


def blocks(positions: int) -> int:
    """Return the rows of `sums` that `mixed` writes."""
    return -(-positions // POSITIONS)


@observed
def mixed(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, sums: Tensor, *, backend: str = "auto") -> None:
    """Convolve each channel of a picture with 3x3 taps, zeros around it, and apply GELU.

    Args:
        x: [H, W, C] contiguous.
        weight: float32 [9, C], taps row by row.
        bias: float32 [C].
        out: [H, W, C] contiguous, other memory than x's.
        sums: float32 [`blocks(H * W)`, C], the results' sums over as many blocks of positions.
    """
    here = kernels_for(x.device, backend)
    if here is None:
        reference.mixed(x, weight, bias, out, sums, POSITIONS)
        return
    h, w, c = x.shape
    with on_device(x):
        launcher("mixing.mixed_kernel", here)[(len(sums), -(-c // CHANNELS))](
            x, weight, bias, out, sums, h, w, C=c, BP=POSITIONS, BC=CHANNELS, num_warps=4
        )


@observed
def gates(
    sums: Tensor, count: int, weight: Tensor, bias: Tensor, second: Tensor, out: Tensor, *, backend: str = "auto"
) -> None:
    """Multiply the inputs of a product by gates, the sigmoid of a product of means.

    Args:
        sums: float32 [C], of `count` positions.
        weight, bias: float32 [C, C] and [C], of the means.
        second: float32 [K, C], weight of the product whose inputs are gated; K is C.
        out: [K, C] contiguous, that weight with its columns times their gates.
    """
    here = kernels_for(sums.device, backend)
    if here is None:
        reference.gates(sums, count, weight, bias, second, out)
        return
    c = len(sums)
    with on_device(sums):
        launcher("mixing.gates_kernel", here)[(-(-c // GATES),)](
            sums, weight, bias, second, out, float(count), C=c, BN=GATES, BK=DEPTH, num_warps=4
        )


@observed
def windowed(picture: Tensor, window: int, out: Tensor, *, backend: str = "auto") -> None:
    """Copy a picture [H, W, C] into its windows, [windows * window^2, C]. They start at the top left; where one goes
    beyond the picture, it holds the nearest position again."""
    _windows(picture, window, out, False, backend)


@observed
def unwindowed(windows: Tensor, window: int, picture: Tensor, *, backend: str = "auto") -> None:
    """Add windows to the picture [H, W, C], of whose size `windowed` would make them."""
    _windows(picture, window, windows, True, backend)


def _windows(picture: Tensor, window: int, flat: Tensor, back: bool, backend: str) -> None:
    here = kernels_for(picture.device, backend)
    if here is None:
        if back:
            reference.unwindowed(flat, window, picture)
        else:
            reference.windowed(picture, window, flat)
        return
    h, w, c = picture.shape
    with on_device(picture):
        launcher("mixing.windows_kernel", here)[(len(flat),)](
            picture, flat, h, w, SIDE=window, C=c, BLOCK=_power(c), BACK=back, num_warps=4
        )


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
