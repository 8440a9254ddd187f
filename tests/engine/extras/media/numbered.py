"""Clips whose frames tell by their brightness which they are."""

from fractions import Fraction

import torch
from zerowaste_vae.engine.extras.media.clips import Clip
from zerowaste_vae.engine.extras.media.mp4 import Format, Mp4Writer

#: Levels between two frames, more than a codec's rounding, and frames until they come again.
STEP, PERIOD = 3, 80


def ramp(count, first=0, height=48, width=64):
    """Frames that tell which they are (of PERIOD) by their brightness."""
    level = torch.arange(first, first + count).remainder(PERIOD).mul(STEP / 255)[:, None, None, None]
    return level.expand(count, height, width, 3)


def numbers(path):
    """Return the numbers of a file's frames, by their brightness."""
    return [round(float(f.float().mean() * (1 if f.dtype == torch.uint8 else 255)) / STEP) for f in Clip(path)]


def counted(count):
    return [n % PERIOD for n in range(count)]


def write(path, frames, piece=5, **options):
    form = options.pop("form", Format(Fraction(12)))
    with Mp4Writer(path, form, **options) as writer:
        for part in frames.split(piece):
            writer.write(part)
    return writer
