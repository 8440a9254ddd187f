"""A clip that one Run has begun goes on in another: other chunks, other memory, the same values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from ..runtime.memory import GIB, available_ram
from .run import Run


@dataclass(frozen=True)
class Handover:
    """A clip between two chunks: the frames each stage has taken in, and all histories in host memory by convolution
    key, [halo, H + 2, W + 2, C] with the oldest frame first."""

    done: Counter[str]
    histories: dict[str, Tensor]


def hand_over(run: Run) -> Handover | None:
    """The clip as it stands in `run`. None before its first chunk, and where a chunk was left half-way: its histories
    are then neither the old ones nor the new ones. Raises MemoryError where the host has no room for them."""
    if run.dry or not run.between:
        return None
    there = {key: frames for holder, key in run.holders() if (frames := holder.history(key))}
    size, room = sum(f.nbytes for frames in there.values() for f in frames), available_ram()
    if room is not None and size > room:  # the system would rather end the process than refuse
        raise MemoryError(f"{size / GIB:.2f} GB of histories, {room / GIB:.2f} GB of host memory free")
    histories = {}
    for key, frames in there.items():
        histories[key] = torch.empty((len(frames), *frames[0].shape), dtype=frames[0].dtype)
        for target, frame in zip(histories[key], frames, strict=True):
            target.copy_(frame)
    return Handover(run.done.copy(), histories)


def take_over(run: Run, clip: Handover) -> None:
    """Go on with `clip` in a Run of the same frame size and type, whatever its chunks and parking."""
    run.restart()
    run.done.update(clip.done)
    run.between = True
    for holder, key in run.holders():
        if key in clip.histories:
            holder.adopt(key, clip.histories[key])
