"""Transfer of a begun clip from one ExecutionContext to another one: other chunks, other memory, the same values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from ..system.memory import available_ram, in_gb
from .context import ExecutionContext
from .pinned import POOL

#: One part in so many of the free host memory is left free: the system ends the process rather than refuse memory.
SPARE_SHARE = 8


@dataclass(frozen=True)
class Handover:
    """A clip between two chunks: the frames that each stage has taken in, and all histories in host memory.

    Histories are [frames, H + 2, W + 2, C] by convolution key, with the oldest frame first. `take_over` uses them up.
    """

    done: Counter[str]
    histories: dict[str, Tensor]
    #: The clip's features, if the network gathers them.
    gathered: Tensor | None = None


def hand_over(run: ExecutionContext) -> Handover | None:
    """Return the clip as it stands in `run`.

    None before its first chunk, and if a chunk was left half-way: its histories are then a mix of old and new ones.

    Raises: MemoryError if the host has no room for the histories; nothing has been copied then.
    """
    if run.dry or not run.between:
        return None
    there = {key: pieces for holder, key in run.holders() if (pieces := holder.history(key))}
    POOL.release()
    size, room = sum(p.rows.nbytes for pieces in there.values() for p in pieces), available_ram()
    size += run.gathered_bytes
    if room is not None and size > room - room // SPARE_SHARE:
        raise MemoryError(f"{in_gb(size)} of histories, {in_gb(room)} of host memory free")
    histories = {}
    for key, pieces in there.items():
        last = pieces[-1]
        shape = last.frame + 1, last.first + len(last.rows), *last.rows.shape[1:]
        histories[key] = torch.empty(shape, dtype=last.rows.dtype, device="cpu")
        for piece in pieces:
            histories[key][piece.frame, piece.first : piece.first + len(piece.rows)].copy_(piece.rows)
    return Handover(run.done.copy(), histories, None if run.gathered is None else run.gathered.cpu())


def take_over(run: ExecutionContext, clip: Handover) -> None:
    """Go on with `clip` in an ExecutionContext of the same frame size and type, whatever its chunks and parking.

    Each history is freed as soon as the ExecutionContext has its copy.
    """
    run.restart()
    run.done.update(clip.done)
    if clip.gathered is not None:
        run.gathered.copy_(clip.gathered)
    for holder, key in run.holders():
        if key in clip.histories:
            holder.adopt(key, clip.histories.pop(key))
    run.between = True  # only now: if memory runs out before, half a clip is not handed over as a whole one
