"""What all ranks of one command must have alike, before any of them writes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..devices.ranks import Ranks
    from ..vae import VideoVAE


def check_alike(args: argparse.Namespace, ranks: Ranks | None, vae: VideoVAE, **files: Path) -> None:
    """Raises InputError on all ranks where one would make parts of something else."""
    from ..devices.alike import of_bits, of_file

    if ranks is not None:
        ranks.check_same(VAE=of_file(vae.path), options=of_bits(vae), norm_groups=args.norm_groups,
                         **{name: of_file(path) for name, path in files.items()})  # fmt: skip
