"""Frames of histories as a convolution reads them: plain frames, or the planes of the Winograd form."""

from __future__ import annotations

from torch import Tensor

from ..kernels.conv3d import buffer_shape
from ..kernels.norm_act import Norm, Store, norm_act
from .history import Band
from .memory import Memory
from .rings import Frame, Plane, fill_head
from .weights import Conv

COPY = Norm("none")
#: Frames of a history whose bands can be made into planes without visiting a buffer.
KEPT = 2


def frame_of(conv: Conv, plane: Frame) -> Frame:
    """Return the shape in which a plain frame (or band of it) [H + 2, W + 2, C] is stored for `conv` to read."""
    h, w, c = plane[0] - 2, plane[1] - 2, plane[2]
    return buffer_shape(h, w, c) if conv.weight.winograd else plane


def as_read(run: Memory, conv: Conv, data: Tensor) -> Tensor:
    """Return a parked history's visit in the form that `conv` reads; rings already hold that form.

    data: [frames, rows, W + 2, C], or what a ring holds."""
    if not conv.weight.winograd or data.dim() == 5:
        return data
    planes = run.arena.take((data.shape[0], *frame_of(conv, data.shape[1:])), data.dtype)
    if not run.dry:
        from_plain(run, data, planes)
    return planes


def from_plain(run: Memory, plain: Tensor, out: Tensor, slot: int = 0) -> None:
    """Convert plain frames or bands to planes of the same rows in `out`, from `slot` on.

    Planes hold the values that a plain buffer of their type would: a history may have either form. plain: [D, rows, W +
    2, C], as stored."""
    store = Store(silu=False, border=run.border, rounded=True)
    run.attempt(norm_act, plain[:, :, 1:-1], COPY, out, slot=slot, store=store, first=1)


def straight(run: Memory, conv: Conv, behind: int) -> bool:
    """Check whether planes of a parked band are made directly of the convolution's input and its plain history.

    Only the last new frames are then made plain, for the next pass. behind: as for `ExecutionContext.inputs`; if it is
    not 0, planes of several bands would take memory at once."""
    return conv.weight.winograd and conv.history == KEPT and not behind and not run.after


def planes_of_band(
    run: Memory, conv: Conv, x: Tensor, norm: Norm, store: Store, coefs: Tensor | None, band: Band, plane: Plane
) -> Tensor:  # fmt: skip
    """Return planes of a band of x, normalised, after those of its parked history; for `straight` convolutions.

    Args: as in `ExecutionContext.inputs`, besides
        store: how values are stored.
        band: rows to make.
        plane: plain shape of all rows.
    """
    parked, key, count = run.parked, conv.key, min(x.shape[0], KEPT)
    planes = run.arena.take((KEPT + x.shape[0], *frame_of(conv, (band.bottom - band.top, *plane[1:]))), conv.dtype)

    def write(new: Tensor, of: Tensor | None, out: Tensor, slot: int, rows: Band) -> None:
        run.attempt(norm_act, new, norm, out, slot=slot, store=store, coefs=of, first=rows.top, health=run.health)

    write(x, coefs, planes, KEPT, band)
    last, of_last = x[-count:], None if coefs is None else coefs[-count:]
    if parked.stays(key, band):
        _behind(run, parked.held(key, band), planes)
        for part, data, slot in parked.keep(key, band, count, run.head):
            write(last, of_last, data, slot, part)
        return planes
    begins, buffer = parked.begins(key), parked.enter(key, band, count)
    write(last, of_last, buffer.view, KEPT, band)
    parked.arrive(buffer, run.head)
    _behind(run, [] if begins else [buffer.view[:KEPT]], planes)
    parked.leave(buffer)
    return planes


def _behind(run: Memory, history: list[Tensor], planes: Tensor) -> None:
    """Fill the first planes from a plain history's frames, or with the input before a clip."""
    if not history:
        fill_head(planes, list(range(KEPT + 1)), run.head)
    slot = 0
    for frames in history:
        from_plain(run, frames, planes, slot)
        slot += len(frames)
