"""Read the colours that files declare, to convert them to sRGB or to warn: ICC profiles, transfer, primaries, matrices.

Numbers are those of ITU-T H.273, which FFmpeg and PNG use. The curves of BT.709, BT.601 and sRGB count as one, as in
players, and so do their primaries.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageCms

#: Levels of 255 by which a profile may move colours and still count as sRGB with other rounding.
SAME = 2
UNSPECIFIED, LINEAR = 2, 8
_HDR = frozenset({16, 18})  # PQ and HLG
_CURVES = frozenset({1, 2, 6, 7, 11, 12, 13, 14, 15})
_TRANSFERS = {4: "gamma 2.2", 5: "gamma 2.8", 9: "logarithmic light", 10: "logarithmic light", 17: "SMPTE 428"}
_SMALL = frozenset({1, 2, 5, 6, 7, 22})
_PRIMARIES = {4: "BT.470 M", 8: "film", 9: "BT.2020", 10: "XYZ", 11: "DCI-P3", 12: "Display P3"}
#: Matrices of FFmpeg's converter, by their numbers in H.273 -> in the converter: BT.601 has two.
MATRICES = {1: 1, 4: 4, 5: 5, 6: 5, 7: 7, 9: 9}
_OTHER_MATRICES = {
    0: "RGB in the places of YUV", 8: "YCgCo", 10: "BT.2020 with constant luminance", 11: "YDzDx",
    12: "a matrix of their primaries", 13: "a matrix of their primaries", 14: "ICtCp", 15: "IPT-C2", 16: "YCgCo-R",
    17: "YCgCo-R",
}  # fmt: skip


def unconverted(transfer: int, primaries: int) -> Iterator[str]:
    """Yield a line for each property of a source's colours that is not converted to sRGB.

    Args:
        transfer, primaries: numbers of H.273; linear light counts as converted.
    """
    if transfer in _HDR:
        yield "is HDR, and its values are taken as they are: colours come out pale; tone-map it to BT.709 first"
        return
    if transfer not in _CURVES and transfer != LINEAR:
        curve = _TRANSFERS.get(transfer, f"an unknown transfer ({transfer})")
        yield f"its values are of {curve} and are taken as sRGB's: it comes out too light or too dark; convert it first"
    if primaries not in _SMALL:
        space = _PRIMARIES.get(primaries, f"unknown primaries ({primaries})")
        yield f"its colours are of {space} and are taken as BT.709's: they come out paler or stronger; convert it first"


def matrix_of(space: int) -> str:
    """Return the name of a matrix that the converter does not have."""
    return _OTHER_MATRICES.get(space, f"an unknown matrix ({space})")


@functools.cache
def srgb_table(levels: int, exponent: float = 1.0) -> np.ndarray:
    """Return sRGB's value for each of `levels` values whose light is value ** exponent, as unsigned integers."""
    light = np.linspace(0, 1, levels) ** exponent
    curve = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    return np.round(curve * (levels - 1)).astype(np.min_scalar_type(levels - 1))


@functools.lru_cache(maxsize=8)
def transform(profile: bytes | None, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the transform of pictures with an ICC profile to sRGB; None if they are sRGB already.

    Args:
        profile: its bytes; None: CIELAB's profile.
        mode: Pillow's mode of the pictures.

    Raises:
        ImageCms.PyCMSError, OSError: the profile cannot be read or does not fit this mode.
    """
    source = ImageCms.createProfile("LAB") if profile is None else ImageCms.ImageCmsProfile(io.BytesIO(profile))
    made = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    if mode not in ("L", "RGB"):
        return made
    levels = np.linspace(0, 255, 9).astype(np.uint8)
    probe = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(27, 27, 3)
    if mode == "L":
        probe = np.repeat(probe[..., :1], 3, 2)
    shown = ImageCms.applyTransform(Image.fromarray(probe).convert(mode), made)
    same = np.abs(np.asarray(shown).astype(int) - probe).max() <= SAME
    return None if same else made
