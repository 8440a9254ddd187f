"""Check that all ranks of one command have the same inputs, before any of them writes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..devices.ranks import Ranks
    from ..vae import VideoVAE


def check_alike(args: argparse.Namespace, ranks: Ranks | None, vae: VideoVAE, **files: Path) -> None:
    """Check that all ranks have the same VAE, options that change bits, norm groups and files.

    Args:
        args: of the command.
        ranks: of torchrun; None: there is one process, and nothing is checked.
        vae: the loaded VAE.
        files: input files, by the names that the error shows.
    Raises:
        InputError: on all ranks, where one of them differs.
    """
    from ..devices.alike import of_bits, of_file

    if ranks is not None:
        ranks.check_same(VAE=of_file(vae.path), options=of_bits(vae), norm_groups=args.norm_groups,
                         **{name: of_file(path) for name, path in files.items()})  # fmt: skip
