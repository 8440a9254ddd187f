"""GPU memory of a diffusion decoder: that of the frames that are in each of its stations when these hold most."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...runtime.pinned import ON_THEIR_WAY
from .kernels.blocks import fuses
from .neighbours import GROUP, ROWS, Kernel, first, in_groups, slots, waiting
from .passes import AHEAD
from .sampling import COLOURS

#: Bytes that are reserved for tensors of less than 10 MiB and are not in use: torch takes 20 MiB at once for these.
PARTS = 32 << 20


@dataclass(frozen=True)
class Held:
    """A block. clip: frames that come to it. frame, kept: values of a frame's tokens, and of all that waits with them.
    work: values at work for a group. early: as of `Attend`."""

    clip: int
    kernel: Kernel
    frame: int
    kept: int
    work: int
    early: bool = False

    def came(self, gone: int) -> int:
        """Return the frames that have come when so many have gone on; for 0, those that it begins with."""
        came = gone + waiting(self.kernel) if gone else first(self.kernel)
        return min(came, self.clip)

    def values(self, gone: int) -> int:
        """Return the values of keys and waiting frames then."""
        if gone >= self.clip:  # its keys are free
            return 0
        return 2 * slots(self.kernel, self.early) * self.frame + (self.came(gone) - gone) * self.kept


@dataclass(frozen=True)
class Made:
    """Samples that are made of tokens. clip: frames that come. stride: frames made of one. behind:
    frames that are held back, of `frame` values each. work: values of a group's samples."""

    clip: int
    stride: int
    behind: int
    frame: int
    work: int

    def came(self, gone: int) -> int:
        """Return the frames that have come when so many have gone on."""
        return min(in_groups(-(-(gone + self.stride - 1) // self.stride)) + self.behind, self.clip)

    def values(self, gone: int) -> int:
        """Return the values of frames that are held back."""
        return min(self.behind, self.clip) * self.frame


def most(stations: Sequence[Held | Made]) -> int:
    """Return the values that a row of stations takes at most: when a block begins, with what is at work there, or
    later, when fewer frames wait in it and any other station works."""
    found = 0
    for at, last in enumerate(stations):
        begins = isinstance(last, Held)
        gone, held, work = 0 if begins else 1, 0, 0
        for station in reversed(stations[: at + 1]):
            held += station.values(gone)
            gone, work = station.came(gone), max(work, station.work)
        fewer = max(last.came(0) - waiting(last.kernel), 0) * last.kept if begins else 0
        found = max(found, held + last.work, held - fewer + work)
    return found


@functools.lru_cache(maxsize=1024)
def needed(
    decoder: Any, latents: int, height: int, width: int, itemsize: int, passes: int, kernels: bool
) -> int:  # fmt: skip
    """Return the bytes that a clip's way through a decoder takes in addition to its weights.

    Args:
        decoder: a NeighbourDecoder.
        latents: of the clip.
        height, width: of the latents.
        passes: in which the clip goes through; 0: until its first frames meet their noise.
        kernels: they run what is between products; False: torch's operators, in float32.
    """
    kernels = kernels and itemsize == 2

    def work(c: int, kernel: Kernel, rows: int, across: int) -> int:
        if kernels and fuses(c, decoder.head, torch.bfloat16):
            return 4 * rows * c  # results of the gate
        some = min(rows, ROWS)
        most = max(3 * rows, rows + 12 * some)  # queries or normalised rows, results; products of the gate
        if not kernels:  # float32 of these, and keys of a row of tiles
            most += 6 * rows + 24 * some + 4 * kernel[0] * (kernel[1] + 7) * (-(-across // 8) * (kernel[2] + 7))
        return most * c

    frames, tokens, across, moving, features = latents + decoder.ghosts, height * width, width, 0, []
    widths = [*(s.width for s in decoder.stages[1:]), decoder.width]
    for i, (stage, after) in enumerate(zip(decoder.stages, widths, strict=True)):
        final = i == len(decoder.stages) - 1
        frame, group, (stride, *sides) = stage.width * tokens, GROUP * tokens, stage.stride
        at_work = work(stage.width, stage.kernel, group, across)
        features += [Held(frames, stage.kernel, frame, frame, at_work, not final)] * stage.layers
        samples = math.prod(stage.stride) * after
        features.append(Made(frames, stride, decoder.held if final else 0, frame, samples * group))
        moving += group * stage.width + samples * group + samples * stage.width  # and the weight in their order
        frames, tokens, across = frames * stride - (stride - 1), tokens * math.prod(sides), across * sides[1]
    frames -= decoder.ghosts * decoder.time[0]
    frame, pixels, blocks = decoder.width * tokens, COLOURS * decoder.patch**2 * tokens, decoder.sampling.steps
    kept, alone = 2 * frame, frame  # it and its context; the last block does not keep that
    if decoder.sampling.velocity or blocks > 1:
        kept = alone = kept + pixels * 4 // itemsize
    blocks *= decoder.layers
    block = Held(frames, decoder.kernel, frame, kept, work(decoder.width, decoder.kernel, GROUP * tokens, across))
    last = replace(block, kept=alone)
    pictures, ends = 11 * decoder.width**2, 8 * GROUP * pixels  # a block's weights; noise on its way, and results
    always = blocks * pictures * itemsize + PARTS
    copied = ON_THEIR_WAY * 4 * GROUP * pixels  # float32
    if passes == 0:
        return itemsize * (most(features) + moving) + always
    if passes == 1:
        return itemsize * (most([*features, *[block] * (blocks - 1), last]) + moving + ends) + always + copied
    # Frames that come from host memory, before the group's samples are made. They have blocks of memory of their own.
    comes = AHEAD * GROUP * (frame + features[-1].frame) + group * stage.width + samples * (group + stage.width)
    row = most([block] * -(-blocks // (passes - 1))) + ends + comes + block.work // 2
    return max(itemsize * (most(features) + moving), itemsize * row + copied) + always
