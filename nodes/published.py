"""Sizes of the VAEs that are published, by how their files are named: for plans before a file is there."""

from __future__ import annotations

import re

from ..engine.archs import Architecture, seedvr2, wan

SEEDVR2 = seedvr2.Config((128, 256, 512, 512), (128, 256, 512, 512))
WAN21 = wan.Config((96, 192, 384, 384), (96, 192, 384, 384))
WAN22 = wan.Config((160, 320, 640, 640), (256, 512, 1024, 1024), 48, 2)

#: In this order: names of Wan 2.2's own VAE hold "wan" too. Reduced decoders (taew, lightvae) are other networks.
_NAMED: tuple[tuple[str, str, Architecture, object], ...] = (
    (r"tae|lighttae|lightvae", "", seedvr2.ARCHITECTURE, None),
    (r"wan[ _.-]*2[._]?2[ _.-]*(5b[ _.-]*)?vae", "Wan 2.2", wan.WAN22, WAN22),
    (r"wan|qwen[ _.-]*image", "Wan 2.1", wan.WAN21, WAN21),
    (r"seedvr|ema_vae", "SeedVR2", seedvr2.ARCHITECTURE, SEEDVR2),
)


def by_name(file: str) -> tuple[str, Architecture, object] | None:
    """(what it is called, architecture, sizes) of the published VAE that a file of this name holds, or None."""
    for pattern, title, architecture, config in _NAMED:
        if re.search(pattern, file, re.IGNORECASE):
            return None if config is None else (title, architecture, config)
    return None
